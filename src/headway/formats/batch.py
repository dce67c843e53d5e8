"""Batches: whole groups of rollouts become flat tensors for a trainer and Parquet rows for people; the bound is enforced here.

    contributes(token) = loss_mask and (on_stale != "mask" or k - version <= max_staleness) and its rollout is not masked as over-length

Only "mask" masks: with "wait" and "drop" no token may be too old, and one that is must be found and not hidden. Replayed and external
rollouts have no version (-1) and are outside of the bound; how many of their tokens contribute is told in the manifest.

Advantages come with the groups, computed over all scored members before and regardless of the mask. A sample without a contributing token
stays out of the tensors, and a rollout without one stays in the record with its cause. `batch.safetensors` holds no packing and no padding:
only a trainer knows its parallelism. Writer and reader check the bound, each on the arrays it has in hand: the double lock. With "train"
there is none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from headway.errors import BoundBreached, StorageError
from headway.formats.batch_metrics import metrics_row
from headway.formats.bounded import brief
from headway.formats.files import storage_errors, sync
from headway.formats.manifest import NAME as MANIFEST
from headway.formats.manifest import publish, read_manifest, staging, verify, write_manifest
from headway.formats.records import NOT_SAMPLED, Records, open_records
from headway.formats.run_directory import RunDirectory
from headway.types import Batch, Cause, OnStale

CONTRACT_VERSION = 1
TENSORS = "batch.safetensors"
RECORDS = "rollouts.parquet"
METRICS = "metrics"  # in the manifest: the orchestrator's part of the batch's row in metrics.jsonl
NAMED = 5  # rollouts that a breach names

DTYPES: Mapping[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "sample_offsets": np.dtype(np.int64),
    "sample_rollout": np.dtype(np.int32),
    "sample_group": np.dtype(np.int32),
    "sample_length": np.dtype(np.int32),
}
"""The arrays of `batch.safetensors` (meaning and shapes: `TrainerBatch`)."""


class ArrayFact(msgspec.Struct, frozen=True):
    """Shape and dtype of one array, so that a rank can plan its slice without opening the file."""

    dtype: str
    shape: tuple[int, ...]


class BatchFacts(msgspec.Struct, frozen=True):
    """What a batch's manifest says beside its files.

    `batch` is k. `min_contributing_version` is that of live tokens (k where there are none); `replayed_tokens` contribute and are not live.
    """

    batch: int
    max_staleness: int
    on_stale: OnStale
    temperature: float
    min_contributing_version: int
    contributing_tokens: int
    arrays: dict[str, ArrayFact]
    replayed_tokens: int = 0
    contract_version: int = CONTRACT_VERSION


@dataclass(frozen=True, slots=True, eq=False)
class AssembledBatch:
    """A batch ready to be written: tensors by name (`DTYPES`), manifest facts, the record with what became of it, the metrics row."""

    facts: BatchFacts
    arrays: Mapping[str, npt.NDArray[Any]]
    records: Records
    trained: npt.NDArray[np.bool_]
    drop_causes: tuple[Cause | None, ...]
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class TrainerBatch:
    """A batch as a trainer reads it: flat arrays over n tokens of s samples, checked.

    Over tokens: `token_ids` int32; `loss_mask` uint8 (1: contributes); `logprobs` float32 of the behaviour policy, 0 where not sampled;
    `advantages` float32, that of the token's rollout; `versions` int32, -1 where not sampled and in replayed and external rollouts. Over
    samples: `sample_offsets` int64 (s + 1); `sample_rollout` int32, row in `rollouts.parquet`; `sample_group` int32, place of its group in
    the batch (minibatches are dealt by whole groups); `sample_length` int32, sampled tokens in the loss before the staleness mask: the
    denominator under a mask.
    """

    k: int
    lineage: str
    max_staleness: int
    on_stale: OnStale
    temperature: float
    min_contributing_version: int
    contributing_tokens: int
    replayed_tokens: int
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    sample_offsets: npt.NDArray[np.int64]
    sample_rollout: npt.NDArray[np.int32]
    sample_group: npt.NDArray[np.int32]
    sample_length: npt.NDArray[np.int32]


def contributing_mask(records: Records) -> npt.NDArray[np.bool_]:
    """Return which tokens train, bool (n), by the rule at the top of this file."""
    batch = records.batch
    contributing = records.columns.loss.copy()
    if batch.on_stale == "mask":
        young = records.versions >= batch.k - batch.max_staleness
        contributing &= young if records.live.all() else young | ~records.token_live
    if batch.overlong_masked:
        overlong = np.array([(rollout.group, rollout.member) in batch.overlong_masked for rollout in records.rollouts])
        contributing &= ~overlong[records.rollout].repeat(records.tokens)
    return contributing


def check_bound(
    k: int, max_staleness: int, on_stale: OnStale, versions: npt.NDArray[np.int32], named: Callable[[npt.NDArray[np.intp]], Sequence[str]]
) -> None:
    """Raise BoundBreached unless tokens of these versions, int32 (c), may train in batch `k`.

    `named` tells who the tokens at some of these places belong to, for the message.
    """
    future = versions > k
    if future.any():
        newest, who = int(versions.max()), _listed(named(np.flatnonzero(future)))
        raise BoundBreached(f"batch {k} holds a token of version {newest}, which no trainer has made ({who}): check the engines' labels")
    old = versions < k - max_staleness
    if on_stale != "train" and old.any():
        oldest, who = int(versions.min()), _listed(named(np.flatnonzero(old)))
        raise BoundBreached(
            f"batch {k} would train on {np.count_nonzero(old)} tokens older than max_staleness = {max_staleness} allows, "
            f"the oldest of version {oldest} ({who})"
        )


def _listed(names: Sequence[str]) -> str:
    once = list(dict.fromkeys(names))
    return ", ".join(once[:NAMED]) + (f" and {len(once) - NAMED} more" if len(once) > NAMED else "")


def assemble(batch: Batch) -> AssembledBatch:
    """Mask, flatten and measure a batch.

    Raises StorageError for damaged rollouts and for a batch that has nothing to train on, BoundBreached if the result broke the bound.
    """
    records = open_records(batch)
    contributing = contributing_mask(records)
    starts = records.sample_starts
    in_loss = np.add.reduceat(records.columns.loss, starts, dtype=np.int64)
    kept = np.logical_or.reduceat(contributing, starts)
    if not kept.any():
        raise StorageError(f"batch {batch.k} has no token that may train: no such batch may be formed")
    trained = np.zeros(len(records.rollouts), np.bool_)
    trained[records.rollout[kept]] = True
    arrays = _tensors(records, contributing, kept, in_loss)
    live = contributing & records.token_live
    live_versions = records.versions[live]
    check_bound(batch.k, batch.max_staleness, batch.on_stale, live_versions, lambda places: _rollouts(records, live, places))
    return AssembledBatch(
        facts=BatchFacts(
            batch=batch.k,
            max_staleness=batch.max_staleness,
            on_stale=batch.on_stale,
            temperature=batch.temperature,
            min_contributing_version=int(live_versions.min(initial=batch.k)),
            contributing_tokens=int(np.count_nonzero(contributing)),
            replayed_tokens=int(np.count_nonzero(contributing)) - len(live_versions),
            arrays={name: ArrayFact(array.dtype.name, array.shape) for name, array in arrays.items()},
        ),
        arrays=arrays,
        records=records,
        trained=trained,
        drop_causes=_drop_causes(records, trained, in_loss),
        metrics=metrics_row(records, contributing),
    )


def _rollouts(records: Records, contributing: npt.NDArray[np.bool_], places: npt.NDArray[np.intp]) -> list[str]:
    """Name the rollouts of the contributing tokens at these places."""
    tokens = np.flatnonzero(contributing)[places]
    rows = np.unique(np.searchsorted(records.rollout_starts, tokens, side="right") - 1)
    return [f"rollout {records.rollouts[row].group}-{records.rollouts[row].member}" for row in rows]


def _tensors(
    records: Records, contributing: npt.NDArray[np.bool_], kept: npt.NDArray[np.bool_], in_loss: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of `DTYPES` over the samples that are `kept`."""
    columns, tokens, rollout = records.columns, records.tokens[kept], records.rollout[kept]
    columns_over_tokens = {
        "token_ids": columns.token_ids,
        "loss_mask": contributing,
        "logprobs": columns.logprobs,
        "versions": records.versions,
    }
    if not kept.all():
        here = kept.repeat(records.tokens)
        columns_over_tokens = {name: array[here] for name, array in columns_over_tokens.items()}
    arrays = {
        **columns_over_tokens,
        "advantages": records.advantage.astype(np.float32)[rollout].repeat(tokens),
        "sample_offsets": np.append(0, tokens.cumsum()),
        "sample_rollout": rollout,
        "sample_group": records.group[rollout],
        "sample_length": in_loss[kept],
    }
    return {name: arrays[name].astype(dtype, copy=False) for name, dtype in DTYPES.items()}


def _drop_causes(records: Records, trained: npt.NDArray[np.bool_], in_loss: npt.NDArray[np.int64]) -> tuple[Cause | None, ...]:
    """Return why each rollout did not train: None for those that did."""
    could = np.zeros(len(trained), np.bool_)
    could[records.rollout[in_loss > 0]] = True
    masked = records.batch.overlong_masked
    return tuple(
        None if did else "over_length" if (rollout.group, rollout.member) in masked else "stale" if had else "empty_completion"
        for rollout, did, had in zip(records.rollouts, trained, could, strict=True)
    )


def write_batch(run: RunDirectory, assembled: AssembledBatch, lineage: str) -> None:
    """Persist a batch under its id, whole and durable; raises StorageError, and BoundBreached on the arrays about to be written."""
    from headway.formats.parquet import write_records  # trainers read batches without loading pyarrow

    facts, arrays = assembled.facts, assembled.arrays
    _check_versions(facts, arrays)
    final = run.batch(facts.batch)
    temporary = staging(final)
    try:
        with storage_errors(f"{final}: cannot be written"), ThreadPoolExecutor(max_workers=1) as beside:
            record = beside.submit(write_records, temporary / RECORDS, assembled.records, assembled.trained, assembled.drop_causes)
            _save(arrays, temporary / TENSORS)
            sync(temporary / TENSORS)  # the disk works while Parquet is encoded
            record.result()
        extra = {**msgspec.to_builtins(facts), METRICS: _plain(assembled.metrics)}
        write_manifest(temporary, kind="batch", lineage=lineage, id=facts.batch, extra=extra)
        publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _plain(row: Mapping[str, Any]) -> Any:
    """Return a metrics row in values of strict JSON: what is not finite is null, as in metrics.jsonl."""
    return msgspec.json.decode(msgspec.json.encode(row, enc_hook=lambda value: value.item()))


def _save(arrays: Mapping[str, npt.NDArray[Any]], path: Path) -> None:
    try:
        save_file(dict(arrays), path, {"format": f"headway batch {CONTRACT_VERSION}"})
    except SafetensorError as error:  # its own word for what the file system said, a full disk above all
        raise StorageError(f"{path}: cannot be written: {error}: free space on the disk or check it, then resume") from error


def read_batch(directory: Path) -> TrainerBatch:
    """Read a complete batch and check it as the contract asks of a trainer; raises StorageError, and BoundBreached.

    Whether its k is the trainer's own version, and its lineage the trainer's own, is for the trainer to compare.
    """
    manifest = read_manifest(directory)
    if manifest is None or manifest.kind != "batch":
        raise StorageError(f"{directory}: holds no complete batch: wait for its manifest")
    if TENSORS not in manifest.files:  # what the manifest does not name, nobody has checked
        raise StorageError(f"{directory}: its manifest names no {TENSORS}: do not use what wrote it")
    verify(directory, manifest)
    try:
        facts = msgspec.convert(manifest.extra, BatchFacts)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise StorageError(f"{directory / MANIFEST}: does not tell of a batch: {brief(error)}") from error
    try:
        arrays = load_file(directory / TENSORS)
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise StorageError(f"{directory / TENSORS}: cannot be read as a batch: {brief(error)}") from error
    if facts.batch != manifest.id or facts.contract_version != CONTRACT_VERSION:
        told = f"batch {facts.batch}, contract version {facts.contract_version}"
        raise StorageError(f"{directory}: tells of {told}: batch {manifest.id}, contract version {CONTRACT_VERSION}, can be read here")
    _check(directory, facts, arrays)
    return TrainerBatch(
        k=facts.batch,
        lineage=manifest.lineage,
        max_staleness=facts.max_staleness,
        on_stale=facts.on_stale,
        temperature=facts.temperature,
        min_contributing_version=facts.min_contributing_version,
        contributing_tokens=facts.contributing_tokens,
        replayed_tokens=facts.replayed_tokens,
        **arrays,
    )


def _check(directory: Path, facts: BatchFacts, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Check names, dtypes, lengths, finiteness and the bound of arrays that were read."""
    found = {name: (array.dtype, array.ndim) for name, array in arrays.items()}
    if found != {name: (dtype, 1) for name, dtype in DTYPES.items()}:
        raise StorageError(f"{directory / TENSORS}: its arrays are not those of contract version {CONTRACT_VERSION}")
    offsets, n = arrays["sample_offsets"], len(arrays["token_ids"])
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != n or (offsets[1:] <= offsets[:-1]).any():
        raise StorageError(f"{directory / TENSORS}: sample_offsets do not cut {n} tokens into samples")
    for name, array in arrays.items():
        length = n if not name.startswith("sample_") else len(offsets) - (name != "sample_offsets")
        if len(array) != length:
            raise StorageError(f"{directory / TENSORS}: {name} has {len(array)} entries, expected {length}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise StorageError(f"{directory / TENSORS}: {name} holds a value that is not finite")
    if arrays["token_ids"].min() < 0 or arrays["loss_mask"].max() > 1 or arrays["versions"].min() < NOT_SAMPLED:
        raise StorageError(f"{directory / TENSORS}: holds a token id, a mask or a version that cannot be")
    if min(arrays[name].min() for name in ("sample_rollout", "sample_group", "sample_length")) < 0:
        raise StorageError(f"{directory / TENSORS}: holds a sample of no rollout, no group or no length")
    if not arrays["loss_mask"].any():
        raise StorageError(f"{directory / TENSORS}: no token contributes")
    _check_versions(facts, arrays)


def _check_versions(facts: BatchFacts, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Check the bound on the arrays themselves: each half of the double lock."""
    contributing = arrays["loss_mask"] != 0
    versions = arrays["versions"]
    live = contributing & (versions != NOT_SAMPLED)
    replayed = np.count_nonzero(contributing) - np.count_nonzero(live)
    if replayed != facts.replayed_tokens:
        raise BoundBreached(
            f"batch {facts.batch} would train on {replayed} tokens without a version, and its manifest knows of {facts.replayed_tokens}"
        )

    def named(places: npt.NDArray[np.intp]) -> list[str]:
        samples = np.searchsorted(arrays["sample_offsets"], np.flatnonzero(live)[places], side="right") - 1
        return [f"row {row} of {RECORDS}" for row in np.unique(arrays["sample_rollout"][samples])]

    check_bound(facts.batch, facts.max_staleness, facts.on_stale, versions[live], named)
