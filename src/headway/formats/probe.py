"""probe.npz, in a directory of weights: what these weights say comes next after a few tokens, so that who serves them can be checked.

    token_ids int32 (n)     a prompt of ids that the model has
    logprobs float32 (V)    log-probabilities of the next token at temperature 1, over the whole vocabulary

Optional. It is no *.safetensors file: engines load every one of those that lies in a directory.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headway.errors import StorageError
from headway.formats.bounded import brief, read_bounded
from headway.formats.files import storage_errors

NAME = "probe.npz"
MAX_BYTES = 64 * 1024**2
_MOST_TOKENS = 4096
_MASS_TOLERANCE = 0.05  # half-precision models
_REMEDY = "the trainer must write it as docs/reference/formats.md says, or leave it out"


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A prompt, and the log-probabilities float32 (V) of the token after it."""

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]


def write_probe(directory: Path, probe: Probe) -> None:
    """Write probe.npz into a directory that is being filled. Raises StorageError."""
    path = directory / NAME
    with storage_errors(f"{path}: cannot be written"), path.open("wb") as file:
        np.savez(file, token_ids=np.asarray(probe.token_ids, np.int32), logprobs=probe.logprobs.astype(np.float32, copy=False))


def read_probe(directory: Path) -> Probe | None:
    """Return the probe of a directory; None: it has none. Raises StorageError when it is there and of no use."""
    path = directory / NAME
    try:
        content = read_bounded(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}: check the permissions and the disk") from error
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_BYTES} bytes")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            token_ids, logprobs = arrays["token_ids"], arrays["logprobs"]
        if not isinstance(token_ids, np.ndarray) or not isinstance(logprobs, np.ndarray):  # a member that is no .npy comes as bytes
            raise TypeError("it holds something other than arrays")
    except Exception as error:  # numpy lets through what its parsers raise: zlib.error, TokenError, SyntaxError, ...
        raise StorageError(f"{path}: cannot be read: {brief(error)}: {_REMEDY}") from error
    return _checked(path, token_ids, logprobs)


def _checked(path: Path, token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> Probe:
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu" or not 1 <= len(token_ids) <= _MOST_TOKENS:
        raise StorageError(f"{path}: token_ids are no list of 1 to {_MOST_TOKENS} integers: {_REMEDY}")
    if logprobs.ndim != 1 or logprobs.dtype.kind != "f" or not len(logprobs):
        raise StorageError(f"{path}: logprobs are no list of numbers: {_REMEDY}")
    if not 0 <= token_ids.min() <= token_ids.max() < len(logprobs):
        raise StorageError(f"{path}: token_ids go beyond the {len(logprobs)} tokens of logprobs: {_REMEDY}")
    with np.errstate(over="ignore", invalid="ignore"):
        mass = float(np.exp(logprobs.astype(np.float64)).sum())
    if not abs(mass - 1.0) <= _MASS_TOLERANCE:
        raise StorageError(f"{path}: the probabilities of logprobs add up to {mass:.3g}: {_REMEDY}")
    return Probe(tuple(int(token) for token in token_ids), logprobs.astype(np.float32, copy=False))
