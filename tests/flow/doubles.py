"""What these tests stand components on: values that are quick to write, and a real recorder over a journal in memory."""

import asyncio
from contextlib import asynccontextmanager

from headway.errors import first_cause
from headway.events import Admitted, BatchAcknowledged, BatchFormed, Draining, Finished, GroupDropped, Published, Ready, RolloutDropped
from headway.flow.channels import Channel
from headway.flow.failed_groups import FailedGroups
from headway.flow.payloads import Payloads
from headway.flow.recorder import Recorder
from headway.sim.journal import SimJournal
from headway.types import Admission, Checkpoint, Failure, FinishedGroup, Prompt, Rollout


def prompt(name=0, epoch=0):
    return Prompt(f"p{name}", epoch, {})


def rollout(group=0, member=0, *, reward=1.0, head=0, tail=None, finish="stop", attempt=0, rewards=None):
    return Rollout(
        group=group,
        member=member,
        attempt=attempt,
        prompt_id=f"p{group}",
        environment="test",
        reward=reward,
        rewards=rewards or {},
        finish=finish,
        turns=1,
        started=0.0,
        finished=0.0,
        engine="e",
        metadata={},
        samples=1,
        tokens=8,
        sampled_tokens=5,
        head=head,
        tail=head if tail is None else tail,
        payload=b"",
    )


def failure(cause="environment_error", *, retryable=True, detail="scripted"):
    return Failure(cause, detail, retryable)


def checkpoint(version):
    return Checkpoint(version, f"line-{version}", f"/weights/{version}")


class Spine:
    """A recorder, what was recorded through `record` (in `events`), and short ways to let history happen."""

    def __init__(self, *, commit_seconds=0.0, fails_at=None, published=True, max_held_bytes=2**30, max_prompt_failures=3):
        self.journal = SimJournal(commit_seconds=commit_seconds, fails_at=fails_at)
        self.recorder = Recorder(self.journal)
        self.watch = self.recorder.watch
        self.payloads = Payloads(
            commit=self.recorder.commit, read=self.journal.read, watch=self.watch, max_held_bytes=max_held_bytes, clock=self.clock
        )
        self.ledger = self.watch.now
        self.events = []
        self.requeued = []
        self.failed = FailedGroups(
            watch=self.watch,
            record=self.record,
            requeue=self.requeued.append,
            max_prompt_failures=max_prompt_failures,
            clock=self.clock,
        )
        if published:
            self.publish(0)

    def clock(self):
        return asyncio.get_running_loop().time()

    def record(self, event):
        self.recorder.record(event)
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def publish(self, version):
        self.record(Published(0.0, version, ("e",)))

    def drain(self, reason="asked to"):
        self.record(Draining(0.0, reason))

    def acknowledge(self, k):
        self.record(BatchAcknowledged(0.0, k))

    def admit(self, group, members=2, *, birth=None, of=None):
        given = of or prompt(group)
        birth = self.ledger.version if birth is None else birth
        self.record(Admitted(0.0, group, given.id, given.epoch, members, birth))
        return Admission(group, given, members, birth)

    def end(self, admission, member):
        self.record(Finished(0.0, admission.group, member, 0, 1.0, 8, 5, 0, 0))

    def finished_group(self, group, rewards=(0.0, 1.0), *, lost=(), birth=None, of=None, **more):
        """Admit a group and let its members end: one rollout per reward, and those lost. Figures of `more` go to all rollouts."""
        admission = self.admit(group, len(rewards) + len(lost), birth=birth, of=of)
        for member in range(len(rewards)):
            self.end(admission, member)
        for member, cause in enumerate(lost, len(rewards)):
            self.record(RolloutDropped(0.0, group, member, 0, cause, "", 0, final=True))
        more = {"head": admission.birth} | more
        made = tuple(rollout(group, member, reward=reward, **more) for member, reward in enumerate(rewards))
        return FinishedGroup(admission, made, tuple(lost))

    def ready_group(self, group, members=2):
        admission = self.admit(group, members)
        self.ready_now(group)
        return admission

    def ready_now(self, group):
        self.record(Ready(0.0, group, zero_advantage=False))

    def drop(self, group, cause="incomplete", *, requeued=False):
        self.record(GroupDropped(0.0, group, cause, "", 0, requeued))

    def form(self, *groups):
        self.record(BatchFormed(0.0, self.ledger.next_batch, groups, 0.0))


async def filled(*values):
    """Return a closed channel that holds these."""
    channel = Channel(max(1, len(values)))
    for value in values:
        await channel.send(value)
    channel.close()
    return channel


@asynccontextmanager
async def beside(*coroutines):
    """Run these while the body runs, and cancel them at its end; an error in any of them cancels the body and travels bare."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
            yield running
            for task in running:
                task.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


async def together(*coroutines):
    """Run these to their ends; an error in any of them cancels the others and travels bare."""
    async with beside(*coroutines) as running:
        await asyncio.wait(running)


async def turns(n=20):
    """Let everything that can happen at this instant happen."""
    for _ in range(n):
        await asyncio.sleep(0)
