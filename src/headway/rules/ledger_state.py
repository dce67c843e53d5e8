"""What the ledger holds: the accumulator of the fold (`rules.ledger.apply` alone changes it; everyone else reads it as `LedgerView`)."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from headway.rules.view import Promise, ResumeBudget, Unit

REWARDS_KEPT = 1000  # batches whose mean reward is remembered, for finish_when


@dataclass(slots=True)
class Formed:
    """A batch's groups, for the case that it is dissolved: live ones as they were, and those that held a place in it."""

    units: dict[int, Unit] = field(default_factory=dict)
    promised: dict[int, Promise] = field(default_factory=dict)  # by group: the place it held, in batch k or a later one


@dataclass(slots=True)
class Ledger:
    """The fold's accumulator; see `LedgerView` for what each field means."""

    version: int = -1
    next_batch: int = 0
    trained: int = 0
    running: dict[int, Unit] = field(default_factory=dict)
    ready: dict[int, Unit] = field(default_factory=dict)
    births: dict[int, int] = field(default_factory=dict)
    ready_births: dict[int, int] = field(default_factory=dict)
    ready_tokens: int = 0
    ready_size: int = 0
    ingested: dict[int, Promise] = field(default_factory=dict)
    promised: dict[int, int] = field(default_factory=dict)
    awaited: dict[int, int] = field(default_factory=dict)
    interrupted: dict[int, Unit] = field(default_factory=dict)
    formed: dict[int, Formed] = field(default_factory=dict)  # batches whose groups are remembered, ascending
    steps_ahead: float | None = None
    latency_seconds: float = 0.0
    cycle_seconds: float = 0.0
    latencies: int = 0  # how many the mean holds, for its first steps
    cycles: int = 0
    acknowledged: float | None = None  # when the newest version was
    rollouts_in_flight: int = 0
    next_group: int = 0
    exhausted: bool = False
    requeued: dict[tuple[str, int], int] = field(default_factory=dict)
    waiting: dict[tuple[str, int], int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    failed_in_row: int = 0
    quarantined: dict[str, str] = field(default_factory=dict)
    held_size: int = 0
    resume_budget: ResumeBudget | None = None
    repeated_eval: int | None = None
    draining: str = ""
    barren: int = 0
    rewards: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REWARDS_KEPT))
    eval_running: int | None = None
    last_eval: int = -1
    dropped: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    last_loss: str = ""
    alike: int = 0
    admitted: int = 0
    sampled_tokens: int = 0

    @property
    def waiting_prompts(self) -> int:
        """How many prompts wait to be tried again."""
        return len(self.waiting)
