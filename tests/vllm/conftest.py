"""One real server for all tests here, and three versions of its model. `make test-vllm` runs them; `make check` does not collect them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import RealServer, serving
from tiny_models import write_version

from headway.types import Checkpoint


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python that has vLLM."""
    named = os.environ.get("HEADWAY_VLLM_PYTHON", ".venv-vllm/bin/python")
    path = Path(__file__).parents[2] / named
    assert path.is_file(), f"{path}: no such Python: run `make test-vllm`, or name one with HEADWAY_VLLM_PYTHON"
    return path


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    """Versions 0 to 3."""
    directory = tmp_path_factory.mktemp("weights")
    return [write_version(directory, version) for version in range(4)]


@pytest.fixture(scope="session")
def server(python: Path, versions: list[Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """The server. Whatever a test leaves it with, the next one pushes the weights that it wants."""
    with serving(RealServer(python, Path(versions[0].directory), tmp_path_factory.mktemp("vllm") / "log")) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show the end of the server's log with each failure."""
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and server is not None:
        report.sections.append((f"the end of {server.log}", server.tail()))
    return report
