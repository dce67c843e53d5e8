"""One whole run of headway's own engine and trainer, and one engine started by hand, for all tests here."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import Bench, Ended, until

from headway.lifeline import VARIABLE

SERVES = re.compile(r"serving .* at (http://\S+)\n")


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """Everything embedded, with evaluations; its only worker is killed when version 0 has long been retired."""
    bench = Bench(tmp_path_factory.mktemp("whole"), url="", checkpoint=Path())
    settings = ["run.steps=8", "environment.entry=world:slow", "eval.every=3", "eval.prompts=world:prompts", "eval.at_start=true"]
    settings += ["rollout.timeout_seconds=600"]
    bench.hold(5)
    run = bench.start(*settings, attached=False)
    try:
        run.until_batch(5)
        run.child("headway.worker").kill()
        bench.go_on()
        yield run.end()
    finally:
        bench.close()


@pytest.fixture(scope="session")
def checkpoint(whole_run: Ended, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as anybody may have one."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(whole_run.run.directory / "weights" / "00000008", directory)
    (directory / "manifest.json").unlink()
    return directory


@pytest.fixture(scope="session")
def engine_url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine that runs already, and whose label says nothing of a lineage: `default`."""
    log = tmp_path_factory.mktemp("engine") / "log"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    with log.open("w") as output:
        command = [sys.executable, "-m", "headway", "engine", "--model", str(checkpoint)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        until(lambda: SERVES.search(log.read_text()) or process.poll() is not None, what="the engine serves")
        said = SERVES.search(log.read_text())
        assert said is not None, log.read_text()
        yield said[1]
    finally:
        process.terminate()
        assert process.wait(120) == 0


@pytest.fixture
def bench(checkpoint: Path, engine_url: str, tmp_path: Path) -> Iterator[Bench]:
    """Runs of a test's own."""
    bench = Bench(tmp_path, url=engine_url, checkpoint=checkpoint)
    yield bench
    bench.close()
