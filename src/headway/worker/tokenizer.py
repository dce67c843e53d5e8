"""The model's tokenizer, read from its checkpoint directory without torch or transformers.

Text becomes ids and ids become text here and nowhere else. Ids that the engine wrote are never turned into text and back: text is for
people, rewards and observations only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headway.errors import ConfigError
from headway.worker.chat import ChatTemplate, read_chat_template

_SHORT = 64  # characters
_CACHED_TEXTS = 4096


class ModelTokenizer:
    """Text to ids and back, and chat messages to text, as the model of one checkpoint directory wants them."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        # short turns repeat themselves: a look-up costs a fiftieth of a call into the tokenizer
        self._encode_short = functools.lru_cache(_CACHED_TEXTS)(self._encode)
        self._decode_one = functools.lru_cache(_CACHED_TEXTS)(lambda number: self._decode((number,)))
        self._special = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def load(cls, directory: Path) -> ModelTokenizer:
        """Read tokenizer.json and the chat template, if there is one. Raises `ConfigError`."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{directory} has no tokenizer.json: a model needs one beside its weights (save its fast tokenizer there)")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} cannot be read: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(tokenizer, read_chat_template(directory))

    def encode_start(self, text: str) -> list[int]:
        """Return the ids of a text that begins a history: special tokens that the tokenizer adds are added.

        A text that begins with a special token of the model, written out, is taken as it is: it already says how it begins.
        """
        plain = self.encode(text)
        if plain and plain[0] in self._special:
            return plain
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, nothing added; special tokens written out in it are recognised."""
        return list(self._encode_short(text)) if len(text) <= _SHORT else self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens kept."""
        return self._decode_one(ids[0]) if len(ids) == 1 else self._decode(ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def special_text(self, number: int) -> str:
        """Return the text of a special token, empty for any other."""
        return self._special.get(number, "")

    def single_token(self, text: str) -> int:
        """Return the id of a text that is exactly one token. Raises ValueError."""
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(f"stop {text!r} is {len(ids)} tokens: an engine stops at single tokens only; give an id, or look at the text")
        return ids[0]

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return chat messages as the model's chat template writes them. Raises `ConfigError`."""
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def added_text(self, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
        """Return what further messages add to a conversation, as the model's chat template writes it. Raises `ConfigError`."""
        return self._template.added_text(before, after)

    @property
    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise ConfigError(
                "the model has no chat template (chat_template.jinja, or in tokenizer_config.json): give text or ids instead of messages"
            )
        return self._chat_template
