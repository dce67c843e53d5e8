"""Whole runs with rollouts from outside: they take a share of each batch, leave live staleness alone, and every one is accounted for."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial
from math import inf

import pytest
from offered_groups import offered_group

from headway.events import BatchAcknowledged, BatchFormed, GroupDropped, Ingested
from headway.flow.ingest import Refused, Taken
from headway.orchestrator import Orchestrator, Parts, Sections
from headway.rules.advantages import grpo
from headway.settings import EnvironmentSection, MetricsSection, RolloutSection, RunSection
from headway.sim.distributions import Lognormal
from headway.sim.engine import EngineSettings, SimEngine
from headway.sim.journal import SimJournal
from headway.sim.loop import run as run_on_virtual_time
from headway.sim.prompts import ListPrompts, RecordingExporter
from headway.sim.store import SimBatchStore
from headway.sim.trainer import SimTrainer, TrainerSettings
from headway.sim.worker import RolloutSettings, SimWorker
from headway.types import Checkpoint

B, G, STEPS = 8, 2, 24
BLOCKED, BLOCKED_SECONDS = 8, 20.0  # the batch at which the trainer stands still, and for how long


async def files(n):
    for number in range(n):
        yield offered_group(f"file {number}", "replay")


@dataclass(kw_only=True)
class Played:
    answers: list
    events: list
    store: SimBatchStore
    ledger: object
    rows: dict
    reason: str

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def play(rollout, *, posts_per_second=0.0, replayed=None, prompts=1000, epochs=0, interleaving=None, steps=STEPS):
    """Play a run, a second a batch but for the one that takes much longer, with groups posted all the time."""

    async def main():
        loop = asyncio.get_running_loop()
        engines = [SimEngine("engine-0", EngineSettings())]
        store, journal, recorded = SimBatchStore(whole=True), SimJournal(commit_seconds=0.01), RecordingExporter()
        answers = []

        async def post(ingest):
            async with asyncio.TaskGroup() as tasks:
                while True:
                    answers.append(tasks.create_task(ingest.offer(offered_group(f"posted {len(answers)}", "external"))))
                    await asyncio.sleep(1 / posts_per_second)

        parts = Parts(
            prompts=ListPrompts(prompts, epochs=epochs),
            worker=SimWorker(RolloutSettings(seconds=Lognormal(1.0, 0.5)), engines),
            engines=engines,
            trainer=SimTrainer(TrainerSettings(late={BLOCKED: BLOCKED_SECONDS}), store.batches, lineage="sim"),
            store=store,
            journal=journal,
            exporters=[recorded],
            first=Checkpoint(0, "sim-0", "sim://0"),
            advantages=grpo,
            replayed=replayed,
            listen=(lambda ingest: partial(post, ingest)) if posts_per_second else None,
            clock=loop.time,
        )
        sections = Sections(
            run=RunSection(steps=steps),
            rollout=rollout,
            environment=EnvironmentSection(entry="sim:world"),
            metrics=MetricsSection(interval_seconds=1.0),
        )
        orchestrator = Orchestrator(parts, sections)
        reason = await orchestrator.run()
        done = [task.result() for task in answers if task.done() and not task.cancelled()]
        return Played(answers=done, events=journal.events, store=store, ledger=orchestrator.ledger, rows=recorded.rows, reason=reason)

    return run_on_virtual_time(main(), seed=interleaving, limit_seconds=1e6)


def section(**more):
    defaults = {"groups_per_batch": B, "group_size": G, "max_concurrent": 64, "steps_ahead": 2.0, "max_staleness": 2, "replayed_groups": 3}
    return RolloutSection(**defaults | more)


MODES = [{"on_stale": "mask"}, {"on_stale": "wait"}, {"on_stale": "drop"}, {"on_stale": "train"}, {"enforce": "ship"}]
MODES += [{"on_stale": "drop", "enforce": "ship"}]


@pytest.mark.parametrize("interleaving", [None, 1])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(mode.values()))
def test_posted_groups_take_their_share_and_every_one_is_accounted_for(mode, interleaving):
    played = play(section(**mode), posts_per_second=20.0, interleaving=interleaving)
    outside = {event.group: event for event in played.of(Ingested)}
    dropped = {event.group for event in played.of(GroupDropped)} & outside.keys()
    batches = [event.groups for event in played.of(BatchFormed)]
    trained = {one for groups in batches for one in groups} & outside.keys()
    counts = played.rows["pipeline"][-1]
    refused = counts["ingest_refused"]
    assert len(played.of(BatchAcknowledged)) == STEPS
    assert counts["ingest_submitted"] == counts["ingest_accepted"] + sum(refused.values())
    assert counts["ingest_accepted"] == len(outside) == len(trained) + len(dropped) + counts["ingest_in_line"]
    assert counts["ingest_in_line"] == len(played.ledger.ingested) == 0  # nothing is left when all steps are trained
    assert {answer.group for answer in played.answers if isinstance(answer, Taken)} <= outside.keys()
    assert {answer.reason for answer in played.answers if isinstance(answer, Refused)} <= {"no slack", "busy", "ending"}
    assert refused["no slack"] > 0
    assert all(outside[one].k == k for k, groups in enumerate(batches) for one in groups if one in outside)
    shares = [len(outside.keys() & set(groups)) for groups in batches]
    assert max(shares) == 3
    assert sum(shares) > STEPS  # they get in, not once but all along
    assert all(len(groups) == B for groups in batches)  # and so do live ones


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(mode.values()))
def test_what_comes_from_outside_is_marked_and_in_no_staleness_statistics(mode):
    played = play(section(**mode), posts_per_second=5.0, replayed=files(15))
    sources = Counter()
    for k, batch in played.store.written.items():
        live = [one for group in batch.groups for one in group.rollouts if one.source == "live"]
        others = [one for group in batch.groups for one in group.rollouts if one.source != "live"]
        sources.update(one.source for one in others)
        kept = played.store.batches[k]
        assert sum(kept.tokens.values()) + sum(kept.masked.values()) == sum(one.sampled_tokens for one in live)
        assert all((one.head, one.tail, one.environment) == (-1, -1, "elsewhere") for one in others)
        assert kept.max_seen <= (inf if mode.get("on_stale") == "train" else 2)
    assert sources["replay"] == 30
    assert sources["external"] > 0


@pytest.mark.parametrize("on_stale", ["mask", "wait", "drop"])
def test_the_trainer_does_not_wait_for_files(on_stale):
    played = play(section(on_stale=on_stale), replayed=files(20))
    counts = played.rows["pipeline"][-1]
    assert (counts["ingest_submitted"], counts["ingest_accepted"], counts["ingest_refused"]) == (20, 20, {})
    assert len(played.of(BatchAcknowledged)) == STEPS


def test_a_source_that_is_not_used_up_at_the_end_is_told_so():
    played = play(section(), replayed=files(10_000))
    counts = played.rows["pipeline"][-1]
    assert counts["ingest_submitted"] == counts["ingest_accepted"] + 3  # as many wait as a batch may take
    assert counts["ingest_refused"] == {"ending": 3}
    shares = Counter(event.k for event in played.of(Ingested))
    assert max(shares.values()) == 3
    assert shares.total() >= 3 * (STEPS - 4)  # its whole share of each batch, once the first live groups are through


@pytest.mark.parametrize("on_stale", ["mask", "wait", "drop"])
def test_a_run_of_files_and_few_prompts_ends_with_all_of_them_trained(on_stale):
    played = play(section(on_stale=on_stale), replayed=files(12), prompts=40, epochs=1)
    trained = {one for event in played.of(BatchFormed) for one in event.groups}
    placed = {event.group for event in played.of(Ingested)}
    assert played.reason == "the prompts are used up"
    assert placed <= trained
    given_up = [event for event in played.of(GroupDropped) if not event.requeued]
    assert len(trained - placed) == 40 - len(given_up)
