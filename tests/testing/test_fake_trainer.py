"""The fake trainer: the contract kept, and each way of breaking it on request."""

import hashlib
import signal
import time

import msgspec
import pytest
from rollout_strategies import batch_of, plain_sample, rollout_of

from headway.config.toml import resolved
from headway.errors import BoundBreached
from headway.formats.batch import TENSORS, assemble, write_batch
from headway.formats.hold import Hold
from headway.formats.manifest import read_manifest, verify
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, save_run_info
from headway.settings import Config, EnvironmentSection, ModelSection, PromptsSection, RunSection
from headway.testing import TrainerProcess, TrainerScript, trainer_thread, write_tiny_model
from headway.testing.model import version_in

INFO = RunInfo(id="id", lineage="run", headway_version="0", engine_version="", trainer_version="external", seed=0, created=0.0)


def until(condition, limit=120.0):
    """Wait for what another thread or process does on disk."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.005)


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    model = write_tiny_model(tmp_path / "model", size=20)
    config = Config(
        run=RunSection(steps=4),
        model=ModelSection(path=str(model)),
        prompts=PromptsSection(source="world:prompts"),
        environment=EnvironmentSection(entry="world:attempt"),
    )
    run.config.write_text(resolved(config))
    save_run_info(run, INFO)
    yield run
    run.close()


def ship(run, *numbers, versions=None, lineage="run"):
    for k in numbers:
        stamped = plain_sample(versions or [k, k])
        write_batch(run, assemble(batch_of([[rollout_of([stamped], member=m) for m in range(2)]], k=k, max_staleness=2)), lineage)


def whole(run, version):
    manifest = read_manifest(run.weight(version))
    if manifest is None:
        return False
    verify(run.weight(version), manifest)
    return manifest.lineage == "run" and version_in(run.weight(version)) == version


def logged(trainer, what):
    return [entry for entry in trainer.entries() if entry["what"] == what]


def end_run(run):
    save_run_info(run, msgspec.structs.replace(INFO, ended=Ending(0, "done", time.time() + 60)))


def test_it_trains_batch_after_batch_into_whole_versions_and_says_what_it_consumed(run):
    ship(run, 0, 1)
    with trainer_thread(run.path) as trainer:
        until(lambda: whole(run, 2))
        first, second = logged(trainer, "consumed")
        end_run(run)
        until(lambda: logged(trainer, "ended"))
    assert (first["k"], second["k"]) == (0, 1)
    assert first["sha"] == hashlib.sha256((run.batch(0) / TENSORS).read_bytes()).hexdigest()
    assert (second["min_version"], second["contributing"], second["groups"], second["prompts"]) == (1, 4, [0], ["prompt-0"])
    assert run.trainer_metric(1).exists()
    assert read_manifest(run.trainer_state(2)).extra["batch"] == 1
    assert trainer.failure is None


def test_started_again_it_takes_up_the_newest_complete_version(run):
    ship(run, 0, 1)
    with trainer_thread(run.path):
        until(lambda: whole(run, 2))
    run.weight(9).mkdir()  # without a manifest: no version
    ship(run, 2)
    with trainer_thread(run.path) as again:
        until(lambda: whole(run, 3))
        assert [entry["version"] for entry in logged(again, "started")] == [2]
        assert [entry["k"] for entry in logged(again, "consumed")] == [2]
    assert not run.weight(9).exists()


def test_a_batch_of_another_lineage_is_not_trained(run):
    ship(run, 0, lineage="other")
    with trainer_thread(run.path) as trainer:
        until(lambda: logged(trainer, "started"))
        assert not logged(trainer, "consumed")


def test_a_batch_that_breaks_the_bound_is_refused(run, monkeypatch):
    ship(run, 0)
    damaged = run.batch(0) / "manifest.json"
    damaged.write_text(damaged.read_text().replace('"max_staleness": 2', '"max_staleness": -1'))
    with trainer_thread(run.path) as trainer:
        until(lambda: trainer.failure is not None)
    assert isinstance(trainer.failure, BoundBreached)
    assert logged(trainer, "refused")


def test_scripted_refusal_ends_it_with_a_reason(run, tmp_path):
    ship(run, 0)
    with TrainerProcess(run.path, tmp_path, script=TrainerScript(refuse_at=0)) as trainer:
        assert trainer.process.wait(120) == 1
    assert "batch 0: refused by the script" in trainer.output.read_text()


def test_it_dies_at_its_batch_as_often_as_scripted_and_publishes_nothing_of_it(run, tmp_path):
    ship(run, 0, 1)
    with TrainerProcess(run.path, tmp_path, script=TrainerScript(die_at=1, deaths=2)) as trainer:
        for _ in range(2):
            assert trainer.process.wait(120) == -signal.SIGKILL
            assert not run.weight(2).exists()
            trainer.start()
        until(lambda: whole(run, 2))
        entries = trainer.entries()
    assert [entry["k"] for entry in entries if entry["what"] == "consumed"] == [0, 1, 1, 1]
    assert len({entry["sha"] for entry in entries if entry["what"] == "consumed" and entry["k"] == 1}) == 1


def test_a_stall_ends_after_its_time_and_one_without_end_can_be_stopped(run):
    ship(run, 0)
    with trainer_thread(run.path, script=TrainerScript(stall_at=0, stall_seconds=0.01)):
        until(lambda: whole(run, 1))
    with trainer_thread(run.path, script=TrainerScript(stall_at=1)) as trainer:
        ship(run, 1)
        until(lambda: logged(trainer, "stalled"))
    assert not run.weight(2).exists()


def test_versions_left_out_are_made_and_not_published(run):
    ship(run, 0, 1, 2)
    with trainer_thread(run.path, script=TrainerScript(unpublished=(1,))):
        until(lambda: whole(run, 3))
    assert not run.weight(1).exists()
    assert not run.trainer_state(1).exists()


def test_of_every_second_version_the_last_is_published_too(run):
    ship(run, 0, 1, 2, 3)
    with trainer_thread(run.path, script=TrainerScript(publish_every=3)):
        until(lambda: whole(run, 4))
    assert [run.weight(version).exists() for version in (1, 2, 3, 4)] == [False, False, True, True]


def test_in_place_the_marker_comes_last(run):
    ship(run, 0)
    with trainer_thread(run.path, script=TrainerScript(in_place=True, shard_seconds=600)):
        until((run.weight(1) / "config.json").exists)
        assert read_manifest(run.weight(1)) is None
    with trainer_thread(run.path, script=TrainerScript(in_place=True, shard_seconds=0.01)):
        until(lambda: whole(run, 1))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_half_written_version_stays_half_and_training_goes_on(run, in_place):
    ship(run, 0, 1)
    with trainer_thread(run.path, script=TrainerScript(half_written=(1,), in_place=in_place)) as trainer:
        until(lambda: whole(run, 2))
        assert logged(trainer, "half_written")
    assert run.weight(1).exists()
    assert read_manifest(run.weight(1)) is None


def test_retention_keeps_the_newest_what_is_held_and_what_it_cannot_remove(run):
    ship(run, 0)
    with trainer_thread(run.path):
        until(lambda: whole(run, 1))
    hold = Hold(run.weight(1))
    ship(run, 1, 2, 3)
    with trainer_thread(run.path, script=TrainerScript(keep=1, undeletable=(2,))) as trainer:
        until(lambda: whole(run, 4) and any(e["version"] == 3 for e in logged(trainer, "retired")))
    hold.release()
    assert sorted(path.name for path in run.weights.iterdir()) == ["00000001", "00000002", "00000004"]
    assert {(entry["version"], entry["why"]) for entry in logged(trainer, "kept")} == {(1, "held"), (2, "undeletable")}


def test_where_the_model_is_new_it_makes_version_0(run):
    text = run.config.read_text()
    run.config.write_text("\n".join(line for line in text.splitlines() if not line.startswith("path =")) + "\n[model.init]\n")
    with trainer_thread(run.path):
        until(lambda: whole(run, 0))
