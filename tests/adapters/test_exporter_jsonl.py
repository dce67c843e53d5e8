import json

import numpy as np
import pytest

from headway.adapters.exporters.jsonl import JsonlExporter
from headway.formats.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    yield run
    run.close()


@pytest.fixture
def exporter(run):
    exporter = JsonlExporter(run)
    yield exporter
    exporter.close()


def refuse(constant):
    raise AssertionError(constant)


def rows(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_stream_is_a_file_of_strict_json_lines(run, exporter):
    exporter.export("metrics", {"batch": 0, "loss": float("nan"), "ratio_max": np.float32(1.5), "tokens": np.int64(7)})
    exporter.export("metrics", {"batch": 1, "buckets": {"0": float("inf")}})
    exporter.export("pipeline", {"time": 1.0})
    exporter.export("eval", {"version": 2})
    assert rows(run.metrics_jsonl) == [
        {"batch": 0, "loss": None, "ratio_max": 1.5, "tokens": 7},
        {"batch": 1, "buckets": {"0": None}},
    ]
    assert (rows(run.pipeline_jsonl), rows(run.eval_jsonl)) == ([{"time": 1.0}], [{"version": 2}])


def test_a_line_torn_anywhere_is_cut_away_before_the_next(run, exporter):
    exporter.export("metrics", {"batch": 0})
    whole = run.metrics_jsonl.read_bytes()
    torn = b'{"batch": 1, "loss": 0.5}'
    for end in range(len(torn)):
        run.metrics_jsonl.write_bytes(whole + torn[:end])
        again = JsonlExporter(run)
        again.export("metrics", {"batch": 2})
        again.close()
        again.close()
        assert rows(run.metrics_jsonl) == [{"batch": 0}, {"batch": 2}]


def test_a_row_that_cannot_be_written_is_reported_once_and_ends_nothing(run, exporter, caplog):
    run.metrics_jsonl.mkdir()
    exporter.export("metrics", {"batch": 0})
    exporter.export("metrics", {"batch": 1})
    exporter.export("pipeline", {"thing": object()})
    exporter.export("unheard_of", {})
    exporter.export("pipeline", {"time": 1.0})
    assert exporter.failures == 4
    assert caplog.text.count("a row of metrics is lost") == 1
    assert rows(run.pipeline_jsonl) == [{"time": 1.0}]
