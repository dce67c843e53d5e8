"""A group may be dropped while its members wait for the scorer (`on_stale = "drop"`): its payloads may be gone, and nobody is asked."""

import asyncio

import pytest
from doubles import filled, rollout, together

from headway.errors import StorageError
from headway.flow.channels import Channel
from headway.flow.scorer import Scorer
from headway.types import Admission, FinishedGroup, Prompt, Score


class Scene:
    """Groups of two members before a scorer that takes one at a time, a second each; payloads of a group that is dropped are gone."""

    def __init__(self, groups):
        self.live = set(range(groups))
        self.asked = []
        self.events = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.out = []
        self._groups = [
            FinishedGroup(Admission(n, Prompt(f"p{n}", 0, {}), 2, 0), (rollout(n, 0), rollout(n, 1)), ()) for n in range(groups)
        ]

    async def score(self, request):
        self.asked.append((request.group, request.rollouts[0].member))
        await asyncio.sleep(1)
        return [Score(1.0)]

    async def load(self, rollouts):
        await self.reads.wait()
        if rollouts[0].group not in self.live:
            raise ExceptionGroup("unhandled errors in a TaskGroup", [StorageError("000001.rollouts: cannot be read: No such file")])
        return tuple(rollouts)

    async def play(self, *beside_it):
        finished: Channel[FinishedGroup] = await filled(*self._groups)
        scorer = Scorer(
            finished=finished,
            score=self.score,
            scope="rollout",
            concurrency=1,
            timeout_seconds=0.0,
            load=self.load,
            record=self.events.append,
            clock=float,
            is_live=self.live.__contains__,
        )

        async def collect():
            async for group in scorer.scored:
                self.out.append(group)

        await together(scorer.run(), collect(), *beside_it)
        return sorted(self.out, key=lambda group: group.admission.group)


async def test_a_group_that_is_dropped_while_a_member_waits_is_passed_on_and_ends_nothing():
    scene = Scene(2)

    async def drop():
        await asyncio.sleep(0.5)
        scene.live.discard(0)

    first, second = await scene.play(drop())
    assert scene.asked == [(0, 0), (1, 0), (1, 1)], "its second member had not had its turn"
    assert (first.rollouts[0].reward, first.lost, len(first.rollouts)) == (rollout(0, 0).reward, (), 2)
    assert [one.reward for one in second.rollouts] == [1.0, 1.0]
    assert scene.events == [], "nothing is lost to the scorer"


async def test_a_group_that_is_dropped_while_its_payloads_are_read_is_passed_on_too():
    scene = Scene(1)
    scene.reads.clear()

    async def drop():
        await asyncio.sleep(0.5)
        scene.live.clear()
        scene.reads.set()

    (group,) = await scene.play(drop())
    assert (scene.asked, len(group.rollouts), scene.events) == ([], 2, [])


async def test_a_payload_that_is_gone_though_the_group_is_live_is_an_error():
    scene = Scene(1)

    async def lose(rollouts):
        raise StorageError("000001.rollouts: cannot be read: No such file")

    scene.load = lose
    with pytest.raises(StorageError, match="No such file"):
        await scene.play()
