"""What a simulated world is given: how its engines, its trainer, its rollouts and its prompts behave."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.flow.train_sink import KeepGroup
from headway.flow.user_functions import Advantages
from headway.formats.offered import OfferedGroup
from headway.rules.advantages import grpo
from headway.sim.engine import EngineSettings
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import RolloutSettings


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """The world around a run. `prompts`: how many, 0: a new one each time; `epochs` 0: as often as they are wanted.

    `prompts_fail_after`: the source fails after so many prompts.

    `version`: the newest version that there is; above 0 the run is taken up at once, with the journal that led there.

    `engines`: first those that the config names, then those that join and leave (`EngineSettings.named`).

    `advantages`, `keep`: what a user names as rollout.advantage and rollout.filter. `commit_seconds` / `write_seconds`: what a write to the
    journal takes, and a batch; `keep_batches`: how many of the newest are remembered, and rows of each stream (0: all).
    `replayed`: gives the groups to replay, but for as many of each name as are durable already.
    """

    seed: int = 0
    version: int = 0
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    engines: Sequence[EngineSettings] = (EngineSettings(),)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    prompts: int = 1000
    epochs: int = 0
    prompts_fail_after: int | None = None
    eval_prompts: int = 0
    commit_seconds: float = 0.0
    write_seconds: float = 0.0
    keep_batches: int = 0
    score_concurrency: int = 64
    replayed: Callable[[Mapping[str, int]], AsyncIterable[OfferedGroup]] | None = None
    advantages: Advantages = grpo
    keep: KeepGroup | None = None
