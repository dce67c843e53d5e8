"""Where and how a run is started does not change how it ends."""

import os
import subprocess
from pathlib import Path

import pytest
from real_runs import Bench, audit

pytestmark = [pytest.mark.e2e, pytest.mark.torch]


def test_I08_directories_with_spaces_and_any_letters_a_proxy_that_is_dead_and_a_dumb_terminal(bench: Bench, tmp_path: Path):
    elsewhere = tmp_path / "süß und böse" / "работа"
    elsewhere.mkdir(parents=True)
    dead = "http://127.0.0.1:9"
    environment = {"HTTP_PROXY": dead, "http_proxy": dead, "ALL_PROXY": dead, "TERM": "dumb", "COLUMNS": "20", "LC_ALL": "C"}
    ended = bench.play(at=elsewhere, in_directory="ein lauf/{name}", environment=environment)
    assert ended.code == 0, ended.err
    assert (elsewhere / "ein lauf" / "run" / "run.json").exists()


def test_a_run_whose_output_nobody_takes_ends_as_any_other(bench: Bench):
    reader, writer = os.pipe()
    os.close(reader)
    full = Path("/dev/full")
    with open(writer, "w") as broken, (full if full.exists() else Path(os.devnull)).open("w") as no_room:  # noqa: PTH123 - a pipe's end
        for name, stream in {"piped": broken, "filled": no_room}.items():
            ended = bench.play("metrics.interval_seconds=0.05", name=name, stdout=stream, stderr=stream)
            assert (ended.code, ended.recorded["code"]) == (0, 0), ended.recorded
            audit(ended, max_staleness=2)


def test_a_run_without_standard_streams_ends_as_any_other(bench: Bench):
    ended = bench.play(closed=True)
    assert (ended.code, ended.recorded["code"]) == (0, 0)
    audit(ended, max_staleness=2)


def test_output_that_cannot_be_written_is_told_by_the_exit_code(bench: Bench):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("w") as no_room:
        command = [*bench.command("check"), "--set", f"model.path={bench.checkpoint}"]
        checked = subprocess.run(command, cwd=bench.directory, stdout=no_room, stderr=subprocess.PIPE, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (1, "headway: standard output cannot be written: No space left on device\n")
