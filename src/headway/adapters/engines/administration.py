"""What the administrative sides of all engines share: how one takes new weights, and how it is known that it serves them.

    prepare    the checkpoint is checked and held, then the engine is paused as engine.weight_sync says
    transfer   its weights are loaded; from here on the engine's own label says nothing, until commit has set it
    commit     the label is set, caches of old weights are gone, it serves again; then it is asked: for its label, and for a token whose
               log-probability must be the checkpoint's (where that lies in probe.npz)
    abandon    whatever has failed: no engine stays paused. One whose weights may be of two versions, or not what it was given, loses its
               label first, and what it has in flight is aborted: no token of such weights passes for one of a version. Where it cannot be
               told so, it stays paused until a sync goes well: it would go on under the label of the version before

An engine is heard of once more before it is first counted on, and after each restart: whether its log-probabilities are the processed ones.
A LoRA adapter (`engine.weight_transfer = "lora"`) lies beside base weights that never change: nothing is paused.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from headway.adapters.engines.adapter_weights import AdapterWeights
from headway.adapters.engines.calls import Calls
from headway.adapters.engines.held import HeldCheckpoints
from headway.adapters.engines.prober import OtherWeights, Prober
from headway.adapters.engines.verification import Token
from headway.adapters.engines.weights import EngineWeights, WholeWeights
from headway.errors import EngineFailed
from headway.formats.probe import read_probe
from headway.settings import EngineSection
from headway.types import Checkpoint, EngineKind, SamplingParams, Transferred

_MOST_METRICS_BYTES = 16 * 1024**2
_MOST_LABEL_CHARACTERS = 80


def counter_of(metric: str) -> re.Pattern[bytes]:
    """Return what finds a metric's values in the body of GET /metrics, one for each set of its labels."""
    number = r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:e\+?[0-9]{1,2})?)"
    line = rf"^{re.escape(metric)}(?:\{{[^\n]*\}})? {number}(?: [0-9]{{1,18}})?[ \t\r]*$"
    return re.compile(line.encode(), re.MULTILINE)


class AdministeredEngine(ABC):
    """The administrative side of one server (`protocols.Engine`); a subclass knows its protocol.

    `model`: the checkpoint that the run started from, "": not known; `sampling`: how the run samples. `retries`: of each call.
    """

    kind: ClassVar[EngineKind]
    _COUNTER: ClassVar[re.Pattern[bytes]]  # of sampled tokens, in the metrics
    _RAW_REMEDY: ClassVar[str]
    _HINT_404: ClassVar[str] = ""
    _WHOLE: ClassVar[type[WholeWeights]]
    _LORA_PREFIX: ClassVar[str]  # of the routes that load and unload an adapter

    def __init__(
        self,
        name: str,
        url: str,
        settings: EngineSection,
        *,
        sampling: SamplingParams | None = None,
        model: str = "",
        retries: int = 2,
    ) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._settings = settings
        self._calls = Calls(name, self._url, timeout_seconds=settings.request_timeout_seconds, retries=retries, hint_404=self._HINT_404)
        self._weights: EngineWeights = (
            AdapterWeights(self._calls, self._LORA_PREFIX) if settings.weight_transfer == "lora" else self._WHOLE(self._calls, settings)
        )
        self._held = HeldCheckpoints(name, model, self._weights.read)
        self._labels: tuple[str, ...] = ()  # what it may say that it serves, unless it was started anew
        self._heard = False  # whether its log-probabilities are known to be the processed ones
        self._in_service = False  # its last sync went well: it has work beside a probe
        self._prober = Prober(name, self._url, self._sample, sampling or SamplingParams(), self._RAW_REMEDY)

    @property
    def name(self) -> str:
        """A short name, unique in the run."""
        return self._name

    @property
    def url(self) -> str:
        """Base URL that workers send generations to."""
        return self._url

    async def label(self) -> str:
        """Return the version label that the engine says it serves ("default": it was started afresh)."""
        label = await self._weights.label()
        if label not in self._labels:
            self._heard = False
        return label

    async def sampled_tokens(self) -> int | None:
        """Return the engine's counter in GET /metrics, summed over its labels, without the tokens of probes; None: it has none."""
        response = await self._calls.look("/metrics", most=_MOST_METRICS_BYTES)
        counts = self._COUNTER.findall(response.body) if response.status == 200 else ()
        return max(0, sum(round(float(count)) for count in counts) - self._prober.tokens) if counts else None

    async def prepare(self, checkpoint: Checkpoint) -> None:
        """Check the checkpoint's files and hold them, then pause. Raises `StorageError` (files), `EngineFailed`."""
        await self._offer(checkpoint)
        await self._weights.prepare(checkpoint)

    async def transfer(self, checkpoint: Checkpoint) -> Transferred | None:
        """Let the engine load the checkpoint's weights; None: it has them, as they are the base that adapters lie beside."""
        return await self._weights.load(checkpoint)

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Label the weights, drop caches of the old ones, serve again, and see that the engine does.

        Without `prepare` before it: for an engine that has these weights, and may have been left paused by whoever brought them.
        """
        if not self._held.offered:
            await self._offer(checkpoint)
        await self._weights.activate(checkpoint)
        try:
            await self._verify(checkpoint)
        except OtherWeights:
            self._weights.mistrust()
            raise
        await self._weights.verified(checkpoint)
        self._held.serve()
        self._labels = (checkpoint.label,)
        self._in_service = True

    async def abandon(self) -> None:
        """Resume the engine whatever state it is in, unless it would write under a label that is wrong; bounded, and never raises."""
        self._held.withdraw()
        self._in_service = False
        await self._weights.abandon()

    async def close(self) -> None:
        """Release connections and checkpoints; idempotent."""
        await self._weights.close()
        self._held.close()
        await self._calls.close()

    # --------------------------------------------------------------------------------------------------------------- what each protocol has

    @abstractmethod
    async def software(self) -> str:
        """Return which software the engine says that it is; "unknown" where it does not say. Never raises."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free weights and cache. Raises `EngineFailed`."""

    @abstractmethod
    async def wake(self) -> None:
        """Take the memory again; its weights are to be synced before it serves. Raises `EngineFailed`."""

    @abstractmethod
    async def _sample(
        self, token_ids: Sequence[int], *, temperature: float, likeliest: bool, max_tokens: int, request_id: str, adapter: str
    ) -> list[Token]:
        """Generate, by seed 0 and beyond end-of-sequence. `likeliest`: the likeliest tokens only; `adapter`: a LoRA adapter, "": none."""

    # ------------------------------------------------------------------------------------------------------------------------ verification

    async def _offer(self, checkpoint: Checkpoint) -> None:
        self._weights.refuse(checkpoint)
        await self._held.offer(Path(checkpoint.directory))
        self._labels = (*self._labels[-1:], checkpoint.label)
        self._weights.expect(checkpoint)

    async def _verify(self, checkpoint: Checkpoint) -> None:
        """Raise `EngineFailed` unless the engine says that it serves the checkpoint, and samples as it does; `StorageError` (its probe)."""
        told = await self.label()
        if told != checkpoint.label:
            told, gave = told[:_MOST_LABEL_CHARACTERS], checkpoint.label
            raise EngineFailed(f'{self._name}: {self._url} says it serves "{told}" after it was given "{gave}": does another run use it?')
        adapter = self._weights.adapter_of(checkpoint)
        probe = await asyncio.to_thread(read_probe, Path(checkpoint.directory))
        if not self._heard:
            await self._prober.hear(adapter)
            self._in_service, self._heard = False, True
        if probe is not None:
            await self._prober.compare(probe, checkpoint, adapter, busy=self._in_service)
