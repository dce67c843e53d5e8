"""A dispatcher on a stage: rollouts that take and end as a script says, and whoever reads the groups that go on."""

import asyncio

from doubles import beside, prompt, rollout

from headway.events import Finished, Ready
from headway.flow.channels import Channel
from headway.flow.dispatcher import Dispatcher


class Stage:
    """A dispatcher between scripted rollouts (`script[group, member]` = (seconds, result)) and a channel that is read to its end."""

    def __init__(
        self, spine, script, *, groups, members=2, capacity=100, whole_groups_only=False, limit=100, most=1000, continued=(), unscored=()
    ):
        self.spine = spine
        self.script = script
        self.members = members
        self.cancelled = []
        self.started = []
        self.arrived = []
        self.limit = limit
        self.finished = Channel(capacity)
        self.dispatcher = Dispatcher(
            prompts=self._prompts(groups),
            admit=self._admit,
            run_rollout=self._run,
            record=spine.record,
            commit=spine.payloads.commit,
            finished=self.finished,
            drop_failed=spine.failed.drop,
            whole_groups_only=whole_groups_only,
            max_concurrent=most,
            clock=spine.clock,
            continued=continued,
            unscored=unscored,
        )

    async def _prompts(self, n):
        for number in range(n):
            yield prompt(number)

    async def _admit(self, given):
        await self.spine.watch.until(lambda now: bool(now.draining) or len(now.running) < self.limit)
        if self.spine.ledger.draining:
            return None
        return self.spine.admit(self.spine.ledger.next_group, self.members, of=given)

    async def _run(self, given, *, group, member, on_retry):
        seconds, result = self.script.get((group, member), (1.0, None))
        self.started.append((group, member))
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append((group, member))
            raise
        if isinstance(result, list):  # failures that are retried, then the end
            for attempt, tried in enumerate(result[:-1]):
                on_retry(attempt, tried)
            result = result[-1]
        if isinstance(result, Exception):
            raise result
        return rollout(group, member) if result is None else result

    async def collect(self):
        async for group in self.finished:
            for member in group.rollouts:
                assert any(
                    isinstance(e, Finished) and (e.group, e.member) == (member.group, member.member) for e in self.spine.journal.events
                )
            self.arrived.append(group)
            self.spine.record(Ready(0.0, group.admission.group, zero_advantage=False))

    async def play(self):
        async with beside(self.spine.recorder.run()):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.dispatcher.run())
                tasks.create_task(self.collect())
            await self.spine.recorder.flush()
