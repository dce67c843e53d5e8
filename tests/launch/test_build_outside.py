"""What a config says of replay and ingest becomes parts: bounded by the model, relative to the config, or nothing at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.formats.offered import SampleLimits
from headway.formats.run_directory import RunDirectory
from headway.launch.build import ingest_of, replay_of, sample_limits
from headway.settings import (
    Config,
    EngineSection,
    EnvironmentSection,
    IngestSection,
    ModelSection,
    PromptsSection,
    ReplaySection,
    RolloutSection,
)
from headway.types import Checkpoint


def config(**sections):
    return Config(prompts=PromptsSection(source="p.jsonl"), environment=EnvironmentSection(entry="game:attempt"), **sections)


def checkpoint(directory, content):
    (directory / "config.json").write_text(content)
    return Checkpoint(0, "line-0", str(directory))


@pytest.mark.parametrize(
    ("content", "longest", "limits"),
    [
        (json.dumps({"vocab_size": 32, "max_position_embeddings": 64}), 0, SampleLimits(64, 32)),
        (json.dumps({"vocab_size": 32, "max_position_embeddings": 64}), 48, SampleLimits(48, 32)),
        (json.dumps({"model_type": "other"}), 48, SampleLimits(48, 0)),
        ("{", 0, SampleLimits(0, 0)),
    ],
)
def test_samples_from_outside_are_bounded_as_live_ones_are(tmp_path, content, longest, limits):
    first = checkpoint(tmp_path, content)
    assert sample_limits(config(rollout=RolloutSection(max_rollout_tokens=longest)), first) == limits


def test_with_lora_the_base_model_says_how_long_a_sample_may_be(tmp_path):
    base = checkpoint(tmp_path, '{"vocab_size": 9, "max_position_embeddings": 20}')
    adapter = Checkpoint(3, "line-3", str(tmp_path / "weights" / "00000003"))
    given = config(model=ModelSection(path=base.directory), engine=EngineSection(weight_transfer="lora"))
    assert sample_limits(given, adapter) == SampleLimits(tokens=20, vocabulary=9)


def test_without_the_sections_there_is_nothing(tmp_path):
    assert replay_of(config(), tmp_path, SampleLimits()) is None
    assert ingest_of(config(), RunDirectory(tmp_path), SampleLimits()) is None


async def test_replay_files_are_those_beside_the_config(tmp_path):
    sample = {"token_ids": [1, 2], "sampled_mask": [False, True], "logprobs": [0.0, -1.0]}
    for name in "ba":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"name": name, "rollouts": [{"reward": 1.0, "samples": [sample]}]}))
    groups = replay_of(config(replay=ReplaySection(files=("b.jsonl", "*.jsonl"), epochs=1)), tmp_path, SampleLimits())
    assert [group.name async for group in groups] == ["b", "a"]
    with pytest.raises(ConfigError, match="matches no file"):
        replay_of(config(replay=ReplaySection(files=("c.jsonl",))), tmp_path, SampleLimits())


def test_the_address_is_written_into_the_run_directory():
    service = ingest_of(config(ingest=IngestSection()), RunDirectory(Path("runs/x")), SampleLimits(5, 6))
    assert service is not None
    nobody: Any = None  # posts
    answering: Any = service(nobody)
    server = answering.__self__
    assert server._address_file == Path("runs/x/ingest.json")
    assert server._limits == SampleLimits(5, 6)
