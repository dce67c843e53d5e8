"""The model that training starts from: random weights with a tokenizer of characters, or a checkpoint directory.

Either way the result is the model in float32 (master weights) and the *side files* that make its weights a full Hugging Face checkpoint:
config.json, generation_config.json, the tokenizer's files. Every published version carries the same side files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from headway.embedded.threads import LOADING
from headway.errors import ConfigError, StorageError
from headway.formats.bounded import refuse_irregular_in
from headway.settings import InitSection

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""Ids 0, 1 and 2 of a character tokenizer."""

SideFiles = dict[str, bytes]

_SIDE_SUFFIXES = {".json", ".jinja", ".model", ".txt"}


def random_model(init: InitSection, seed: int) -> tuple[Any, SideFiles]:
    """Return a model with random float32 weights, the same for the same seed, and its side files.

    Raises:
        ConfigError: the section's numbers do not make a model, or its alphabet no tokenizer.
    """
    tokenizer = character_tokenizer(init.alphabet)
    pad, bos, eos = range(len(SPECIAL_TOKENS))
    shape = {name: getattr(init, name) for name in InitSection.__struct_fields__ if name not in {"architecture", "alphabet"}}
    if init.num_attention_heads % init.num_key_value_heads:
        raise ConfigError(
            f"model.init: num_key_value_heads is {init.num_key_value_heads}: "
            f"it must divide num_attention_heads ({init.num_attention_heads})"
        )
    if init.head_dim % 2:
        raise ConfigError(f"model.init: head_dim is {init.head_dim}: it must be even (rotary embeddings turn pairs)")
    ids = {"pad_token_id": pad, "bos_token_id": bos, "eos_token_id": eos}
    config = AutoConfig.for_model(init.architecture, vocab_size=tokenizer.get_vocab_size(), dtype="float32", **shape, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": init.max_position_embeddings,
    }
    return model, {
        "config.json": config.to_json_string(use_diff=False).encode(),
        "generation_config.json": GenerationConfig(**ids).to_json_string().encode(),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2).encode(),
    }


def character_tokenizer(alphabet: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with one token per character, after the special tokens, which are recognised inside text.

    Decoding gives back every character as it was, special tokens included unless skipped. A character outside the alphabet is an error,
    never silently lost.

    Raises:
        ConfigError: the alphabet is empty, or holds a character twice.
    """
    twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if twice or not alphabet:
        found = f"holds {''.join(twice)!r} more than once" if twice else "is empty"
        raise ConfigError(f"model.init: alphabet {found}: every character of the vocabulary must stand there once")
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))  # noqa: S106  # not in the vocabulary: unknown is an error
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def load_model(directory: Path) -> tuple[Any, SideFiles]:
    """Load a checkpoint directory: the model with float32 weights, and its side files. Nothing is downloaded, no code in it is run.

    Raises:
        ConfigError: the directory is no checkpoint that transformers loads, or stores its weights in another form than they train in.
    """
    transformers_logging.disable_progress_bar()
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory}: no config.json: model.path must be a directory with a Hugging Face checkpoint")
    try:
        refuse_irregular_in(directory)
        with LOADING:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    except StorageError as error:
        raise ConfigError(str(error)) from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{directory}: transformers cannot load it as a causal language model: "
            "it must hold config.json and *.safetensors of a decoder-only model",
            detail=str(error),
        ) from error
    if getattr(model, "_weight_conversions", None):
        raise ConfigError(
            f"{directory}: {model.config.model_type} stores its weights in another form than it trains them in; the embedded trainer takes "
            'plain decoders (Qwen3, Llama) only: choose another model, or trainer.kind = "external"'
        )
    return model, side_files(directory)


def side_files(directory: Path) -> SideFiles:
    """Read what makes weights a checkpoint: configs and tokenizer files, without weights, their indices and our manifest."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.suffix in _SIDE_SUFFIXES and path.is_file() and path.name != "manifest.json" and not path.name.endswith(".index.json")
    }


def with_dtype(files: SideFiles, dtype: torch.dtype) -> SideFiles:
    """Return side files whose config.json says in which dtype the weights beside it are stored."""
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)  # the name before transformers 5
    config["dtype"] = str(dtype).removeprefix("torch.")
    return {**files, "config.json": json.dumps(config, indent=2).encode()}
