"""A train sink on a stage: finished groups go in as the test says, batches come out and are read one by one; the ledger is a real one."""

import msgspec
from doubles import Spine, beside, turns

from headway.events import GroupDropped
from headway.flow.channels import Channel
from headway.flow.sink_policy import SinkPolicy
from headway.flow.train_sink import TrainSink
from headway.rules.admission import GateLimits
from headway.rules.advantages import dr_grpo

B = 2
POLICY = SinkPolicy(temperature=0.7)
LIMITS = GateLimits(groups_per_batch=B, group_size=2, max_concurrent=1000, steps_ahead=2.0, steps=100, max_staleness=2, max_lead=1)


class Stage:
    """A train sink with both its channels, on a real ledger."""

    def __init__(self, *, b=B, advantages=dr_grpo, keep=None, commit_seconds=0.0, spine=None, load=None, ready=(), **settings):
        policy = {key: settings.pop(key) for key in list(settings) if key in SinkPolicy.__struct_fields__}
        self.spine = spine or Spine(commit_seconds=commit_seconds)
        self.requeued = self.spine.requeued
        self.groups, self.batches = Channel(1000), Channel(1000)
        self.read = []
        self.dispatched = {}  # prompts of groups whose members have not all ended, as the dispatcher would know them
        self.sink = TrainSink(
            groups=self.groups,
            batches=self.batches,
            watch=self.spine.watch,
            record=self.spine.record,
            flush=self.spine.recorder.flush,
            requeue=self.requeued.append,
            cancel=lambda group: self.dispatched.pop(group, None),
            drop_failed=self.spine.failed.drop,
            load=load or self.spine.payloads.load_groups,
            limits=msgspec.structs.replace(LIMITS, groups_per_batch=b, **settings),
            policy=msgspec.structs.replace(POLICY, **policy),
            advantages=advantages,
            keep=keep,
            clock=self.spine.clock,
            ready=ready,
        )

    def running(self):
        return beside(self.sink.run(), self.spine.recorder.run())

    async def give(self, number, rewards=(0.0, 1.0), **more):
        await self.groups.send(self.spine.finished_group(number, rewards, **more))
        await turns()

    async def give_made(self, group):
        await self.groups.send(group)
        await turns()

    async def batch(self):
        batch = await anext(self.batches)
        self.read.append(batch)
        return batch

    def causes(self):
        return {drop.group: drop.cause for drop in self.spine.of(GroupDropped)}


def numbers(batch):
    return [group.admission.group for group in batch.groups]
