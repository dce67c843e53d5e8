"""The seams: what a user may swap, and what the orchestrator asks of each part.

Orchestrator side: `Journal`, `Worker`, `Engine`, `BatchStore`, `Trainer`, `PromptSource`, `Exporter`. User side (inside a rollout worker):
`Policy` and `Conversation`, which an environment is given. All are structural: no base class to inherit, nothing to register.
Cancelling an awaited call cancels the work behind it. Errors are those of `headway.errors`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from headway.events import AnyEvent
from headway.types import (
    AttemptRequest,
    Batch,
    Checkpoint,
    DataPosition,
    EngineAddress,
    EngineKind,
    Failure,
    Finish,
    PayloadReference,
    Prompt,
    Rollout,
    Score,
    ScoreRequest,
    Transferred,
)

# --------------------------------------------------------------------------------------------------------------------------------------
# What an environment sees
# --------------------------------------------------------------------------------------------------------------------------------------


class Generation(msgspec.Struct, frozen=True):
    """What one turn of the engine brought: `token_ids` (end-of-sequence included where sampled), their text, and why it ended."""

    token_ids: tuple[int, ...]
    text: str
    finish: Finish


class Conversation(Protocol):
    """An append-only token history with one engine. What was sampled or observed is never re-tokenised."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All ids so far: prompt, sampled, observed."""
        ...

    @property
    def text(self) -> str:
        """The history as text (special tokens kept)."""
        ...

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        stop: Sequence[int | str] = (),
        temperature: float | None = None,
    ) -> Generation:
        """Let the policy write the next turn; `stop`: ids, or strings that are exactly one token.

        Raises `errors.RolloutTruncated` when nothing more fits: left alone, it ends the rollout as `truncated` with its good turns.
        """
        ...

    def observe(self, content: Sequence[int] | str | Sequence[Mapping[str, Any]]) -> None:
        """Append what the environment says: ids, text, or chat messages rendered by the model's chat template. Out of the loss."""
        ...


class Policy(Protocol):
    """The handle an environment samples through; every conversation opened becomes a sample of the rollout."""

    async def open(self, content: Sequence[int] | str | Sequence[Mapping[str, Any]]) -> Conversation:
        """Start a token history from ids, text, or chat messages (rendered with the generation prompt)."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attempt at a prompt came to. `reward` None asks for a scorer; `rewards` are named parts, for the record."""

    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    finish: Finish | None = None  # unset: as the last generation ended
    metadata: Mapping[str, Any] = field(default_factory=dict)


Environment = Callable[[Prompt, Policy], Awaitable[Outcome]]
"""`async def attempt(prompt, policy) -> Outcome`: one attempt at one prompt, one or many turns."""

# --------------------------------------------------------------------------------------------------------------------------------------
# What the orchestrator asks
# --------------------------------------------------------------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True):
    """One journal entry to write: an event, and the rollout whose record it refers to (Finished only)."""

    event: AnyEvent
    rollout: Rollout | None = None


class Journal(Protocol):
    """The append-only history of a run."""

    async def append(self, entries: Sequence[Entry]) -> Sequence[AnyEvent]:
        """Write the entries in order and return their events as written (references filled in); durable on return."""
        ...

    def replay(self) -> Iterator[AnyEvent]:
        """Yield every event from the first, in order."""
        ...

    async def read(self, reference: PayloadReference) -> Rollout:
        """Return the rollout whose record lies there."""
        ...

    async def prune(self, needed: Collection[int]) -> None:
        """Remove payloads of groups that are not `needed` any more, as far as that is cheap. Events stay, and groups admitted since."""
        ...

    async def close(self) -> None:
        """Flush and release; idempotent."""
        ...


Move = Callable[[EngineAddress], Awaitable[EngineAddress | None]]
"""Asked with the engine that failed; answers with the one to go on at, or None: the engine is there, the failure counts."""


class Mover(Protocol):
    """A `Move` of one attempt, asked one question at a time, which also tells when the engine hangs: a request there is then given up."""

    def __call__(self, failed: EngineAddress) -> Awaitable[EngineAddress | None]:
        """Return the engine to go on at, or None."""
        ...

    def when_it_hangs(self, give_up: Callable[[int], None]) -> None:
        """Call `give_up(n)` when the engine hangs at which the attempt is after `n` moves: at once, or later, or never."""
        ...


class Worker(Protocol):
    """Runs environments: one process, several, or inline."""

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Rollout | Failure:
        """Attempt a prompt once. Never raises for what user code or an engine did: that is a Failure.

        `move` is asked when the engine fails under a turn: the rollout goes on where it says, from the turns that it has. A worker that
        does not listen for engines that hang has its attempt cancelled by one.
        """
        ...

    async def score(self, request: ScoreRequest) -> Sequence[Score] | Failure:
        """Score the rollouts given, in order."""
        ...

    async def close(self) -> None:
        """Cancel what runs, let user code clean up within its budget, and release everything."""
        ...


class Engine(Protocol):
    """The administrative side of one inference server; sampling goes from a worker to `url` directly."""

    @property
    def name(self) -> str:
        """A short name, unique in the run: `engine-0`."""
        ...

    @property
    def url(self) -> str:
        """Base URL that workers send generations to."""
        ...

    @property
    def kind(self) -> EngineKind:
        """The protocol that it speaks."""
        ...

    async def label(self) -> str:
        """Return the version label that the engine says it serves."""
        ...

    async def software(self) -> str:
        """Return which software it says that it is, for people: `vllm 0.11.0`; "unknown" where it does not say. Never raises."""
        ...

    async def sampled_tokens(self) -> int | None:
        """Return how many tokens it has sampled since it started, delivered or not; None where it does not say. Raises EngineFailed."""
        ...

    async def prepare(self, checkpoint: Checkpoint) -> None:
        """Check that the checkpoint fits what is served, then make the engine ready to take it (pause, as configured)."""
        ...

    async def transfer(self, checkpoint: Checkpoint) -> Transferred | None:
        """Bring the weights over, and say what that took; None: not known. Only after success may commit be called."""
        ...

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Set the label, recompute or reset caches, serve again, and verify that the engine says so."""
        ...

    async def abandon(self) -> None:
        """Leave no engine paused after a failed sync, unless it would go on under a label that is not its weights'; never raises."""
        ...

    async def sleep(self) -> None:
        """Free the accelerator's memory for somebody else, a trainer on the same device: weights and cache are gone until `wake`.

        Nothing in headway calls it yet: colocated engines are to come. Raises EngineFailed, also where the engine cannot.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again. What it serves then must be synced before it is counted on. Raises EngineFailed."""
        ...

    async def close(self) -> None:
        """Release connections; idempotent."""
        ...


class BatchStore(Protocol):
    """Persists batches: durable and whole before anyone is told of them."""

    async def write(self, batch: Batch) -> Mapping[str, Any]:
        """Persist the batch under its id and return its metrics row (FORMATS: metrics.jsonl, the orchestrator's part)."""
        ...


class Trainer(Protocol):
    """Turns batches into weights. A child process, a torchrun job, another team's program: equals."""

    async def submit(self, k: int) -> None:
        """Announce that batch `k` lies complete in the run directory."""
        ...

    async def checkpoint(self, after: int) -> Checkpoint:
        """Wait for and return the newest complete, verified checkpoint with a version above `after`."""
        ...

    async def metrics(self, k: int) -> Mapping[str, Any]:
        """Return what the trainer measured on batch `k`; empty when it reports nothing."""
        ...


class PromptSource(Protocol):
    """Prompts in a reproducible order, with stable ids."""

    def __aiter__(self) -> AsyncIterator[Prompt]: ...

    def after(self, position: DataPosition) -> AsyncIterator[Prompt]:
        """Yield what `position` has left, in the source's order, with `tries` as it says; what waits to be tried again comes first."""
        ...

    async def find(self, wanted: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], Prompt]:
        """Return the prompts of these (id, epoch), as far as the source still has them."""
        ...


class Exporter(Protocol):
    """Takes rows of metrics somewhere; must not raise and must not block the loop.

    One that may do either is put behind `headway.adapters.exporters.behind.BehindExporter`, which keeps that promise for it: in a thread,
    with a bounded queue, and at the price of rows. It is closed once the run's end is on disk, within run.shutdown_seconds.
    """

    def export(self, stream: str, row: Mapping[str, Any]) -> None:
        """Take one row of a stream: "metrics" (one per batch), "pipeline" (one per interval), "eval"."""
        ...

    def close(self) -> None:
        """Flush and release; idempotent."""
        ...
