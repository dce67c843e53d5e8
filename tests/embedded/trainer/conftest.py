from functools import partial

import pytest
from trainer_runs import write_batch as write

from headway.formats.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    yield directory
    directory.close()


@pytest.fixture
def write_batch(run):
    return partial(write, run)
