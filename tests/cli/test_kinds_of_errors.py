"""Every ending says whose matter it is, and a bug of headway's asks to be reported with what is needed for it."""

import subprocess
import sys
from typing import get_args

import pytest

from headway.errors import (
    BoundBreached,
    ConfigError,
    EmptyBatches,
    EngineFailed,
    EnvironmentFailed,
    HeadwayError,
    Kind,
    PromptError,
    StorageError,
    TrainerFailed,
    WorkerFailed,
    kind_of,
)

BROKEN = """
from headway.cli import command_line
from headway.cli.commands import app
from headway import errors
import sys

@app.command()
def broken() -> None:
    try:
        {}["lost"]
    except KeyError as error:
        raise %s from error

sys.exit(command_line(["broken"]))
"""


def classes(root: type[HeadwayError]) -> list[type[HeadwayError]]:
    return [root, *(below for each in root.__subclasses__() for below in classes(each))]


def play(raised: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BROKEN % raised], capture_output=True, text=True, timeout=120, check=False)


def test_every_error_has_a_kind_of_the_taxonomy():
    assert {each.kind for each in classes(HeadwayError)} <= set(get_args(Kind))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PromptError("x"), "prompt"),
        (EnvironmentFailed("x"), "environment"),
        (WorkerFailed("x"), "environment"),
        (EmptyBatches("x"), "environment"),
        (EngineFailed("x"), "engine"),
        (TrainerFailed("x"), "trainer"),
        (StorageError("x"), "storage"),
        (ConfigError("x"), "config"),
        (BoundBreached("x"), "bug"),
        (KeyError("x"), "bug"),
        (ExceptionGroup("two", [KeyError("x"), ExceptionGroup("one", [EngineFailed("x")])]), "engine"),
    ],
)
def test_whose_matter_an_error_is(error: BaseException, kind: str):
    assert kind_of(error) == kind


def test_the_exit_line_has_the_kind():
    done = play('errors.EngineFailed("engine-0 is gone", detail="its log")')
    assert (done.returncode, done.stderr) == (1, "headway: engine-0 is gone [engine]\nits log\n")


def test_a_bug_shows_its_traceback_with_the_cause_and_asks_to_be_reported():
    done = play('ValueError("two\\nlines")')
    assert done.returncode == 1
    assert "KeyError: 'lost'" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "headway has a bug, please report it with the lines above (a run's events.log has them too): ValueError: two lines [bug]"
