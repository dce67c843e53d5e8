"""Runs that are played look seldom for cyclic garbage, and leave Python's settings as they were."""

import gc

import pytest

from headway.sim.garbage import collected_seldom
from headway.sim.loop import run


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_within_the_block_it_takes_a_million_objects_and_after_it_what_it_took_before():
    gc.set_threshold(700, 10, 10)
    with collected_seldom():
        assert gc.get_threshold()[0] == 1_000_000
        with collected_seldom():
            assert gc.get_threshold()[0] == 1_000_000
        assert gc.get_threshold()[0] == 1_000_000
    assert gc.get_threshold() == (700, 10, 10)


def test_a_run_that_fails_leaves_the_settings_as_they_were():
    gc.set_threshold(701, 11, 12)
    with pytest.raises(LookupError), collected_seldom():
        raise LookupError
    assert gc.get_threshold() == (701, 11, 12)


@pytest.mark.parametrize("given", [(0, 10, 10), (2_000_000, 20, 30)])
def test_who_looks_more_seldom_or_never_is_left_alone(given):
    gc.set_threshold(*given)
    with collected_seldom():
        assert gc.get_threshold() == given


def test_the_result_of_a_run_is_not_written_out_as_text():
    class History:
        def __repr__(self):
            raise AssertionError("a history of millions of events would be written out")

    async def main():
        return History()

    assert isinstance(run(main()), History)
