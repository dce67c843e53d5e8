"""`headway.single_turn(reward)`: an environment for tasks of one prompt, one completion, one reward.

A reward function takes either headway's form, `reward(prompt, completion)`, or the form that TRL's users have, `reward(prompts,
completions, **columns)`, called with lists of one. Plain functions run in threads, so they never block the worker's loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from headway.protocols import Generation, Outcome, Policy
from headway.types import Prompt
from headway.worker.rewards import finite

RewardFunction = Callable[..., Any]

_REWARD_THREADS = 64


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_REWARD_THREADS, thread_name_prefix="reward")


async def call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a function of the user's: awaited when it is async, in a thread when it is not. A cancelled thread is waited for."""
    if is_async(function):
        return await function(*args, **named)
    thread = asyncio.get_running_loop().run_in_executor(_threads(), functools.partial(_called, function, *args, **named))
    try:
        result = await asyncio.shield(thread)
    except asyncio.CancelledError:
        # nobody can cancel a thread: until it ends, the call has not, also when its clean-up is cancelled; a loop's end cancels once more
        with suppress(asyncio.CancelledError):
            await asyncio.wait((thread,))
        await asyncio.wait((thread,))
        raise
    return await result if isinstance(result, Awaitable) else result


def _called(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call it. No future takes a StopIteration (of a `next` that found nothing): who awaits the thread would wait for ever."""
    try:
        return function(*args, **named)
    except StopIteration as error:
        raise RuntimeError("it raised StopIteration: a next() without a default has found nothing") from error


def single_turn(
    reward: RewardFunction | Sequence[RewardFunction],
    *,
    weights: Sequence[float] | None = None,
    prompt_field: str = "prompt",
) -> SingleTurn:
    """Return an environment that lets the policy complete `prompt.fields[prompt_field]` (text, chat messages or ids) once.

    `reward` is one function or several; each is of one of two forms, plain or async:

    - `reward(prompt, completion) -> float | None`: the `Prompt` (its row: `prompt.fields`), the `Generation` (`text`, ...);
    - `reward(prompts, completions, **columns) -> list[float | None]`: TRL's. Lists of length one; `completions` are texts, or lists of
      one assistant message where the prompt is messages; every other field of the row is a column, and `completion_ids` are the ids.

    The reward is the sum of the functions' values, times `weights` (unset: 1 each). None means "cannot tell": it is left out of the sum,
    and where every function says so, there is no reward, and the rollout is lost as `bad_reward` rather than counted as 0.
    """
    functions = [reward] if callable(reward) else list(reward)
    if not functions or not all(callable(function) for function in functions):
        raise TypeError("single_turn takes a reward function, or a list of at least one")
    shares = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
    if len(shares) != len(functions):
        raise ValueError(f"single_turn was given {len(shares)} weights for {len(functions)} reward functions")
    return SingleTurn([_Part.of(function, weight) for function, weight in zip(functions, shares, strict=True)], prompt_field)


class SingleTurn:
    """The environment that `single_turn` returns."""

    def __init__(self, parts: Sequence[_Part], prompt_field: str) -> None:
        self._parts = parts
        self._prompt_field = prompt_field
        names = [part.name for part in parts]
        self._names = [name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)]

    async def __call__(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Attempt a prompt once."""
        if self._prompt_field not in prompt.fields:
            raise KeyError(f'prompt {prompt.id} has no field "{self._prompt_field}": name the right one by single_turn(prompt_field=...)')
        content = prompt.fields[self._prompt_field]
        conversation = await policy.open(content)
        completion = await conversation.generate()
        total: float | None = None
        rewards: dict[str, float] = {}
        for part, name in zip(self._parts, self._names, strict=True):
            value = await part.value(prompt, content, completion)
            if value is None:
                continue
            number = finite(value)
            if number is None:
                return Outcome(value)  # the worker refuses it, and says what it was
            rewards[name] = number
            total = (total or 0.0) + part.weight * number
        return Outcome(total, rewards if len(self._parts) > 1 else {})


class _Part:
    """One reward function, its form and its weight."""

    def __init__(self, function: RewardFunction, weight: float, parameters: Mapping[str, inspect.Parameter]) -> None:
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.weight = weight
        self._function = function
        self._batched = "completions" in parameters or "prompts" in parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        self._accepted = None if takes_any else frozenset(parameters)

    @classmethod
    def of(cls, function: RewardFunction, weight: float) -> _Part:
        return cls(function, weight, inspect.signature(function).parameters)

    async def value(self, prompt: Prompt, content: Any, completion: Generation) -> Any:
        """Return what the function says of one completion, whatever it is."""
        if not self._batched:
            return await call(self._function, prompt, completion)
        values = await call(self._function, **self._columns(prompt, content, completion))
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != 1:
            raise TypeError(
                f"{self.name}(prompts, completions, ...) returned {values!r}: it must return a list with one value per completion"
            )
        return values[0]

    def _columns(self, prompt: Prompt, content: Any, completion: Generation) -> dict[str, Any]:
        messages = isinstance(content, Sequence) and len(content) > 0 and isinstance(content[0], Mapping)
        columns = {name: [value] for name, value in prompt.fields.items() if name not in {"prompt", "completion", "completion_ids"}}
        columns["prompts"] = [content]
        columns["completions"] = [[{"role": "assistant", "content": completion.text}] if messages else completion.text]
        columns["completion_ids"] = [list(completion.token_ids)]
        return columns if self._accepted is None else {name: column for name, column in columns.items() if name in self._accepted}


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await: an async function, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
