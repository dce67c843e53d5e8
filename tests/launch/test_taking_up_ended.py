"""A run that has nothing more to do is not taken up: what says so, and what gives it something to do."""

from run_disk import config_of, info_of

from headway.events import Ended, SourceExhausted
from headway.formats.run_directory import Ending
from headway.protocols import Entry
from headway.settings import FinishWhen
from headway.sim.prompts import ListPrompts


async def nothing_left(disk, config=None, prompts=None):
    async with disk.resuming(config) as (resume, history, _):
        return await resume.nothing_left(history, lambda: prompts or ListPrompts(4, epochs=1))


async def ended_well(disk, *, formed=2, trained=2, extra=()):
    await disk.write(formed=formed, trained=trained, info=info_of(ended=Ending(0, "done", 9.0)))
    async with disk.journal() as journal:
        await journal.append([Entry(event) for event in extra])


async def test_a_finished_run_has_nothing_left_until_it_is_given_more_steps(disk):
    await ended_well(disk)
    assert await nothing_left(disk, config_of(disk.path, steps=2)) == "all 2 steps are trained"
    assert await nothing_left(disk, config_of(disk.path, steps=3)) == ""
    assert (await disk.taken_up(config_of(disk.path, steps=3))).first.version == 2


async def test_a_run_whose_reward_is_reached_has_nothing_left_until_more_is_asked(disk):
    await ended_well(disk)
    reached, higher = (config_of(disk.path, run={"finish_when": FinishWhen(reward_above=above, over_batches=2)}) for above in (0.4, 0.9))
    assert await nothing_left(disk, reached) == "its reward is reached"
    assert await nothing_left(disk, higher) == ""


async def test_a_run_whose_prompts_are_used_up_has_nothing_left_until_there_are_more(disk):
    await ended_well(disk, extra=[SourceExhausted(9.0)])
    assert await nothing_left(disk) == "its prompts are used up"
    assert await nothing_left(disk, prompts=ListPrompts(5, epochs=1)) == ""
    assert await nothing_left(disk, prompts=ListPrompts(4, epochs=2)) == ""


async def test_a_run_that_was_killed_or_failed_is_never_taken_for_finished(disk):
    await disk.write(formed=2, trained=2)
    assert await nothing_left(disk, config_of(disk.path, steps=2)) == ""


async def test_a_run_that_was_killed_between_its_last_event_and_run_json_is_finished(disk):
    await disk.write(formed=2, trained=2)
    async with disk.journal() as journal:
        await journal.append([Entry(Ended(9.0, 0, "all 2 steps are trained"))])
    assert await nothing_left(disk, config_of(disk.path, steps=2)) == "all 2 steps are trained"
