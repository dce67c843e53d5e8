"""Takes a run up again before anything of it starts: what lies there, what it goes on from, and what has changed since.

The order makes it safe to die anywhere: run.json first (a new lineage must be known before anything is said of it), then the journal (all
that is decided, in one write), then config.toml, then batches that are dissolved are removed. Whoever comes next finds the old state or the
new one, and decides the same.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.adapters.batch_store import remove_batches, stored_batch
from headway.adapters.exporters.rows import complete_rows
from headway.config import resolved
from headway.errors import RunFailed
from headway.flow.take_up import History, Resumption, StoredBatch, check_version, read_history, take_up
from headway.formats.bounded import read_regular
from headway.formats.files import storage_errors, write_atomically
from headway.formats.hold import alone
from headway.formats.run_directory import RunDirectory, RunInfo, save_run_info
from headway.formats.software import UNKNOWN
from headway.launch import build
from headway.launch.collector import collector_off
from headway.launch.telling import tell
from headway.launch.versions import completed_at, newest_version
from headway.protocols import Journal, PromptSource
from headway.rules.admission import limits_of
from headway.rules.lineage import line_of
from headway.rules.resume import EvictionReason
from headway.rules.scheduling import reward_reached
from headway.settings import Config
from headway.types import Checkpoint, ContinuedGroup, FinishedGroup, ReadyGroup

_log = logging.getLogger("headway")
_PIPELINE = ("rollout.max_concurrent", "rollout.groups_per_batch", "rollout.group_size", "rollout.max_staleness", "rollout.steps_ahead")
_REASONS: Mapping[EvictionReason, str] = {
    "newer": "written by weights that are gone",
    "alien": "written by weights that are gone",
    "over age": "older than max_staleness",
    "no room": "more than can be trained in time",
}


@dataclass(frozen=True, kw_only=True)
class TakenUp:
    """A run that goes on: as run.json has it now, the weights that it starts from, and what its components begin with."""

    info: RunInfo
    first: Checkpoint
    resumption: Resumption


class Resume:
    """One run that is taken up again, under a config that may have changed. `now`: what this process would write as run.json."""

    def __init__(self, config: Config, directory: RunDirectory, info: RunInfo, now: RunInfo) -> None:
        self._config = config
        self._directory = directory
        self._info = info
        self._now = now
        with storage_errors(f"{directory.config}: cannot be read"):
            self._config_before = read_regular(directory.config).decode("utf-8", "replace") if directory.config.exists() else ""

    async def history(self, journal: Journal) -> History:
        """Return what the journal says."""
        lineages = self._info.lineages or {self._info.lineage: self._info.parent}
        first = next((lineage for lineage, parent in lineages.items() if parent is None), self._info.lineage)
        with collector_off():
            return await read_history(journal, lineage=first)

    async def nothing_left(self, history: History, open_prompts: Callable[[], PromptSource]) -> str:
        """Say why a run that ended well has nothing more to do under this config; "": it has. The prompts are opened only to look."""
        ended = history.ended == 0 or (self._info.ended is not None and self._info.ended.code == 0)
        ledger, run = history.ledger, self._config.run
        if not ended:
            return ""
        if ledger.trained >= run.steps:
            return f"all {run.steps} steps are trained"
        if run.finish_when is not None and reward_reached(ledger, run.finish_when):
            return "its reward is reached"
        left = ledger.waiting or ledger.running or ledger.ready or ledger.ingested
        if ledger.exhausted and not left and await _next_of(open_prompts(), history) is None:
            return "its prompts are used up"
        return ""

    async def take_up(self, journal: Journal, history: History, inputs: build.Inputs) -> TakenUp:
        """Decide what the run goes on with and make it so. Raises RunFailed, StorageError, PromptError."""
        config, directory = self._config, self._directory
        before = history.lineage
        lineages = {before: None, **self._info.lineages} if before not in self._info.lineages else dict(self._info.lineages)
        line = line_of(before, lineages)
        embedded = config.trainer.kind == "embedded"
        if embedded:
            await asyncio.to_thread(_until_free, directory)
        found = await asyncio.to_thread(newest_version, directory, line, with_state=embedded, say=tell)
        if found is None and not config.model.path and history.ledger.trained:
            raise RunFailed(
                f"{directory.weights}: holds no complete version, and {history.ledger.trained} batches were trained: restore the weights, "
                "or start another run"
            )
        version = found or 0
        check_version(history, version, config.run.keep_payloads)
        if version < history.ledger.trained:
            lineages[child := secrets.token_hex(3)] = f"{before}-{version}"
            line = line_of(child, lineages)
            tell(f"training goes back from version {history.ledger.trained} to {version}, the newest there is: lineage {child} begins")
        changed, acknowledged = self._compare(), history.ledger.trained
        now, old = self._now, self._info
        info = msgspec.structs.replace(
            self._now,
            id=self._info.id,
            created=self._info.created,
            engine_version=old.engine_version if now.engine_version == UNKNOWN else now.engine_version,
            trainer_version=old.trainer_version if now.trainer_version == UNKNOWN else now.trainer_version,
            lineage=line.lineage,
            parent=lineages[line.lineage],
            lineages=lineages,
            resumes=self._info.resumes + 1,
        )
        save_run_info(directory, info)
        ahead = [k for k in history.ledger.formed if k >= version]
        stored = await asyncio.to_thread(self._stored, ahead)
        with collector_off():
            resumption = await take_up(
                journal,
                history,
                version=version,
                line=line,
                limits=limits_of(config.rollout, config.run.steps),
                prompts=inputs.prompts,
                stored=stored.get,
                advantages=inputs.advantages,
                clock=time.time,
                trained_at=lambda version: completed_at(directory, version),
                changed=changed,
                keeps=config.run.keep_payloads,
            )
        with storage_errors(f"{directory.config}: cannot be written"):
            write_atomically(directory.config, resolved(config).encode())
        await asyncio.to_thread(remove_batches, directory, resumption.ledger.next_batch, lineages=lineages)
        trainer = build.trainer_of(config, directory, line.lineage, lambda: None)
        await complete_rows(directory, version, trainer.metrics, before=before, acknowledged=acknowledged)
        _say_what_goes_on(resumption)
        path = str(directory.weight(version)) if found is not None or not config.model.path else config.model.path
        return TakenUp(info=info, first=Checkpoint(version, f"{line.lineage}-{version}", path), resumption=resumption)

    def _stored(self, ks: list[int]) -> dict[int, StoredBatch]:
        return {k: batch for k in ks if (batch := stored_batch(self._directory, k)) is not None}

    def _compare(self) -> list[str]:
        """Point out what differs from the process before; return the keys of the config that do."""
        for what, old, new in (
            ("headway", self._info.headway_version, self._now.headway_version),
            ("the engine", self._info.engine_version, self._now.engine_version),
            ("the trainer", self._info.trainer_version, self._now.trainer_version),
        ):
            if old != new and UNKNOWN not in {old, new}:  # what is not known yet is compared when it is (`launch.record`)
                tell(f"{what} was {old} and is {new} now")
        changed = changed_keys(self._config_before, resolved(self._config))
        if changed is None:
            tell(f"{self._directory.config}: is missing or damaged, and written anew: what has changed in the config cannot be told")
            return []
        if changed:
            _log.info("the config has changed at %s", ", ".join(changed))
        coupled = [key for key in changed if key in _PIPELINE]
        if len(coupled) > 1:
            tell(f"{', '.join(coupled)} have changed together: what each of them did cannot be told apart in this run's curves")
        return changed


def _until_free(directory: RunDirectory) -> None:
    """Wait for a trainer of headway's own that has outlived its orchestrator: it may be about to publish a version."""
    if directory.trainer_lock.exists():  # otherwise none has ever been there
        with alone(directory.trainer_lock):
            pass


def changed_keys(before: str, now: str) -> list[str] | None:
    """Return the keys at which two resolved configs differ, sorted; None where the old one is empty or cannot be read."""
    try:
        old = dict(_leaves(tomllib.loads(before)))
    except tomllib.TOMLDecodeError:
        return None
    new = dict(_leaves(tomllib.loads(now)))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)) if old else None


def _leaves(table: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value


async def _next_of(prompts: PromptSource, history: History) -> object:
    async for prompt in prompts.after(history.consumed.position(history.ledger)):
        return prompt
    return None


def _say_what_goes_on(resumption: Resumption) -> None:
    plan = resumption.plan
    if plan is None:
        return
    groups: list[ReadyGroup | FinishedGroup | ContinuedGroup] = [*resumption.ready, *resumption.unscored, *resumption.continued]
    members = sum(len(group.rollouts) for group in groups)
    parts = [
        f"{members} finished rollouts kept",
        f"{len(resumption.ready) + len(resumption.unscored)} groups complete",
        f"{len(resumption.continued)} groups go on",
        f"{len(plan.interrupted)} begin anew",
        *(f"{count} groups dropped ({_REASONS[reason]})" for reason, count in plan.counts.items()),
        *([f"batches shipped again: {', '.join(map(str, plan.ship_again))}"] if plan.ship_again else []),
    ]
    text = f"taken up at version {plan.version}, batch {plan.k} next: {', '.join(parts)}"
    tell(text, level=logging.INFO)
