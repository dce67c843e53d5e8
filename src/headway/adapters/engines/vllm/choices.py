"""What the answers of vLLM's generating calls have in common: one choice of ids, with log-probabilities, which each shapes its own way."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from headway.adapters.engines.generation import GenerationFailed
from headway.adapters.engines.wire import TokenId

Logprobs = TypeVar("Logprobs")
Choice = TypeVar("Choice", bound="ChoiceJson[Any]")


class ChoiceJson(msgspec.Struct, Generic[Logprobs], frozen=True):
    """One completion."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class AnswerJson(msgspec.Struct, Generic[Choice], frozen=True):
    """The response's body, as far as it is used."""

    choices: list[Choice]

    def only(self) -> Choice:
        """Return the one choice. Raises `GenerationFailed`."""
        if len(self.choices) != 1:
            raise GenerationFailed(f"the answer holds {len(self.choices)} choices instead of one")
        return self.choices[0]
