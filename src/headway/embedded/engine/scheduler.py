"""Continuous batching: requests join, end and change weights between decode steps. No thread, no clock, no I/O.

One `step` prefills every row that has nothing cached (new requests; all live ones after `recompute`), then decodes one token for every
row. Each token carries the label that was served when it was sampled. Live rows are dense, 0 .. n-1: when one ends, the last takes its
place.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from headway.embedded.engine.model import SlotModel
from headway.embedded.engine.request import FinishReason, Request
from headway.embedded.engine.sampling import Knobs, sample, uniforms

PREFILL_TOKENS = 8192  # padded positions of one prefill pass
NO_TOKEN = -1

PauseMode = Literal["abort", "wait", "keep"]


# One live row. `length`: prompt + sampled tokens; it ends at `limit`. `cached`: all of it but the newest token is in the cache.
ROW = np.dtype(
    [
        ("prompt", np.int64),
        ("length", np.int64),
        ("limit", np.int64),
        ("cached", np.bool_),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("seed", np.uint64),
    ],
    align=True,
)


class Scheduler:
    """Owns the queue, the live rows and the model. Every method is called between steps, by one thread."""

    def __init__(self, model: SlotModel, *, max_rows: int, label: str) -> None:
        self._model = model
        self.max_rows = max_rows
        self.vocabulary, self.context, self.eos_ids = model.vocabulary, model.context, model.eos_ids
        self.label = label
        self.waiting: dict[int, Request] = {}
        self.held: dict[int, Request] = {}  # arrived during a pause
        self.live: list[Request] = []
        self.pausing: PauseMode | None = None
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.recomputed = 0
        self._rows = np.zeros(0, ROW)
        self._history = np.zeros((0, 0), np.int64)
        self._logprobs = np.zeros((0, 0), np.float32)
        self._stops = np.full((0, 1), NO_TOKEN, np.int64)

    # What the model's thread asks -----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.live or self.waiting) and self.pausing != "keep"

    @property
    def paused(self) -> bool:
        """Whether nothing will be sampled until `resume`."""
        return self.pausing is not None and not self.busy

    def submit(self, request: Request) -> None:
        """Queue a request; during a pause it is held until `resume`."""
        (self.waiting if self.pausing is None else self.held)[request.key] = request

    def abort(self, keys: Iterable[int]) -> list[Request]:
        """End these requests with what they have; unknown keys (already ended) are ignored."""
        wanted = set(keys)
        queued = [queue.pop(key) for queue in (self.waiting, self.held) for key in wanted & queue.keys()]
        for request in queued:
            request.finish_reason = "abort"
        running = [request for request in self.live if request.key in wanted]
        return queued + self._end({request.row: "abort" for request in running})

    def pause(self, mode: PauseMode, *, recompute: bool) -> list[Request]:
        """Stop sampling: now, keeping live requests ("keep"), ending them ("abort"), or once they are done ("wait").

        `recompute`: live contexts are cached anew when sampling goes on, under the weights served then.
        """
        ended = self.abort([*self.waiting, *(request.key for request in self.live)]) if mode == "abort" else []
        self.pausing = mode
        if recompute and mode == "keep":
            self.recomputed += int(self._rows["cached"][: len(self.live)].sum())
            self._rows["cached"] = False
        return ended

    def resume(self) -> None:
        """Sample again; what arrived meanwhile queues behind what waited before."""
        self.pausing = None
        self.waiting.update(self.held)
        self.held.clear()

    def load(self, directory: Path) -> None:
        """Swap the weights in place, or raise StorageError with the old ones untouched. The label is set apart."""
        self._model.loader.load(directory)

    def relabel(self, label: str) -> None:
        """Tokens sampled from now on carry `label`."""
        if label == self.label:
            return
        self.label = label
        for request in self.live:
            request.spans.append((label, int(self._rows["length"][request.row] - self._rows["prompt"][request.row])))

    def step(self) -> list[Request]:
        """Admit, prefill and decode once; return the requests that ended."""
        self._admit()
        ended: dict[int, FinishReason] = {}
        fresh = np.flatnonzero(~self._rows["cached"][: len(self.live)])
        for rows in self._prefill_passes(fresh):
            contexts = [self._history[row, : self._rows["length"][row]] for row in rows]
            self._accept(rows, self._model.prefill(rows, contexts), ended)
        finished = self._end(ended)
        if self.live:
            rows = np.arange(len(self.live))
            newest = self._rows["length"][: len(rows)] - 1
            self._reserve(len(rows), int(newest.max()) + 2)
            ended = {}
            self._accept(rows, self._model.decode(self._history[rows, newest], newest), ended)
            finished += self._end(ended)
        return finished

    # The parts of a step --------------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        count = min(len(self.waiting), self.max_rows - len(self.live))
        if not count:
            return
        keys = [key for key, _ in zip(self.waiting, range(count), strict=False)]
        arrivals = [self.waiting.pop(key) for key in keys]
        self._reserve(len(self.live) + count, max(len(request.prompt) for request in arrivals) + 1)
        stops = max(len(request.stop_ids) for request in arrivals)
        if stops > self._stops.shape[1]:
            self._stops = np.pad(self._stops, ((0, 0), (0, stops - self._stops.shape[1])), constant_values=NO_TOKEN)
        for request in arrivals:
            row, size = len(self.live), len(request.prompt)
            request.row = row
            request.spans = [(self.label, 0)]
            self.live.append(request)
            limit = size + request.max_tokens
            self._rows[row] = (size, size, limit, False, request.temperature, request.top_p, request.top_k, request.seed)
            self._history[row, :size] = request.prompt
            self._stops[row] = NO_TOKEN
            self._stops[row, : len(request.stop_ids)] = request.stop_ids
            self.prompt_tokens += size

    def _prefill_passes(self, fresh: npt.NDArray[np.int64]) -> Iterable[npt.NDArray[np.int64]]:
        """Cut rows into passes of similar length, so that padding inside a pass stays small."""
        fresh = fresh[np.argsort(self._rows["length"][fresh], kind="stable")]
        lengths = self._rows["length"][fresh].tolist()
        start = 0
        for end in range(1, len(fresh) + 1):
            if end == len(fresh) or (end + 1 - start) * lengths[end] > PREFILL_TOKENS:
                yield fresh[start:end]
                start = end

    def _accept(self, rows: npt.NDArray[np.int64], logits: torch.Tensor, ended: dict[int, FinishReason]) -> None:
        """Sample the next token of each row, write it down, and note in `ended` the rows that it ends."""
        table = self._rows[rows]
        length = table["length"]
        draws = uniforms(table["seed"], (length - table["prompt"]).astype(np.uint64))
        temperature, top_k, top_p = (table[name].copy() for name in ("temperature", "top_k", "top_p"))  # torch takes no strided fields
        knobs = Knobs(temperature, top_k, top_p, draws)
        tokens, logprobs = (result.cpu().numpy() for result in sample(logits, knobs))
        valid = np.isfinite(logprobs)
        self._history[rows, length] = tokens
        self._logprobs[rows, length] = logprobs
        self._rows["length"][rows] = length + valid
        self._rows["cached"][rows] = True
        self.generated_tokens += int(valid.sum())
        stopped = (self._stops[rows] == tokens[:, None]).any(1)
        done = stopped | (length + 1 >= table["limit"]) | ~valid
        for i in np.flatnonzero(done):
            ended[int(rows[i])] = "error" if not valid[i] else "stop" if stopped[i] else "length"

    def _end(self, ended: dict[int, FinishReason]) -> list[Request]:
        """Take rows out, with what they wrote, and close the gaps."""
        if not ended:
            return []
        finished = []
        for row, reason in ended.items():
            request, state = self.live[row], self._rows[row]
            written = slice(int(state["prompt"]), int(state["length"]))
            request.token_ids = self._history[row, written].tolist()
            request.logprobs = self._logprobs[row, written].tolist()
            request.finish_reason = reason
            if reason == "error":
                self._model.cache.clear(row)
            finished.append(request)
        count = len(self.live) - len(ended)
        gaps = [row for row in ended if row < count]
        movers = [row for row in range(count, len(self.live)) if row not in ended]
        if gaps:
            longest = int(self._rows["length"][movers].max())
            self._model.cache.move(torch.tensor(movers), torch.tensor(gaps), min(longest, self._model.cache.length))
            for array in (self._rows, self._history, self._logprobs, self._stops):
                array[gaps] = array[movers]
            for gap, mover in zip(gaps, movers, strict=True):
                self.live[gap] = self.live[mover]
                self.live[gap].row = gap
        del self.live[count:]
        return finished

    def _reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of contexts of `length` tokens, in the cache and in the tables."""
        cache = self._model.cache
        cache.reserve(rows, length)
        rows, length = cache.rows, cache.length + 1  # the newest token is not cached yet
        if (rows, length) == self._history.shape:
            return
        more = rows - len(self._rows)
        self._rows = np.concatenate([self._rows, np.zeros(more, ROW)])
        self._stops = np.concatenate([self._stops, np.full((more, self._stops.shape[1]), NO_TOKEN, np.int64)])
        for name in ("_history", "_logprobs"):
            old = getattr(self, name)
            new = np.zeros((rows, length), old.dtype)
            new[: old.shape[0], : old.shape[1]] = old
            setattr(self, name, new)
