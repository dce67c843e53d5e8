"""What is told at the terminal of parts that come and go: a line each, whole, in order, and never at the run's expense."""

import io
import logging
import sys
from typing import Any

import pytest
from terminals import Standing

from headway.errors import EngineFailed
from headway.flow.engine_pool import EnginePool
from headway.launch.telling import parts_told
from headway.secrecy import HIDDEN
from headway.types import Checkpoint


class Engine:
    kind = "vllm"

    def __init__(self, name):
        self.name = name
        self.url = f"http://{name}"


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO, "headway")


def checkpoint(version):
    return Checkpoint(version, f"line-{version}", "/weights")


def pool_of(*names):
    engines: list[Any] = [Engine(name) for name in names]
    return EnginePool(engines, record=lambda _: None, clock=lambda: 0.0, lost_timeout_seconds=60.0)


async def test_an_engine_that_is_lost_serves_again_joins_or_leaves_is_a_line_each(capsys):
    with parts_told():
        pool = pool_of("engine-0")
        pool.serves("engine-0", checkpoint(0))
        pool.lost("engine-0", EngineFailed("it was killed\n  by SIGKILL"))
        pool.lost("engine-0", EngineFailed("it is still dead"))
        pool.serves("engine-0", checkpoint(1))
        pool.joins(Engine("engine-1"))
        pool.serves("engine-1", checkpoint(1))
        pool.serves("engine-1", checkpoint(2))
        place = await pool.acquire()
        pool.leaves(place.name)
        pool.stays(place.name)
        pool.leaves(place.name)
        pool.release(place)
        pool.leaves("engine-1")
    assert capsys.readouterr().err.splitlines() == [
        "headway: engine-0 is lost: it was killed by SIGKILL",
        "headway: engine-0 does not serve yet, and is tried again: it is still dead",
        "headway: engine-0 serves again, version 1",
        "headway: engine-1 joins: http://engine-1",
        "headway: engine-1 serves, version 1",
        "headway: engine-0 leaves: 1 rollout is in flight there",
        "headway: engine-0 stays",
        "headway: engine-0 leaves: 1 rollout is in flight there",
        "headway: engine-0 has left",
        "headway: engine-1 leaves: 0 rollouts are in flight there",
        "headway: engine-1 has left",
    ]


@pytest.mark.parametrize("part", ["trainer", "workers"])
def test_what_is_found_out_of_trainer_and_workers_is_told_as_well(part, capsys):
    with parts_told():
        logging.getLogger(f"headway.{part}").warning("it ended\nunexpectedly")
    assert capsys.readouterr().err == "headway: it ended unexpectedly\n"


def test_outside_of_a_run_and_of_other_things_nothing_is_told(capsys):
    with parts_told():
        logging.getLogger("headway").warning("something else")
    logging.getLogger("headway.engines").warning("engine-0 is lost")
    assert capsys.readouterr().err == ""


def test_a_login_is_not_told(capsys):
    with parts_told():
        logging.getLogger("headway.engines").warning("engine-0 joins: http://ann:word@host")
    err = capsys.readouterr().err
    assert "word" not in err
    assert HIDDEN in err


class Gone(io.StringIO):
    """A terminal that nobody reads any more. `refused`: how often it was written to."""

    refused = 0

    def write(self, text):
        self.refused += 1
        raise BrokenPipeError


def test_a_terminal_that_has_gone_ends_nothing(monkeypatch):
    gone = Gone()
    monkeypatch.setattr(sys, "stderr", gone)
    with parts_told():
        for _ in range(3):
            logging.getLogger("headway.engines").warning("engine-0 is lost")
    assert gone.refused == 3


def test_a_terminal_that_stands_still_holds_nobody_up(monkeypatch):
    standing = Standing()
    monkeypatch.setattr(sys, "stderr", standing)
    with parts_told():
        logging.getLogger("headway.engines").warning("line 0")
        assert standing.asked.wait(60)  # it is being printed: there is room for 256 behind it
        for number in range(1, 1000):
            logging.getLogger("headway.engines").warning("line %d", number)
        standing.goes_on.set()
    *lines, missing = standing.getvalue().splitlines()
    assert lines == [f"headway: line {n}" for n in range(len(lines))]
    assert len(lines) == 257
    assert missing.startswith(f"headway: {1000 - len(lines)} lines are missing here")
