"""Random models and their tokenizer: reproducible, loss-free, refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from headway.embedded.trainer.initialise import SPECIAL_TOKENS, character_tokenizer, load_model, random_model, side_files  # noqa: E402
from headway.errors import ConfigError  # noqa: E402
from headway.settings import InitSection  # noqa: E402

pytestmark = pytest.mark.torch

ALPHABET = InitSection().alphabet
TOKENIZER = character_tokenizer(ALPHABET)


@given(st.lists(st.sampled_from([*ALPHABET, *SPECIAL_TOKENS]), max_size=40))
def test_text_of_the_alphabet_comes_back_unchanged_one_token_each(pieces):
    text = "".join(pieces)
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert len(ids) <= len(pieces)


def test_special_tokens_inside_text_are_one_token_each():
    assert TOKENIZER.encode("<bos>a<eos><pad>").ids == [1, 3 + ALPHABET.index("a"), 2, 0]


def test_the_quickstarts_vocabulary_has_57_tokens():
    assert TOKENIZER.get_vocab_size() == 57


def test_a_character_outside_the_alphabet_is_an_error_and_not_lost():
    with pytest.raises(Exception, match="WordLevel"):
        TOKENIZER.encode("aÄb")


@pytest.mark.parametrize(("alphabet", "words"), [("", "is empty"), ("abca", "'a' more than once")])
def test_an_alphabet_that_makes_no_tokenizer_is_refused(alphabet, words):
    with pytest.raises(ConfigError, match=words):
        character_tokenizer(alphabet)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_random_model_is_as_the_section_says_and_the_same_for_a_seed(architecture):
    init = InitSection(architecture=architecture, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    torch.manual_seed(99)
    expected_random_state = torch.get_rng_state()
    model, files = random_model(init, 3)
    assert torch.equal(torch.get_rng_state(), expected_random_state)
    config = json.loads(files["config.json"])
    assert config["model_type"] == architecture
    assert config["architectures"] == [type(model).__name__]
    for name in ("hidden_size", "num_key_value_heads", "head_dim", "initializer_range", "max_position_embeddings", "tie_word_embeddings"):
        assert config[name] == getattr(init, name)
    same, _ = random_model(init, 3)
    other, _ = random_model(init, 4)
    for (name, tensor), again in zip(model.state_dict().items(), same.state_dict().values(), strict=True):
        assert torch.equal(tensor, again), name
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="num_key_value_heads is 3"):
        random_model(InitSection(num_attention_heads=4, num_key_value_heads=3), 0)


def test_side_files_are_configs_and_tokenizer_and_never_weights_or_manifests(tiny_qwen3, tmp_path):
    for name in (
        "model.safetensors.index.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "config.json",
    ):
        (tmp_path / name).write_bytes(b"{}")
    assert side_files(tmp_path).keys() == {"tokenizer.json", "chat_template.jinja", "config.json"}


def test_loaded_models_train_in_float32(tiny_qwen3):
    model, files = load_model(tiny_qwen3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert "config.json" in files


def test_a_directory_with_a_broken_config_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ConfigError, match="transformers cannot load it") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_whose_file_is_damaged_is_refused_by_name(tiny_qwen3, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_qwen3, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="damaged: transformers cannot load it"):
        load_model(damaged)
