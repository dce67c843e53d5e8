"""How the policy's weights lie at one engine, and what each step of a weight sync does to them: whole, or an adapter beside its base.

prepare    nothing has changed when it raises, but that the engine may be paused
load       the weights are there
activate   the engine generates by them, under their label
verified   it has been asked, and does
abandon    a step has failed: what the engine goes on with, and under which label
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path

from headway.adapters.engines.calls import Calls
from headway.adapters.engines.held import Tensors, full_checkpoint
from headway.adapters.engines.transfer import Transfers
from headway.errors import EngineFailed
from headway.settings import EngineSection
from headway.types import Checkpoint, Transferred

NOBODYS_LABEL = "unknown"
"""The label of weights that may be of two versions: no run's, so that tokens of them are refused."""

_log = logging.getLogger("headway")
_ABANDON_SECONDS = 10.0  # of each of its calls
_FAILURE = re.compile(rb'"success"\s*:\s*false')


def says_no(answer: bytes) -> bool:
    """Whether an answer of status 200 says that what was asked for was not done."""
    return _FAILURE.search(answer) is not None


class EngineWeights(ABC):
    """The weights at one engine. `label` and what is called in a sync's order, `prepare` to `verified`, raise `EngineFailed`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._mistrusted = False  # they may be of two versions, or not those that were given

    def mistrust(self) -> None:
        """What the engine generates by is not what its label says, or may not be: it is not to go on so after `abandon`."""
        self._mistrusted = True

    @abstractmethod
    def read(self, directory: Path, model: Path | None) -> Tensors:
        """Return the tensors of a checkpoint that can be brought to a `model` (None: not known). Raises `StorageError`."""

    @abstractmethod
    def refuse(self, checkpoint: Checkpoint) -> None:
        """Raise `StorageError` for what is of the wrong kind."""

    @abstractmethod
    def expect(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was checked, and is to be brought."""

    @abstractmethod
    async def label(self) -> str:
        """Ask under which label the engine generates."""

    @abstractmethod
    async def prepare(self, checkpoint: Checkpoint) -> None:
        """Read what there is to read, and then pause, where loading needs a pause."""

    @abstractmethod
    async def load(self, checkpoint: Checkpoint) -> Transferred | None:
        """Let the engine load a checkpoint; None: there was nothing to load."""

    @abstractmethod
    async def activate(self, checkpoint: Checkpoint) -> None:
        """See that the engine generates by what was loaded, under its label, and by no cache of older weights that should not be."""

    @abstractmethod
    def adapter_of(self, checkpoint: Checkpoint) -> str:
        """Return the name of the adapter that a generation by this checkpoint asks for; "": none."""

    @abstractmethod
    async def verified(self, checkpoint: Checkpoint) -> None:
        """The engine was asked, and generates by the checkpoint."""

    @abstractmethod
    async def abandon(self) -> None:
        """Leave the engine so that no token of weights of no version passes for one of a version; bounded, and never raises."""

    @abstractmethod
    async def close(self) -> None:
        """The run ends: what nobody writes any more may go on, whatever it is. Bounded, and never raises."""

    async def _quietly(self, step: Callable[[], Awaitable[None]], what: str) -> bool:
        """Whether a step was taken, which may fail."""
        try:
            async with asyncio.timeout(min(_ABANDON_SECONDS, self._calls.timeout_seconds)):
                await step()
        except (EngineFailed, TimeoutError) as error:
            _log.warning("%s %s: %s", self._calls.name, what, str(error) or "no answer in time")
            return False
        return True


class WholeWeights(EngineWeights):
    """All weights of a model, loaded in place of those before while the engine is paused; a subclass knows its protocol's routes."""

    def __init__(self, calls: Calls, settings: EngineSection) -> None:
        super().__init__(calls)
        self._settings = settings
        self._transfers = Transfers(calls.name, settings.weight_transfer)

    def read(self, directory: Path, model: Path | None) -> Tensors:
        """Return the tensors of a directory that holds all weights of a model. Raises `StorageError`."""
        return full_checkpoint(directory)

    def refuse(self, checkpoint: Checkpoint) -> None:
        """Nothing: `read` tells."""

    def expect(self, checkpoint: Checkpoint) -> None:
        """Nothing depends on it."""

    async def prepare(self, checkpoint: Checkpoint) -> None:
        """Choose the way by which the weights come, and pause as engine.weight_sync says."""
        served = await self.label() if self._transfers.may_offer(checkpoint) else ""
        await self._transfers.choose(checkpoint, served)
        await self._pause()

    async def load(self, checkpoint: Checkpoint) -> Transferred | None:
        """Load in place: from here on the engine's own label says nothing, until `activate` has set it."""
        self.mistrust()
        return await self._transfers.bring(checkpoint, self._load)

    async def activate(self, checkpoint: Checkpoint) -> None:
        """Label the weights, drop what older ones have left in caches, and end the pause."""
        await self._relabel(checkpoint.label)
        await self._clear()
        self._mistrusted = False
        await self._resume()

    def adapter_of(self, checkpoint: Checkpoint) -> str:
        """There is none."""
        return ""

    async def verified(self, checkpoint: Checkpoint) -> None:
        """A delta may lead from this checkpoint."""
        self._transfers.serves(checkpoint)

    async def abandon(self) -> None:
        """Resume the engine, unless it would write under a label that is wrong: then what it has in flight is aborted, and it is paused."""
        self._transfers.forget()
        if self._mistrusted:
            self._mistrusted = not await self._quietly(self._disown, "could not be told that its weights are of no version")
        if self._mistrusted:
            await self._quietly(self._halt, "could not be paused, and may go on under the label of the version before")
        else:
            await self._quietly(self._resume, "could not be resumed after a failed weight sync")

    async def close(self) -> None:
        """Leave no pause."""
        if self._mistrusted:
            self._mistrusted = False
            await self._quietly(self._resume, "could not be resumed at the end")

    @abstractmethod
    async def _pause(self) -> None:
        """Pause, as engine.weight_sync says."""

    @abstractmethod
    async def _load(self, checkpoint: Checkpoint) -> None:
        """Load the weights."""

    @abstractmethod
    async def _relabel(self, label: str) -> None:
        """Set the label, where loading has not."""

    @abstractmethod
    async def _clear(self) -> None:
        """See that no cache of older weights is left which should not be."""

    @abstractmethod
    async def _resume(self) -> None:
        """End a pause, if there is one."""

    @abstractmethod
    async def _disown(self) -> None:
        """Give weights of no version the label NOBODYS_LABEL, and abort what is in flight."""

    @abstractmethod
    async def _halt(self) -> None:
        """Abort what is in flight, and pause."""
