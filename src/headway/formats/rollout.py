"""The rollout record, schema version 1, as compact bytes: a payload of samples, and a header around it.

A payload is opaque to the orchestrator: a worker encodes it once, the journal stores it, and the batch opens it. Little-endian, by columns
over all samples (N tokens, M version spans in total), so that thousands of samples concatenate with few copies:

    magic  samples  N  M  tail_bytes            "HWS" 0x01, 4 x uint32
    tokens and spans of each sample             2 x samples x uint32
    token_ids int32[N]  span_start int32[M]  span_version int32[M]  logprobs float32[N]  sampled uint8[N]  loss uint8[N]
    tail                                        msgpack: [[policy_id, {extra: [dtype, shape, bytes]}] per sample]; empty when all default

A record is the msgpack map of a `types.Rollout`, payload included. Decoding copies nothing of a payload, and refuses what is cut short or
garbled with a StorageError; that no bit flipped is the business of the journal's checksums.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headway.errors import StorageError
from headway.formats.bounded import brief
from headway.types import Rollout, Sample

SCHEMA_VERSION = 1
DEFAULT_POLICY = "policy"
UNKNOWN_VERSION = -1  # stamp of what no engine of this run wrote: replayed and external rollouts

_MAGIC = b"HWS" + bytes([SCHEMA_VERSION])
_HEADER = struct.Struct("<4s4I")
_INT32, _FLOAT32, _BOOL = np.dtype("<i4"), np.dtype("<f4"), np.dtype(np.bool_)

_EXTRA_KINDS = "biuf"  # booleans, integers, floats
_EXTRA_DTYPE = re.compile(rf"[<|][{_EXTRA_KINDS}][0-9]{{1,2}}", re.ASCII)

_Extra = tuple[str, tuple[int, ...], memoryview]
_tail_encoder = msgspec.msgpack.Encoder()
_tail_decoder = msgspec.msgpack.Decoder(list[tuple[str, dict[str, _Extra]]])
_rollout_encoder = msgspec.msgpack.Encoder()
_rollout_decoder = msgspec.msgpack.Decoder(Rollout)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The token data of many samples side by side; `tokens` and `spans` count those of each sample.

    `token_ids` int32 (N), `logprobs` float32 (N), `sampled` / `loss` bool (N), `span_start` / `span_version` int32 (M); starts count the
    sampled tokens of their sample from 0. `tail` holds what few samples have.
    """

    tokens: tuple[int, ...]
    spans: tuple[int, ...]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    sampled: npt.NDArray[np.bool_]
    loss: npt.NDArray[np.bool_]
    span_start: npt.NDArray[np.int32]
    span_version: npt.NDArray[np.int32]
    tail: memoryview


def _column(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    if array.dtype != dtype or array.ndim != 1 or len(array) != length:
        raise ValueError(f"Sample.{name} must be {dtype.name} of shape ({length},), not {array.dtype.name} of shape {array.shape}")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _extras(sample: Sample) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    extras: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, array in sample.extras.items():
        if array.dtype.kind not in _EXTRA_KINDS:
            raise ValueError(f"Sample.extras[{name!r}] has dtype {array.dtype}: only numbers and booleans can be stored")
        little = array.dtype.newbyteorder("<")
        extras[name] = (little.str, array.shape, array.astype(little, copy=False).tobytes())
    return extras


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Encode the samples of a rollout (at least one) as its payload.

    Raises ValueError for a sample without tokens, and for arrays whose dtype or length is not that of `types.Sample`.
    """
    if not samples:
        raise ValueError("a rollout holds at least one sample")
    ids, starts, versions, logprobs, sampled, loss = [], [], [], [], [], []
    for sample in samples:
        n, m = len(sample.token_ids), len(sample.span_start)
        if not n:
            raise ValueError("a sample holds at least one token")
        ids.append(_column("token_ids", sample.token_ids, _INT32, n))
        starts.append(_column("span_start", sample.span_start, _INT32, m))
        versions.append(_column("span_version", sample.span_version, _INT32, m))
        logprobs.append(_column("logprobs", sample.logprobs, _FLOAT32, n))
        sampled.append(_column("sampled_mask", sample.sampled_mask, _BOOL, n))
        loss.append(_column("loss_mask", sample.loss_mask, _BOOL, n))
    plain = all(sample.policy_id == DEFAULT_POLICY and not sample.extras for sample in samples)
    tail = b"" if plain else _tail_encoder.encode([(sample.policy_id, _extras(sample)) for sample in samples])
    tokens, spans = [len(a) for a in ids], [len(a) for a in starts]
    header = _HEADER.pack(_MAGIC, len(samples), sum(tokens), sum(spans), len(tail))
    counts = struct.pack(f"<{2 * len(samples)}I", *tokens, *spans)
    # numpy arrays are buffers: joined without a copy of their own
    return b"".join([header, counts, *ids, *starts, *versions, *logprobs, *sampled, *loss, tail])  # type: ignore[list-item]


def decode_columns(data: bytes | memoryview) -> Columns:
    """Open a payload as read-only views into `data`. Checks its structure (sizes, masks); raises StorageError.

    What a stamp or a number says is checked by `decode_samples`, and for whole batches at once by `formats.batch.assemble`.
    """
    size = len(data)
    if size < _HEADER.size:
        raise StorageError(f"rollout payload is cut short: {size} bytes hold no header")
    magic, samples, n, m, tail_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise StorageError(f"not a rollout payload of schema version {SCHEMA_VERSION}: it begins with {magic!r}")
    start = _HEADER.size + 8 * samples
    if size != start + 10 * n + 8 * m + tail_bytes:
        raise StorageError(f"rollout payload is cut short or garbled: {size} bytes, its header says {start + 10 * n + 8 * m + tail_bytes}")
    counts = struct.unpack_from(f"<{2 * samples}I", data, _HEADER.size)
    tokens, spans = counts[:samples], counts[samples:]
    if not samples or 0 in tokens or sum(tokens) != n or sum(spans) != m:
        raise StorageError("rollout payload is garbled: the lengths of its samples do not add up")
    words = np.frombuffer(data, _INT32, 2 * n + 2 * m, start)
    flags = np.frombuffer(data, np.uint8, 2 * n, start + 8 * n + 8 * m)
    if flags.max() > 1:
        raise StorageError("rollout payload is garbled: a mask holds other values than 0 and 1")
    masks = flags.view(_BOOL)
    return Columns(
        tokens=tokens,
        spans=spans,
        token_ids=words[:n],
        span_start=words[n : n + m],
        span_version=words[n + m : n + 2 * m],
        logprobs=words[n + 2 * m :].view(_FLOAT32),
        sampled=masks[:n],
        loss=masks[n:],
        tail=memoryview(data)[size - tail_bytes :],
    )


def span_lengths(columns: Columns) -> npt.NDArray[np.int64]:
    """Return how many sampled tokens each version span covers, int64 (M), having checked what the masks and stamps say.

    Raises StorageError unless every loss token is sampled, each sample's spans start at its first sampled token, rise, and stay within
    it, versions are 0 or more (or `UNKNOWN_VERSION`), and log-probabilities are finite.
    """
    if (columns.loss > columns.sampled).any():
        raise StorageError("rollout payload is garbled: a loss mask covers a token that was not sampled")
    if not np.isfinite(columns.logprobs).all():
        raise StorageError("rollout payload holds a log-probability that is not finite")
    tokens, spans = np.array(columns.tokens), np.array(columns.spans)
    sampled = np.add.reduceat(columns.sampled, tokens.cumsum() - tokens, dtype=np.int64)
    if ((sampled > 0) != (spans > 0)).any():
        raise StorageError("rollout payload is garbled: sampled tokens without a version stamp, or stamps without sampled tokens")
    ends = sampled.cumsum()
    bounds: npt.NDArray[np.int64] = np.append(columns.span_start + (ends - sampled).repeat(spans), ends[-1])
    lengths = bounds[1:] - bounds[:-1]
    first = (spans.cumsum() - spans)[spans > 0]
    if len(first) and (columns.span_start[first].any() or lengths.min() < 1 or columns.span_version.min() < UNKNOWN_VERSION):
        raise StorageError("rollout payload is garbled: its version stamps do not cover its sampled tokens in order")
    return lengths


def _extra(kind: str, shape: tuple[int, ...], raw: memoryview) -> npt.NDArray[Any]:
    if not _EXTRA_DTYPE.fullmatch(kind):  # numpy reads a whole language here, and raises SyntaxError for a comma
        raise ValueError(f"dtype {kind[:20]!r}")
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    return np.frombuffer(raw, np.dtype(kind)).reshape(shape)


def decode_tail(columns: Columns) -> list[tuple[str, dict[str, npt.NDArray[Any]]]] | None:
    """Return (policy_id, extras) of each sample, extras as views; None when all are default and empty. Raises StorageError."""
    if not columns.tail:
        return None
    try:
        rows = _tail_decoder.decode(columns.tail)
        opened = [(policy, {name: _extra(*extra) for name, extra in extras.items()}) for policy, extras in rows]
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise StorageError(f"rollout payload is garbled: its extras cannot be read: {error}") from error
    if len(opened) != len(columns.tokens):
        raise StorageError("rollout payload is garbled: its extras belong to another number of samples")
    return opened


def decode_samples(data: bytes | memoryview) -> list[Sample]:
    """Decode a payload into its samples, as read-only views into `data`; raises StorageError for anything but a whole, sane payload."""
    columns = decode_columns(data)
    span_lengths(columns)
    tail = decode_tail(columns)
    if len(columns.tokens) == 1:
        policy, extras = tail[0] if tail else (DEFAULT_POLICY, {})
        return [
            Sample(
                columns.token_ids,
                columns.sampled,
                columns.loss,
                columns.logprobs,
                columns.span_start,
                columns.span_version,
                policy,
                extras,
            )
        ]
    samples = []
    token_ends, span_ends = accumulate(columns.tokens), accumulate(columns.spans)
    for i, (n, m, end, span_end) in enumerate(zip(columns.tokens, columns.spans, token_ends, span_ends, strict=True)):
        policy, extras = tail[i] if tail else (DEFAULT_POLICY, {})
        here, stamps = slice(end - n, end), slice(span_end - m, span_end)
        samples.append(
            Sample(
                token_ids=columns.token_ids[here],
                sampled_mask=columns.sampled[here],
                loss_mask=columns.loss[here],
                logprobs=columns.logprobs[here],
                span_start=columns.span_start[stamps],
                span_version=columns.span_version[stamps],
                policy_id=policy,
                extras=extras,
            )
        )
    return samples


def encode_rollout(rollout: Rollout) -> bytes:
    """Encode a whole record, header and payload. `metadata` must hold plain values (JSON's)."""
    return _rollout_encoder.encode(rollout)


def decode_rollout(data: bytes | memoryview) -> Rollout:
    """Decode a record; raises StorageError unless `data` is exactly one."""
    try:
        return _rollout_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(f"rollout record is garbled: {brief(error)}") from error
