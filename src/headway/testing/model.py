"""A checkpoint that every part of headway accepts and nobody can compute with: a tokenizer of characters and two tiny tensors.

For runs against the fake engine: no torch, no download, a few kilobytes a version. The tensor `version` holds the version's number, so that
who loads it can say what it has loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, load_file, save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:;!?<>=+-*/()#{}[]\"'\\_|\n"
EOS = 2
FIRST_ID = len(SPECIAL_TOKENS)
VOCABULARY = FIRST_ID + len(ALPHABET)
WEIGHTS_FILE = "model.safetensors"


def ids_of(text: str) -> list[int]:
    """Return the ids of a text of `ALPHABET`."""
    return [FIRST_ID + ALPHABET.index(character) for character in text]


def text_of(ids: list[int]) -> str:
    """Return the text of ids; special tokens are left out."""
    return "".join(ALPHABET[number - FIRST_ID] for number in ids if number >= FIRST_ID)


def weights(version: int, *, size: int = 16) -> bytes:
    """Return a safetensors file that says which version it is, with `size` numbers beside it."""
    tensors: dict[str, Any] = {"version": np.array([version], np.int64), "weight": np.full(size, version, np.float32)}
    return save(tensors, {"format": "pt"})


def size_of(content: bytes) -> int | None:
    """Return the `size` that `weights` made a file with; None: it is another kind of file."""
    try:
        tensors = load(content)
    except Exception:  # noqa: BLE001 -- safetensors' own
        return None
    return len(tensors["weight"]) if set(tensors) == {"version", "weight"} else None


def version_in(directory: Path) -> int:
    """Return the version that a directory's weights say they are; raises OSError or ValueError for what is no such file."""
    try:
        return int(load_file(directory / WEIGHTS_FILE)["version"][0])
    except OSError:
        raise
    except Exception as error:  # safetensors' own, and a tensor that is not there
        raise ValueError(f"{directory / WEIGHTS_FILE}: {error}") from error


def side_files(*, context: int = 4096) -> dict[str, bytes]:
    """Return what makes weights a checkpoint: config.json and the tokenizer's files."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 -- a token of the vocabulary
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCABULARY, "eos_token_id": EOS}
    return {
        "config.json": json.dumps({**config, "max_position_embeddings": context}).encode(),
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}).encode(),
    }


def write_tiny_model(directory: Path, *, version: int = 0, context: int = 4096, size: int = 16) -> Path:
    """Write a tiny checkpoint, for `model.path`; `size`: numbers in its tensors. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in {**side_files(context=context), WEIGHTS_FILE: weights(version, size=size)}.items():
        (directory / name).write_bytes(content)
    return directory
