"""The trainer against a run directory: versions in order, exact resumption, the double lock, retention."""

from __future__ import annotations

import fcntl
import json
import resource
import signal
import threading

import numpy as np
import pytest
from trainer_runs import BOUND, LINEAGE, TINY, arrays_of, config
from trainer_runs import write_batch as write_batch_to

from headway.errors import BoundBreached, ConfigError, StorageError, TrainerFailed
from headway.formats.manifest import read_manifest, verify
from headway.formats.run_directory import RunDirectory, numbered
from headway.formats.software import OURS
from headway.settings import RolloutSection

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from headway.embedded.trainer.loop import Trainer  # noqa: E402

pytestmark = pytest.mark.torch


def manifest_of(directory):
    """Return its manifest: there is one."""
    manifest = read_manifest(directory)
    assert manifest is not None
    return manifest


def trained(run, **keys):
    trainer = Trainer(run, config(**keys), lineage=LINEAGE)
    trainer.run(threading.Event())
    return trainer


def weights(run, version):
    return load_file(run.weight(version) / "model.safetensors")


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_version_0_is_a_checkpoint_that_transformers_loads_before_any_batch_exists(run):
    Trainer(run, config(), lineage=LINEAGE)
    directory = run.weight(0)
    manifest = read_manifest(directory)
    assert manifest is not None
    verify(directory, manifest)
    assert (manifest.kind, manifest.lineage, manifest.id) == ("weights", LINEAGE, 0)
    assert manifest.extra == {"software": OURS}
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.vocab_size == len(tokenizer) == 57
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


def test_each_batch_makes_the_next_version_loadable_and_different(run, write_batch):
    for k in range(3):
        write_batch(k)
    assert trained(run, steps=3).version == 3
    for version in (1, 2, 3):
        directory = run.weight(version)
        verify(directory, manifest_of(directory))
        AutoModelForCausalLM.from_pretrained(directory)
        AutoTokenizer.from_pretrained(directory)
        before, after = weights(run, version - 1), weights(run, version)
        assert any((before[name] != after[name]).any() for name in after)


def test_the_metrics_of_a_batch_are_strict_json_with_the_figures_of_the_contract(run, write_batch):
    write_batch(0)
    trained(run, steps=1)
    row = json.loads(run.trainer_metric(0).read_bytes(), parse_constant=pytest.fail)
    assert row.keys() == {
        *("batch", "loss", "grad_norm", "entropy", "clip_share", "mismatch_kl", "ratio_mean", "ratio_max", "ess", "by_staleness"),
        *("learning_rate", "step_seconds", "waited_seconds"),
    }
    assert row["batch"] == 0
    assert row["by_staleness"].keys() == {"0"}
    assert 0 < row["ess"] <= 1
    assert 0 < row["entropy"] <= np.log(57)


@pytest.mark.parametrize("keys", [{}, {"dtype": "bfloat16"}, {"loss": "tis", "minibatches": 1}], ids=["float32", "bfloat16", "tis"])
def test_a_trainer_started_again_after_one_batch_ends_with_bit_identical_weights(tmp_path, keys):
    straight, broken = (RunDirectory.create(tmp_path / name) for name in ("straight", "broken"))
    for k in range(3):
        write_batch_to(straight, k)
        write_batch_to(broken, k)
    trained(straight, steps=3, **keys)
    one = Trainer(broken, config(steps=3, **keys), lineage=LINEAGE)
    one.run(_StopAfter(one, version=1))
    assert one.version == 1
    torch.rand(5)  # another process would have another random state
    assert trained(broken, steps=3, **keys).version == 3
    assert_same(weights(straight, 3), weights(broken, 3))
    assert_same(*(load_file(run.trainer_state(3) / "state.safetensors") for run in (straight, broken)))


class _StopAfter(threading.Event):
    """An event that is set once the trainer has reached a version."""

    def __init__(self, trainer, *, version):
        super().__init__()
        self.trainer, self.version = trainer, version

    def is_set(self):
        return self.trainer.version >= self.version


def test_a_trainer_state_without_its_weights_does_not_exist(run, write_batch):
    for k in range(2):
        write_batch(k)
    trained(run, steps=2)
    expected = weights(run, 2)
    run.weight(2).rename(run.path / "lost")
    (run.weights / ".tmp-00000002-dead").mkdir()
    assert trained(run, steps=2).version == 2
    assert_same(weights(run, 2), expected)
    assert not list(run.weights.glob(".tmp-*"))


def test_damaged_weights_are_refused_by_name_on_the_way_back(run, write_batch):
    write_batch(0)
    trained(run, steps=1)
    path = run.weight(1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        trained(run, steps=2)


def test_a_version_whose_trainer_state_is_lost_is_refused_and_not_silently_gone_back_from(run, write_batch):
    for k in range(2):
        write_batch(k)
    trained(run, steps=2)
    run.trainer_state(2).rename(run.path / "lost")
    with pytest.raises(StorageError, match="trainer/00000002: is missing"):
        trained(run, steps=3)


def test_a_disk_that_is_full_is_a_named_error_and_leaves_the_newest_version_as_it_was(run, write_batch):
    write_batch(0)
    trainer = Trainer(run, config(steps=1), lineage=LINEAGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))  # any larger file cannot be written
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(StorageError, match=r"state\.safetensors"):
            trainer.run(threading.Event())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert trained(run, steps=1).version == 1
    assert not list(run.trainer.glob(".tmp-*"))


def test_a_step_in_progress_is_abandoned_when_the_run_ends_and_nothing_is_written(run, write_batch):
    write_batch(0)
    trainer = Trainer(run, config(), lineage=LINEAGE)
    trainer.run(_StopWhenAsked(times=3))
    assert trainer.version == 0
    assert numbered(run.weights) == [0]
    assert numbered(run.trainer) == []


class _StopWhenAsked(threading.Event):
    """An event that is set from the n-th time that somebody looks."""

    def __init__(self, *, times):
        super().__init__()
        self.left = times

    def is_set(self):
        self.left -= 1
        return self.left < 0


# ---------------------------------------------------------------------------------------------------------------------- the double lock


def refused(run, write_batch, error, match, arrays, **facts):
    write_batch(0, arrays, **facts)
    with pytest.raises(error, match=match):
        trained(run, steps=1)
    assert numbered(run.weights) == [0]
    assert not run.trainer_metric(0).exists()


def stale(k, by):
    arrays = arrays_of(k)
    (place,) = np.nonzero(arrays["loss_mask"])
    arrays["versions"][place[3]] = k - by
    return arrays


def at_version_5(run, write_batch, arrays, *, rollout=BOUND, **facts):
    """Let a trainer meet batch 5 at version 5."""
    trainer = Trainer(run, config(steps=6, rollout=rollout), lineage=LINEAGE)
    trainer.version = 5
    write_batch(5, arrays, **facts)
    trainer.run(threading.Event())


def test_a_token_past_max_staleness_is_refused_whatever_the_manifest_says(run, write_batch):
    with pytest.raises(BoundBreached, match="max_staleness"):
        at_version_5(run, write_batch, stale(5, by=3), min_contributing_version=5)
    assert numbered(run.weights) == [0]


def test_a_token_exactly_at_max_staleness_trains(run, write_batch):
    at_version_5(run, write_batch, stale(5, by=2))
    assert numbered(run.weights) == [6]


def test_on_stale_train_takes_tokens_of_any_age(run, write_batch):
    at_version_5(run, write_batch, stale(5, by=5), rollout=RolloutSection(max_staleness=2, on_stale="train"), on_stale="train")
    by_staleness = json.loads(run.trainer_metric(5).read_bytes())["by_staleness"]
    assert by_staleness["5-8"]["tokens"] == 1


@pytest.mark.parametrize("facts", [{"on_stale": "train"}, {"max_staleness": 3}])
def test_a_batch_that_gives_itself_more_room_than_the_run_has_is_refused(run, write_batch, facts):
    with pytest.raises(BoundBreached, match=r'this run is bound to 2, "mask" \(config.toml\)'):
        at_version_5(run, write_batch, stale(5, by=3), **facts)
    assert numbered(run.weights) == [0]


def test_tokens_without_a_version_train_only_as_many_as_the_manifest_tells(run, write_batch):
    arrays = arrays_of(5)
    (place,) = np.nonzero(arrays["loss_mask"])
    arrays["versions"][place[:2]] = -1
    with pytest.raises(BoundBreached, match="2 tokens without a version, and its manifest knows of 0"):
        at_version_5(run, write_batch, arrays, min_contributing_version=4)


def test_a_token_of_a_version_that_does_not_exist_is_refused(run, write_batch):
    refused(run, write_batch, BoundBreached, "version 1", stale(0, by=-1))


def test_a_batch_of_another_version_is_refused(run, write_batch):
    write_batch(1).rename(run.batch(0))
    with pytest.raises(TrainerFailed, match="batch 1: the trainer is at version 0"):
        trained(run, steps=1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_a_value_that_is_not_finite_is_refused(run, write_batch, name, value):
    arrays = arrays_of(0)
    arrays[name][4] = value
    refused(run, write_batch, StorageError, name, arrays)


def test_arrays_of_different_lengths_are_refused(run, write_batch):
    arrays = arrays_of(0)
    arrays["logprobs"] = arrays["logprobs"][:-1]
    refused(run, write_batch, StorageError, "logprobs", arrays)


def test_a_token_id_outside_the_vocabulary_is_refused(run, write_batch):
    arrays = arrays_of(0)
    arrays["token_ids"][0] = 57
    refused(run, write_batch, TrainerFailed, "vocabulary", arrays)


def test_a_contributing_first_token_is_refused(run, write_batch):
    arrays = arrays_of(0)
    arrays["loss_mask"][0] = 1
    arrays["versions"][0] = 0
    arrays["sample_length"] += 1
    refused(run, write_batch, TrainerFailed, "first token", arrays)


def test_a_damaged_batch_is_refused_by_its_file(run, write_batch):
    path = write_batch(0) / "batch.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(StorageError, match=r"batch\.safetensors"):
        trained(run, steps=1)


def test_a_batch_of_another_lineage_is_waited_out(run, write_batch):
    write_batch(0, lineage="f00d")
    trainer = Trainer(run, config(steps=1), lineage=LINEAGE)
    trainer.run(_StopWhenAsked(times=5))
    assert trainer.version == 0


# ---------------------------------------------------------------------------------------------------------------------------- retention


def test_old_versions_go_and_every_nth_stays(run, write_batch):
    for k in range(6):
        write_batch(k)
    trained(run, steps=6, keep_checkpoints=2, keep_every=3)
    assert numbered(run.weights) == [0, 3, 5, 6]
    assert numbered(run.trainer) == [3, 5, 6]


def test_a_version_that_somebody_holds_is_not_removed_until_it_is_let_go(run, write_batch):
    for k in range(5):
        write_batch(k)
    trained(run, steps=1, keep_checkpoints=2)
    with (run.weight(1) / "manifest.json").open() as manifest:
        fcntl.flock(manifest, fcntl.LOCK_SH)
        trained(run, steps=4, keep_checkpoints=2)
        assert numbered(run.weights) == [1, 3, 4]
    trained(run, steps=5, keep_checkpoints=2)
    assert numbered(run.weights) == [4, 5]


# ------------------------------------------------------------------------------------------------------------------- models from a path


def test_a_checkpoint_by_path_trains_and_its_tokenizer_travels_with_every_version(run, write_batch, tmp_path):
    source = RunDirectory.create(tmp_path / "source")
    Trainer(source, config(init=TINY), lineage=LINEAGE)
    write_batch(0)
    trained(run, steps=1, init=None, path=str(source.weight(0)))
    assert numbered(run.weights) == [1]
    assert AutoTokenizer.from_pretrained(run.weight(1)).decode([1, 3, 4]) == "<bos>01"


def test_a_directory_without_a_checkpoint_is_refused_by_name(run, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Trainer(run, config(init=None, path=str(tmp_path)), lineage=LINEAGE)
