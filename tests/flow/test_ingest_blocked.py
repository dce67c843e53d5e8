"""Fault case A04: groups are pushed at a run whose trainer stands still for a while; each is trained, dropped with a cause, or refused."""

import asyncio
from functools import partial

import pytest
from doubles import beside, prompt, turns
from ingest_stage import UNUSABLE, Stage, group

from headway.events import BatchAcknowledged, GroupDropped, Ingested
from headway.flow.ingest import Taken
from headway.rules.admission import GateLimits
from headway.rules.batching import can_form, chosen, groups_to_take, may_form

B, BOUND, MOST_REPLAYED, RATE = 8, 2, 4, 50
BLOCKED_AT, BLOCKED_SECONDS = 10.0, 50.0


class Run(Stage):
    """Live groups of about a second, batches formed by the rules, and a trainer that is blocked for a while."""

    def __init__(self, on_stale):
        super().__init__(
            commit_seconds=0.01,
            limits=GateLimits(
                groups_per_batch=B,
                group_size=2,
                max_concurrent=1000,
                steps_ahead=float(BOUND),
                steps=1000,
                max_staleness=BOUND,
                on_stale=on_stale,
                replayed_groups=MOST_REPLAYED,
            ),
        )
        self.staleness = []  # of live groups, when their batch was formed
        self.batches = []

    async def live(self):
        async with asyncio.TaskGroup() as tasks:
            for n in range(10**6):
                tasks.create_task(self._rollouts(await self.gate.admit(prompt(n))))

    async def _rollouts(self, admission):
        await asyncio.sleep(0.5 + admission.group % 7 / 10)
        for member in range(admission.members):
            self.spine.end(admission, member)
        self.spine.ready_now(admission.group)

    def _can_form(self, now):
        return can_form(now, self.limits) and may_form(now, self.limits.max_lead)

    async def form(self):
        ledger = self.spine.ledger
        while True:
            while not self._can_form(ledger):
                await self.spine.watch.until(self._can_form)
            groups = chosen(ledger, groups_to_take(ledger, self.limits))
            self.batches.append(groups)
            self.staleness += [ledger.next_batch - ledger.ready[one].birth for one in groups if one in ledger.ready]
            self.spine.form(*groups)

    async def train(self):
        for k in range(10**6):
            await self.spine.watch.until(partial(lambda k, now: now.next_batch > k, k))
            await asyncio.sleep(1.0)
            if BLOCKED_AT <= self.spine.clock() < BLOCKED_AT + BLOCKED_SECONDS:
                await asyncio.sleep(BLOCKED_AT + BLOCKED_SECONDS - self.spine.clock())
            self.spine.record(BatchAcknowledged(self.spine.clock(), k))
            self.spine.publish(k + 1)

    async def push(self):
        """Post groups at 50/s, one in a hundred of them useless, until the trainer is free again; return the answers."""
        async with asyncio.TaskGroup() as tasks:
            posted = []
            while self.spine.clock() < BLOCKED_AT + BLOCKED_SECONDS:
                name = UNUSABLE if len(posted) % 100 == 99 else f"pushed {len(posted)}"
                posted.append(tasks.create_task(self.ingest.offer(group(name))))
                await asyncio.sleep(1 / RATE)
        return [task.result() for task in posted]


@pytest.mark.parametrize("on_stale", ["mask", "wait", "drop"])
async def test_A04_pushed_rollouts_are_refused_once_the_budget_is_used_and_every_one_is_accounted_for(on_stale):
    run = Run(on_stale)
    async with beside(run.spine.recorder.run(), run.ingest.run(), run.live(), run.form(), run.train()):
        await turns()
        answers = await run.push()
        await asyncio.sleep(10.0)
        outside = {event.group: event for event in run.spine.of(Ingested)}
        dropped = {event.group for event in run.spine.of(GroupDropped)} & outside.keys()
        trained = {one for batch in run.batches for one in batch} & outside.keys()
        submitted, accepted, refused, in_line = run.balance()
    assert submitted == len(answers) >= RATE * (BLOCKED_AT + BLOCKED_SECONDS)
    assert submitted == len(trained) + len(dropped) + in_line + sum(refused.values())
    assert in_line == 0  # ten seconds of training later nothing is left over, and nothing was evicted
    assert set(refused) == {"no slack", "busy"}
    assert accepted == len(outside)
    assert {answer.group for answer in answers if isinstance(answer, Taken)} == outside.keys()
    assert {answer.group for answer in answers if isinstance(answer, Taken) and answer.batch is None} == dropped
    at_work = [event for event in outside.values() if event.time < BLOCKED_AT]
    blocked = [event for event in outside.values() if BLOCKED_AT + 2.0 < event.time < BLOCKED_AT + BLOCKED_SECONDS]
    assert len(at_work) >= MOST_REPLAYED * 8  # training took a share of them
    assert blocked == []  # and once it stood still the budget was used up soon
    assert all(outside[one].k == k for k, batch in enumerate(run.batches) for one in batch if one in outside)
    assert all(len(batch) == B and len(outside.keys() & set(batch)) <= MOST_REPLAYED for batch in run.batches)
    if on_stale != "mask":  # there the token is what the bound is kept on
        assert max(run.staleness) <= BOUND
    assert min(run.staleness) >= 0
    assert sum(run.spine.ledger.births.values()) == len(run.spine.ledger.running) + len(run.spine.ledger.ready)
