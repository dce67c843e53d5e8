"""Where rows go: the run's own files and what `metrics.exporters` names, as the page about it shows."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from run_disk import config_of

from headway.errors import ConfigError
from headway.formats.run_directory import RunDirectory
from headway.launch.closers import Closers
from headway.launch.exporters import named_exporters, open_exporters
from headway.settings import MetricsSection

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "send-metrics-elsewhere.md"


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    yield run
    run.close()


def config(run, *exporters):
    return msgspec.structs.replace(config_of(run.path), metrics=MetricsSection(progress="none", exporters=exporters))


async def test_the_tracker_of_the_page_gets_the_rows_that_the_files_get(run, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_tracker.py").write_text(code)
    settings = config(run, "my_tracker:Tracker")
    closers = Closers()
    for exporter in open_exporters(settings, run, named_exporters(settings, tmp_path), closers):
        for batch in range(3):
            exporter.export("pipeline", {"batch": batch})
            exporter.export("metrics", {"batch": batch, "reward_mean": batch / 2, "other": None})
    assert await closers.close_all(120.0) == []
    rows = [json.loads(line) for line in run.metrics_jsonl.read_text().splitlines()]
    tracked = [json.loads(line) for line in (run.path / "tracked.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows] == [0, 1, 2]
    assert tracked == [{"step": row["batch"], "reward": row["reward_mean"]} for row in rows]


def test_what_cannot_be_imported_is_an_error_of_the_config_that_names_the_key(run, tmp_path):
    with pytest.raises(ConfigError, match=r'metrics\.exporters: module "absent_tracker" does not import'):
        named_exporters(config(run, "absent_tracker:open"), tmp_path)
