"""Payloads: durable first, in memory while they fit, read again whole when they are needed, and never another's."""

import asyncio

import msgspec
import pytest
from doubles import Spine, beside, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import StorageError, first_cause
from headway.events import Finished
from headway.flow.payloads import READS_AT_ONCE, Payloads
from headway.sim.loop import run
from headway.types import Admission, PayloadReference, Prompt, ReadyGroup


async def never(event, rollout=None):
    raise AssertionError(f"nothing is committed here: {event}")


def with_payload(group=0, member=0, size=10, **more):
    return msgspec.structs.replace(rollout(group, member, **more), payload=bytes([member + 1]) * size, metadata={"kept": member})


async def committed(spine, *rollouts):
    """Admit their groups and make them durable, one after another."""
    members = {one.group: sum(other.group == one.group for other in rollouts) for one in rollouts}
    for group, count in members.items():
        spine.admit(group, count)
    async with beside(spine.recorder.run()):
        return [await spine.payloads.commit(one) for one in rollouts]


async def test_what_is_durable_has_a_reference_and_its_payload_while_memory_has_room():
    spine = Spine(max_held_bytes=25)
    whole = [with_payload(0, member) for member in range(4)]
    kept = await committed(spine, *whole)
    assert [len(one.payload) for one in kept] == [10, 10, 0, 0]
    assert spine.ledger.held_size == 40
    told = [event for event in spine.journal.events if isinstance(event, Finished)]
    assert [one.reference for one in kept] == [event.reference for event in told]
    assert [event.size for event in told] == [10] * 4


async def test_memory_has_room_again_once_the_groups_are_gone():
    spine = Spine(max_held_bytes=10)
    assert [len(one.payload) for one in await committed(spine, with_payload(0), with_payload(1))] == [10, 0]
    spine.drop(0)
    spine.ready_now(1)
    assert [len(one.payload) for one in await committed(spine, with_payload(2))] == [0]
    spine.form(1)
    spine.drop(2, "stale")
    assert [len(one.payload) for one in await committed(spine, with_payload(3))] == [10]


async def test_a_stub_is_loaded_as_it_was_with_the_reward_that_it_was_given_since():
    spine = Spine(max_held_bytes=0)
    whole = [with_payload(0, member, reward=None, rewards={"format": 1.0}, finish="length") for member in range(20)]
    stubs = await committed(spine, *whole)
    scored = [msgspec.structs.replace(one, reward=float(one.member), rewards={"style": 0.5}) for one in stubs]
    loaded = await spine.payloads.load(scored)
    for one, full in zip(loaded, whole, strict=True):
        rewards = {"format": 1.0, "style": 0.5}
        assert one == msgspec.structs.replace(full, reward=float(full.member), rewards=rewards, reference=one.reference)


async def test_of_groups_everything_but_the_payloads_stays():
    spine = Spine(max_held_bytes=0)
    stubs = await committed(spine, with_payload(3, 0), with_payload(3, 1))
    group = ReadyGroup(Admission(3, Prompt("p3", 0, {}), 2, 0), tuple(stubs), (0.5, -0.5), 7)
    (loaded,) = await spine.payloads.load_groups([group])
    assert (loaded.admission, loaded.advantages, loaded.ready_version) == (group.admission, (0.5, -0.5), 7)
    assert [one.payload for one in loaded.rollouts] == [b"\1" * 10, b"\2" * 10]


async def test_nothing_is_read_that_is_in_memory_or_was_never_written():
    async def read(reference):
        raise AssertionError(reference)

    payloads = Payloads(commit=never, read=read, watch=Spine().watch, max_held_bytes=0, clock=float)
    whole = (with_payload(), msgspec.structs.replace(with_payload(), reference=PayloadReference(1, 2, 3, 4)), rollout())
    assert await payloads.load(whole) == whole


async def test_several_are_read_at_once_and_no_more():
    now = most = 0

    async def read(reference):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(1.0)
        now -= 1
        return with_payload(0, reference.offset)

    payloads = Payloads(commit=never, read=read, watch=Spine().watch, max_held_bytes=0, clock=float)
    stubs = [msgspec.structs.replace(rollout(0, n), reference=PayloadReference(1, n, 10, 0)) for n in range(3 * READS_AT_ONCE)]
    loaded = await asyncio.gather(payloads.load(stubs[:READS_AT_ONCE]), payloads.load(stubs[READS_AT_ONCE:]))
    assert [one.member for part in loaded for one in part] == list(range(3 * READS_AT_ONCE))
    assert (most, asyncio.get_running_loop().time()) == (READS_AT_ONCE, 3.0)


async def test_a_record_that_cannot_be_read_again_is_named():
    async def read(reference):
        raise StorageError("segment 7 is damaged")

    payloads = Payloads(commit=never, read=read, watch=Spine().watch, max_held_bytes=0, clock=float)
    stub = msgspec.structs.replace(rollout(5, 2), reference=PayloadReference(7, 0, 10, 0))
    with pytest.raises(BaseExceptionGroup) as group:
        await payloads.load([stub])
    error = first_cause(group.value)
    assert isinstance(error, StorageError)
    assert str(error) == "the record of group 5, member 2 cannot be read again: segment 7 is damaged"
    assert str(error.__cause__) == "segment 7 is damaged"


async def test_the_record_of_another_is_never_taken_for_it():
    async def read(reference):
        return with_payload(5, 3)

    payloads = Payloads(commit=never, read=read, watch=Spine().watch, max_held_bytes=0, clock=float)
    stub = msgspec.structs.replace(rollout(5, 2), reference=PayloadReference(7, 0, 10, 0))
    with pytest.raises(BaseExceptionGroup) as group:
        await payloads.load([stub])
    assert "group 5, member 2, attempt 0, is not where the journal says: there lies group 5, member 3" in str(first_cause(group.value))


async def _play(sizes, budget):
    spine = Spine(max_held_bytes=budget)
    in_memory = {}
    async with beside(spine.recorder.run()):
        for group, (size, fate) in enumerate(sizes):
            spine.admit(group, 1)
            in_memory[group] = len((await spine.payloads.commit(with_payload(group, size=size))).payload)
            assert sum(in_memory.values()) <= budget, "memory holds more than it may"
            if fate and group:
                spine.ready_now(gone := min(in_memory))
                spine.form(gone)
                del in_memory[gone]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=20), st.integers(0, 100))
def test_O03_memory_never_holds_more_than_the_budget(sizes, budget):
    run(_play(sizes, budget))
