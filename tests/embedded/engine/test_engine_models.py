"""Which checkpoints the engine takes, and how it refuses the others: by name, with the reason and the way out."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import transformers  # noqa: E402

from headway.embedded.engine.model import load_model, refuse_unsupported  # noqa: E402
from headway.embedded.engine.process import bind, running  # noqa: E402
from headway.embedded.engine.settings import EngineServerSettings  # noqa: E402
from headway.embedded.threads import configure_torch  # noqa: E402
from headway.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.torch

SHAPE = {"vocab_size": 57, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4} | {
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def load(directory: Path, **options):
    chosen = {"device": torch.device("cpu"), "dtype": torch.float32, "max_rows": 4, "max_context_tokens": 0} | options
    return load_model(directory, **chosen)


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        (transformers.MistralConfig(sliding_window=128), "mistral", "sliding"),
        (transformers.Gemma2Config(), "gemma2", "sliding"),
        (transformers.Qwen3NextConfig(), "qwen3_next", "linear_attention"),
        (transformers.MambaConfig(), "mamba", "linear_attention"),
        (transformers.T5Config(), "t5", "encoder-decoder"),
        (transformers.DeepseekV3Config(), "deepseek_v3", "compresses"),
        (transformers.ViTConfig(), "vit", "no decoder-only"),
    ],
)
def test_an_architecture_without_a_plain_cache_is_refused_by_name(config, name, reason):
    with pytest.raises(ConfigError, match=reason) as refusal:
        refuse_unsupported(config)
    assert name in str(refusal.value)
    assert "engine.urls" in str(refusal.value)


@pytest.mark.parametrize("config", [transformers.Qwen3Config(), transformers.LlamaConfig(), transformers.Qwen3MoeConfig()])
def test_plain_full_attention_is_accepted(config):
    refuse_unsupported(config)


def test_a_model_whose_steps_differ_from_its_forward_pass_is_refused(tmp_path: Path):
    """DiffLlama subtracts two attention maps: nothing in its config says so."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(transformers.DiffLlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="DiffLlamaForCausalLM: step-wise log-probabilities differ"):
        load(tmp_path)


def test_a_model_without_room_for_the_plan_is_refused(tmp_path: Path):
    """GPT-2 names its sizes otherwise, so the cache does not fit."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.GPT2Config(**SHAPE | {"num_key_value_heads": 2})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel cannot run over a plain key/value cache"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_pass_their_self_test(tiny_qwen3: Path, dtype):
    assert load(tiny_qwen3, dtype=dtype).cache.keys.dtype == dtype


def test_a_directory_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load(tmp_path)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_at_start(tiny_qwen3: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_qwen3, tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "m/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model\.norm\.weight"):
        load(tmp_path / "m")


def test_an_unknown_architecture_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch", "architectures": ["NonesuchForCausalLM"]}))
    with pytest.raises(ConfigError, match="nonesuch"):
        load(tmp_path)


def test_a_port_in_use_is_refused_in_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


async def test_a_model_directory_that_never_completes_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no complete checkpoint"):
        async with running(EngineServerSettings(model=tmp_path, await_model_seconds=0.05)):
            pass


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="cannot be used here"):
        configure_torch(1, "nonesuch")


def test_one_thread_on_small_machines_and_as_many_as_told_elsewhere():
    before = torch.get_num_threads()
    try:
        assert configure_torch(2, "cpu") == torch.device("cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_tied_head_may_come_and_go_between_checkpoints(make_checkpoint, tmp_path: Path):
    """A full state dict of a tied model brings an untied `lm_head.weight`, which must not reach the embeddings."""
    from safetensors.torch import load_file, save_file

    tied = make_checkpoint("qwen3_tied", 1)
    shutil.copytree(tied, tmp_path / "m")
    tensors = load_file(tied / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(57, 64)}, tmp_path / "m/model.safetensors", metadata={"format": "pt"})
    model, expected = load(make_checkpoint("qwen3_tied", 0)), load(tied)
    model.loader.load(tmp_path / "m")
    ids = [np.array([1, 5, 9])]
    torch.testing.assert_close(model.prefill(np.array([0]), ids), expected.prefill(np.array([0]), ids))


@pytest.mark.parametrize("rows", [1, 2])
def test_an_engine_of_few_sequences_is_an_engine(tiny_qwen3: Path, rows: int):
    """The test before it serves must fit into the smallest cache that a config may ask for."""
    model = load(tiny_qwen3, max_rows=rows)
    logits = model.prefill(np.arange(rows), [np.array([3, 4, 5])] * rows)
    assert logits.shape == (rows, model.vocabulary)
