"""A run on disk, for all tests that take one up again."""

import pytest
from run_disk import Disk


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "run")
    yield disk
    disk.run.close()
