"""Fault cases of trackers: what `metrics.exporters` names raises, hangs or exits, and a whole run is as if it were not there."""

import json

import pytest

from headway.testing import Stage

TRACKER = '''
import json, threading

def stand_still():
    threading.Event().wait()

class Tracker:
    """Keeps the rows that it gets, in a file beside the run; does `deeds[call]` at each call."""

    def __init__(self, name, run, deeds):
        self._deeds = deeds
        self._do("made")
        self._file = (run.parent / f"{name}.jsonl").open("w")

    def _do(self, call):
        self._deeds.get(call, lambda: None)()

    def export(self, stream, row):
        self._do("export")
        self._file.write(json.dumps([stream, row]) + "\\n")
        row.clear()

    def close(self):
        self._do("close")
        self._file.close()

def refuse():
    raise ConnectionError("no tracker at http://me:secret@tracker")

def whole(run): return Tracker("whole", run, {})
def raises(run): return Tracker("raises", run, {"made": refuse})
def leaves(run): return Tracker("leaves", run, {"made": lambda: exit(3)})
def hangs(run): return Tracker("hangs", run, {"export": stand_still})
def stays(run): return Tracker("stays", run, {"close": stand_still})
'''


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "tracker.py").write_text(TRACKER)
    with Stage(tmp_path, settings={"metrics.exporters": ["tracker:whole"], "run.shutdown_seconds": 10.0}) as stage:
        yield stage


def tracked(stage):
    return [json.loads(line) for line in (stage.directory / "whole.jsonl").read_text().splitlines()]


SAID = {
    "raises": "it could not be started: ConnectionError: no tracker at",
    "leaves": "it could not be started: SystemExit",
    "hangs": "it did not close within 5 s",
    "stays": "it did not close within 5 s",
}


def test_K07_trackers_that_raise_or_hang_when_made_at_a_row_or_at_the_close_change_nothing_about_a_run(stage):
    stage.write_config(metrics__exporters=["tracker:whole", *(f"tracker:{name}" for name in SAID)])
    ended = stage.play()
    assert ended.code == 0, ended.err
    stage.check(ended)
    rows = stage.rows("metrics.jsonl")
    assert [row["batch"] for row in rows] == [0, 1, 2, 3]
    pipeline = stage.rows("pipeline.jsonl")
    assert pipeline[-1]["batch"] == 4
    assert [row for stream, row in tracked(stage) if stream == "metrics"] == rows, "the tracker beside them gets every row"
    assert [row for stream, row in tracked(stage) if stream == "pipeline"] == pipeline
    log = (stage.run / "events.log").read_text()
    for name, said in SAID.items():
        assert f"exporter tracker:{name}: {said}" in log
    assert "secret" not in log


def test_what_metrics_exporters_names_is_checked_before_a_run_starts(stage):
    for value, said in (
        ("tracker", 'metrics.exporters is "tracker": each must have the form "module:name"'),
        ("tracker:nobody", 'metrics.exporters: module "tracker" has no "nobody"'),
        ("absent:open", 'metrics.exporters: module "absent" does not import: ModuleNotFoundError'),
    ):
        stage.write_config(metrics__exporters=["tracker:whole", value])
        ended = stage.play()
        assert ended.code == 2, ended.err
        assert said in ended.err
        assert not stage.run.joinpath("run.json").exists()
