import json
import os
import subprocess
import sys

import pytest

from headway.errors import ConfigError, StorageError
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, load_run_info, numbered, save_run_info

INFO = RunInfo(
    id="run-1", lineage="ab12", headway_version="0.1.0", engine_version="1", trainer_version="1", seed=3, created=1.0, parent="cd34-7"
)


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "first")
    yield run
    run.close()


def test_a_fresh_run_directory_has_its_rooms_and_8_digit_names(run):
    assert sorted(path.name for path in run.path.iterdir()) == ["batches", "lock", "logs", "trainer", "weights"]
    assert run.batch(12) == run.path / "batches" / "00000012"
    assert run.weight(13) == run.path / "weights" / "00000013"
    assert run.trainer_state(13) == run.path / "trainer" / "00000013"
    assert run.trainer_metric(12) == run.path / "trainer" / "metrics" / "00000012.json"


def test_M05_a_directory_that_holds_a_run_is_refused_with_the_remedy(run):
    save_run_info(run, INFO)
    run.close()
    with pytest.raises(ConfigError, match=r"holds another run: choose another run\.name"):
        RunDirectory.create(run.path)
    assert ConfigError.exit_code == 2


@pytest.mark.parametrize("left", ["weights/00000009/manifest.json", "batches/00000000/x", "notes.txt", "state/events.sqlite"])
def test_B08_a_directory_that_holds_anything_is_refused_and_left_alone(tmp_path, left):
    path = tmp_path / left
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"is not empty \({left}\)"):
        RunDirectory.create(tmp_path)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == [left]


def test_a_start_that_failed_at_once_leaves_nothing_that_refuses_the_next(run):
    run.close()
    RunDirectory.create(run.path).close()


def test_M05_a_live_run_is_named_by_its_process(run):
    save_run_info(run, INFO)
    with pytest.raises(ConfigError, match=rf"in use by a live run \(process {os.getpid()}\)"):
        RunDirectory.create(run.path)


def test_the_lock_falls_with_its_process_though_a_child_lives_on(tmp_path):
    path = tmp_path / "run"
    script = (
        "import os, pathlib, subprocess; from headway.formats.run_directory import RunDirectory;"
        f"run = RunDirectory.create(pathlib.Path({str(path)!r}));"
        "subprocess.Popen(['cat'], stdout=subprocess.DEVNULL, close_fds=False); os._exit(9)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as owner:  # cat lives until this pipe closes
        assert owner.wait() == 9
        RunDirectory.create(path).close()


def test_a_path_that_cannot_be_a_directory_is_a_config_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot be made a run directory: .*: choose another"):
        RunDirectory.create(tmp_path / "file" / "run")


def test_run_json_comes_back_as_written_and_says_how_the_run_ended(run):
    save_run_info(run, INFO)
    assert load_run_info(run) == INFO
    ended = RunInfo(**{**json.loads(run.run_json.read_bytes()), "ended": Ending(2, "cause", 5.0)})
    save_run_info(run, ended)
    assert load_run_info(run) == ended
    assert json.loads(run.run_json.read_bytes())["ended"] == {"code": 2, "cause": "cause", "time": 5.0, "kind": ""}
    assert not list(run.path.glob(".tmp-*"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id": 1}', b'{"format_version": "x"}'])
def test_a_damaged_run_json_is_refused_by_name(run, content):
    run.run_json.write_bytes(content)
    with pytest.raises(StorageError, match=r"run\.json: is damaged"):
        load_run_info(run)


def test_a_run_json_of_a_newer_headway_is_refused(run):
    run.run_json.write_text('{"format_version": 2, "headway_version": "9.0"}')
    with pytest.raises(StorageError, match=r"newer headway \(9\.0\)"):
        load_run_info(run)


def test_only_numbered_children_are_listed(run):
    for name in ("00000010", "00000002", ".tmp-00000003-aa", "latest", "7", "123456789"):
        (run.weights / name).mkdir()
    assert numbered(run.weights) == [2, 10, 123456789]
    assert numbered(run.path / "nowhere") == []
