"""What an environment samples through: token histories that are only appended to, and what they come to as samples.

The loss mask of a sample is 1 exactly on the ids that the engine sampled in this rollout. A history is never re-tokenised: each generation
sends the very ids that were sent and received before. One `RolloutPolicy` serves one attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Literal, TypeGuard

import numpy as np

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import ContextExceeded, GenerationFailed
from headway.errors import ConfigError, RolloutTruncated
from headway.protocols import Generation
from headway.types import AttemptRequest, EngineAddress, Finish, Sample, SamplingParams
from headway.worker.chat import PLACEHOLDER
from headway.worker.tokenizer import ModelTokenizer
from headway.worker.whereabouts import Whereabouts

Content = Sequence[int] | str | Sequence[Mapping[str, Any]]

_SEED_MASK = (1 << 64) - 1
_END_OF_IDS = 1 << 31  # samples hold int32; which ids a model has only its engine knows


class RolloutPolicy:
    """The handle of one attempt (`protocols.Policy`): opens conversations with the engine of the request."""

    def __init__(
        self, request: AttemptRequest, client: EngineClient, tokenizer: ModelTokenizer, whereabouts: Whereabouts | None = None
    ) -> None:
        self.request = request
        self.whereabouts = whereabouts or Whereabouts(EngineAddress(request.engine, request.kind))
        self.client = client
        self.tokenizer = tokenizer
        self.conversations: list[RolloutConversation] = []
        self.asked = 0  # generations, those that brought nothing too: each has a seed and a name of its own
        self.sampled_tokens = 0
        self.finish: Finish = "stop"

    async def open(self, content: Content) -> RolloutConversation:
        """Start a token history from ids, text, or chat messages (rendered with the generation prompt)."""
        messages: tuple[Mapping[str, Any], ...] | None = None
        if isinstance(content, str):
            ids = self.tokenizer.encode_start(content)
        elif _is_messages(content):
            messages = tuple(content)
            ids = self.tokenizer.encode(self.tokenizer.render(messages, add_generation_prompt=True))
        else:
            ids = _checked_ids(content)
        conversation = RolloutConversation(self, ids, messages)
        self.conversations.append(conversation)
        return conversation

    @property
    def turns(self) -> int:
        """How many generations have written tokens, over all conversations: one that the engine refuses, or that fails, is none."""
        return sum(conversation.turns for conversation in self.conversations)

    def next_seed(self) -> int:
        """Return a seed for the next generation: distinct per generation, the same in every run with this request."""
        self.asked += 1
        return _mix(self.request.seed, self.asked)


class RolloutConversation:
    """An append-only token history with one engine (`protocols.Conversation`)."""

    def __init__(self, policy: RolloutPolicy, ids: list[int], messages: tuple[Mapping[str, Any], ...] | None) -> None:
        self._policy = policy
        self._ids = ids
        self._messages = messages
        self._awaits_generation = True
        self._turns: list[tuple[int, int]] = []  # [start, end) of sampled stretches
        self._logprobs: list[float] = []  # of sampled tokens, in order
        self._spans: list[tuple[int, int]] = []  # (start, version) over sampled tokens
        self._generating = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids so far: prompt, sampled, observed."""
        return tuple(self._ids)

    @property
    def text(self) -> str:
        """The history as text, special tokens kept."""
        return self._policy.tokenizer.decode(self._ids)

    @property
    def sampled(self) -> int:
        """How many tokens the engine wrote."""
        return len(self._logprobs)

    @property
    def turns(self) -> int:
        """How many generations wrote them."""
        return len(self._turns)

    async def generate(
        self, *, max_tokens: int | None = None, stop: Sequence[int | str] = (), temperature: float | None = None
    ) -> Generation:
        """Let the policy write the next turn, of `max_tokens` (unset: `rollout.max_tokens`) at most.

        `stop`: ids, or strings that are exactly one token, at which the turn ends, beside the model's own. The text of the generation
        leaves out the special token that ended it. Raises `RolloutTruncated` when no token fits into `rollout.max_rollout_tokens` or the
        engine's context any more.
        """
        if self._generating:
            raise RuntimeError("this conversation is being generated already: await one turn before the next, or open another conversation")
        policy, request = self._policy, self._policy.request
        budget = request.sampling.max_tokens if max_tokens is None else index(max_tokens)
        if budget < 1:
            raise ValueError(f"max_tokens is {budget}: it must be 1 or more")
        if temperature is not None and not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature is {temperature}: it must be a number, and not below 0")
        if request.max_rollout_tokens:
            left = request.max_rollout_tokens - len(self._ids)
            if left < 1:
                raise self._full(f"{len(self._ids)} tokens leave no room under rollout.max_rollout_tokens = {request.max_rollout_tokens}")
            budget = min(budget, left)
        sampling = request.sampling
        if temperature is not None and temperature != sampling.temperature:
            sampling = SamplingParams(float(temperature), sampling.top_p, sampling.top_k, sampling.max_tokens)
        self._generating = True
        try:
            generated = await policy.client.generate(
                policy.whereabouts.engine,
                self._ids,
                sampling,
                seed=policy.next_seed(),
                max_tokens=budget,
                request_id=f"{request.purpose}-{request.group}-{request.member}-{request.attempt}-{policy.asked}",
                stop_token_ids=_checked_ids([policy.tokenizer.single_token(each) if isinstance(each, str) else each for each in stop]),
                lora=request.lora,
                move=policy.whereabouts.of_turn(),
                in_flight=policy.whereabouts.in_flight,
            )
        except ContextExceeded as error:
            raise self._full(str(error)) from error
        except GenerationFailed as error:
            policy.sampled_tokens += error.sampled_tokens
            raise
        finally:
            self._generating = False
        return self._append_sampled(generated.token_ids, generated.logprobs, generated.spans, generated.finish)

    def observe(self, content: Content) -> None:
        """Append what the environment says: ids, text, or chat messages rendered by the model's chat template. Out of the loss.

        Messages end with a generation prompt, so all messages of one turn are observed together. What is observed last and followed by no
        generation is not part of the sample: nothing was sampled after it.
        """
        if self._generating:
            raise RuntimeError("this conversation is being generated: observe after the turn has ended")
        if isinstance(content, str):
            self._ids += self._policy.tokenizer.encode(content)
        elif _is_messages(content):
            self._observe_messages(content)
        else:
            self._ids += _checked_ids(content)

    def sample(self) -> Sample:
        """Return the history up to its last sampled token, with masks, log-probabilities and stamps."""
        length = self._turns[-1][1]
        mask = np.zeros(length, np.bool_)
        for start, end in self._turns:
            mask[start:end] = True
        logprobs = np.zeros(length, np.float32)
        logprobs[mask] = self._logprobs
        spans = np.array(self._spans, np.int32)
        return Sample(
            token_ids=np.array(self._ids[:length], np.int32),
            sampled_mask=mask,
            loss_mask=mask,
            logprobs=logprobs,
            span_start=spans[:, 0],
            span_version=spans[:, 1],
        )

    def versions(self) -> tuple[int, int]:
        """Return the oldest and the newest version among the sampled tokens."""
        versions = [version for _, version in self._spans]
        return min(versions), max(versions)

    @property
    def length(self) -> int:
        """Token positions of the sample."""
        return self._turns[-1][1]

    def _full(self, why: str) -> RolloutTruncated:
        self._policy.finish = "truncated"
        return RolloutTruncated(why)

    def _append_sampled(
        self, ids: list[int], logprobs: list[float], spans: list[tuple[int, int]], finish: Literal["stop", "length"]
    ) -> Generation:
        policy = self._policy
        start, sampled = len(self._ids), len(self._logprobs)
        self._ids += ids
        self._turns.append((start, start + len(ids)))
        self._logprobs += logprobs
        for at, version in spans:
            if not self._spans or self._spans[-1][1] != version:
                self._spans.append((sampled + at, version))
        policy.sampled_tokens += len(ids)
        policy.finish = finish
        self._awaits_generation = False
        ended_by_special = finish == "stop" and policy.tokenizer.special_text(ids[-1])
        text = policy.tokenizer.decode(ids[:-1] if ended_by_special else ids)
        return Generation(tuple(ids), text, finish)

    def _observe_messages(self, new: Sequence[Mapping[str, Any]]) -> None:
        if self._messages is None:
            raise ConfigError("a conversation opened with text or ids cannot observe chat messages: open it with messages")
        if self._awaits_generation:
            raise ConfigError("messages were observed twice without a generation between: observe all messages of a turn together")
        tokenizer = self._policy.tokenizer
        history = (*self._messages, {"role": "assistant", "content": PLACEHOLDER}, *new)
        added = tokenizer.added_text(self._messages, history)
        # the template closes the assistant's turn; the engine's end token has done so already, if that is how the turn ended
        added = added.removeprefix(tokenizer.special_text(self._ids[-1]))
        self._ids += tokenizer.encode(added)
        self._messages = history
        self._awaits_generation = True


def _is_messages(content: Content) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return len(content) > 0 and isinstance(content[0], Mapping)


def _checked_ids(content: Sequence[Any]) -> list[int]:
    ids = list(content)
    for number in ids:
        if type(number) is not int and not isinstance(number, np.integer):
            raise TypeError(f"token ids are integers, chat messages mappings; this is neither: {number!r}")
        if not 0 <= number < _END_OF_IDS:
            raise ValueError(f"{number} is no token id of any vocabulary")
    return [int(number) for number in ids]


def _mix(seed: int, turn: int) -> int:
    """Return 63 well-mixed bits of (seed, turn): the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    z = (seed + turn * 0x9E3779B97F4A7C15) & _SEED_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _SEED_MASK
    return (z ^ (z >> 31)) >> 1
