"""What the trainer offers beside a version: deltas and copies in memory, which go with it; and versions that are not published."""

from __future__ import annotations

import shutil
import threading
import uuid

import pytest

from headway.formats.delta import TENSORS, read_delta, refuse_other_base, tensor_hashes, verified_tensors
from headway.formats.manifest import read_manifest
from headway.formats.run_directory import RunDirectory, numbered
from headway.formats.shared_memory import is_available, memory_of

pytest.importorskip("torch")
from offering_runs import ROUNDED, assert_delta_leads_to, offers, play, trainer_of, weights
from safetensors.torch import load_file

pytestmark = pytest.mark.torch


@pytest.fixture
def run_id():
    """For each test that offers in memory: a trainer that starts clears the place of its run, and others may start at any moment."""
    given = uuid.uuid4().hex
    yield given
    shutil.rmtree(memory_of(given), ignore_errors=True)


def test_a_directory_is_all_that_is_offered_unless_more_is_asked_for(run, write_batch):
    write_batch(0)
    play(run, "directory", steps=1)
    assert not run.deltas.exists()
    assert read_manifest(run.weight(1)).extra.keys() == {"software"}


def test_each_version_is_offered_as_what_has_changed_since_the_one_before(run, write_batch):
    for k in range(3):
        write_batch(k)
    play(run, "delta", steps=3, **ROUNDED)
    assert offers(run, 0) == {}
    for version in (1, 2, 3):
        assert_delta_leads_to(run, version)
        assert load_file(run.delta(version) / TENSORS).keys() < weights(run, version).keys()


def test_where_everything_has_changed_only_the_directory_is_offered(run, write_batch):
    write_batch(0)
    play(run, "delta", steps=1, learning_rate=1e-1)
    assert offers(run, 1) == {}
    assert not run.delta(1).exists()


def test_a_trainer_started_again_goes_on_with_deltas_from_the_version_on_disk_and_removes_what_never_got_its_weights(run, write_batch):
    for k in range(2):
        write_batch(k)
    play(run, "delta", steps=1, **ROUNDED)
    shutil.copytree(run.delta(1), run.delta(2))
    (run.deltas / ".tmp-00000002-dead").mkdir()
    play(run, "delta", steps=2, **ROUNDED)
    assert_delta_leads_to(run, 2)
    assert not list(run.deltas.glob(".tmp-*"))


def test_a_model_of_the_users_is_the_base_of_the_first_delta(run, write_batch, tmp_path):
    with_init = RunDirectory.create(tmp_path / "first")
    trainer_of(with_init, "directory", dtype="bfloat16")
    model = tmp_path / "model"
    shutil.copytree(with_init.weight(0), model)
    (model / "manifest.json").unlink()
    with_init.close()
    write_batch(0)
    play(run, "delta", steps=1, init=None, path=str(model), **ROUNDED)
    assert offers(run, 1)["delta"].base == 0
    delta = read_delta(run.delta(1))
    assert delta is not None
    refuse_other_base(delta, tensor_hashes(model), verified_tensors(run.delta(1), delta))


def test_deltas_go_with_their_versions(run, write_batch):
    for k in range(5):
        write_batch(k)
    play(run, "delta", steps=5, keep_checkpoints=2, **ROUNDED)
    assert numbered(run.weights) == [4, 5]
    assert numbered(run.deltas) == [4, 5]


def test_a_base_that_was_retired_before_the_next_served_version_came_ends_nothing(run, write_batch, caplog):
    write_batch(0)
    play(run, "delta", steps=1, **ROUNDED)
    for k in range(1, 8):
        write_batch(k)
    play(run, "delta", steps=8, publish_every=4, keep_checkpoints=1, **ROUNDED)  # started anew: its base is 1, by the directory
    assert numbered(run.weights) == [8]
    assert caplog.text.count("is no directory") == 1  # 4 is offered complete, and 8 as what has changed since, if that is less


# ------------------------------------------------------------------------------------------------------------------------------- memory

needs_memory = pytest.mark.skipif(not is_available(), reason="no /dev/shm here")


@needs_memory
def test_the_newest_versions_lie_in_memory_as_on_disk_until_the_trainer_closes(run, write_batch, run_id):
    for k in range(4):
        write_batch(k)
    trainer = play(run, "memory", run_id, steps=4)
    memory = memory_of(run_id)
    assert numbered(memory) == [3, 4]
    for version in (3, 4):
        assert offers(run, version)["memory"].directory == str(memory / run.weight(version).name)
        on_disk = {path.name: path.read_bytes() for path in run.weight(version).iterdir() if path.name != "manifest.json"}
        assert {path.name: path.read_bytes() for path in (memory / run.weight(version).name).iterdir()} == on_disk
    trainer.close()
    trainer.close()
    assert not memory.exists()


@needs_memory
@pytest.mark.parametrize("way", ["memory", "directory", "delta"])
def test_what_a_killed_trainer_has_left_in_memory_goes_when_the_next_one_starts_whatever_it_offers(run, run_id, way):
    left = memory_of(run_id) / "00000007"
    left.mkdir(parents=True, mode=0o700)
    (left / "model.safetensors").write_bytes(b"x")
    trainer_of(run, way, run_id)
    assert not left.exists()


@needs_memory
def test_without_room_in_memory_a_version_is_offered_on_disk_and_training_goes_on(run, write_batch, run_id):
    for k in range(2):
        write_batch(k)
    trainer = trainer_of(run, "memory", run_id, steps=2)
    shutil.rmtree(memory_of(run_id))
    memory_of(run_id).write_bytes(b"somebody else's")
    try:
        trainer.run(threading.Event())
        assert numbered(run.weights) == [0, 1, 2]
        assert offers(run, 2) == {}
    finally:
        memory_of(run_id).unlink()


@needs_memory
def test_a_copy_that_fails_frees_all_copies_but_the_newest_for_the_next_try(run, write_batch, run_id):
    for k in range(4):
        write_batch(k)
    trainer = trainer_of(run, "memory", run_id, steps=4)
    in_the_way = memory_of(run_id) / "00000003"
    (in_the_way / "x").mkdir(parents=True)
    in_the_way.parent.chmod(0o700)
    trainer.run(threading.Event())
    assert [version for version in range(1, 5) if offers(run, version)] == [1, 2, 4]
    assert not list(memory_of(run_id).glob(".*"))
    assert 1 not in numbered(memory_of(run_id))


# ------------------------------------------------------------------------------------------------------------------------- publish_every


@needs_memory
def test_every_version_is_committed_and_offers_are_for_those_that_engines_are_given(run, write_batch, run_id):
    for k in range(5):
        write_batch(k)
    play(run, "memory", run_id, steps=5, publish_every=2, keep_checkpoints=9)
    assert numbered(run.weights) == [0, 1, 2, 3, 4, 5]
    assert [version for version in range(1, 6) if offers(run, version)] == [2, 4, 5]


def test_deltas_lead_from_served_version_to_served_version(run, write_batch):
    for k in range(5):
        write_batch(k)
    play(run, "delta", steps=5, publish_every=2, keep_checkpoints=9, **ROUNDED)
    assert [(version, offers(run, version)["delta"].base) for version in (2, 4, 5)] == [(2, 0), (4, 2), (5, 4)]
    for version in (2, 4, 5):
        assert_delta_leads_to(run, version)
