"""Runs one attempt, or one scoring, of the user's code behind an error boundary: whatever it does, a value comes back.

What the user's code raises, an engine refuses or a reward fails to be becomes a `Failure` with its cause; only cancellation passes. How
long anything may take is the dispatcher's business: it cancels. Knows nothing of processes or sockets.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import GenerationFailed
from headway.entries import load_entry
from headway.errors import ConfigError, RolloutTruncated, first_cause
from headway.formats.offered import plain_metadata
from headway.formats.rollout import encode_samples
from headway.formats.wire import WorkerSpec
from headway.protocols import Environment, Mover, Outcome
from headway.types import AttemptRequest, EngineAddress, Failure, Finish, Rollout, Score, ScoreRequest
from headway.worker.policy import RolloutPolicy
from headway.worker.rewards import finite
from headway.worker.scoring import RolloutView, read_verdict
from headway.worker.single_turn import call, is_async
from headway.worker.tokenizer import ModelTokenizer
from headway.worker.whereabouts import Whereabouts

_LONGEST_DETAIL = 8000  # characters of a traceback that are passed on
_LONGEST_LINE = 400


class Runtime:
    """The user's environment and scorer, with what they need to run: the tokenizer, and the client of the engines."""

    def __init__(
        self,
        *,
        environment: Environment,
        scorer: Callable[..., Any] | None,
        name: str,
        tokenizer: ModelTokenizer,
        client: EngineClient,
        truncated_reward: float = 0.0,
    ) -> None:
        self._environment = environment
        self._scorer = scorer
        self._name = name
        self._tokenizer = tokenizer
        self._client = client
        self._truncated_reward = None if scorer is not None else truncated_reward

    @classmethod
    def load(cls, spec: WorkerSpec) -> Runtime:
        """Import the user's code and read the tokenizer. Raises `ConfigError`."""
        base = Path(spec.base)
        environment = load_entry(spec.entry, base, key="environment.entry")
        if not is_async(environment):
            raise ConfigError(
                f"environment.entry: {spec.entry} is {environment!r}: "
                "it must be an `async def attempt(prompt, policy)`, or a headway.single_turn(...)"
            )
        scorer = load_entry(spec.score, base, key="environment.score") if spec.score else None
        if scorer is not None and not callable(scorer):
            raise ConfigError(f"environment.score: {spec.score} is {scorer!r}: it must be an `async def score(prompt, rollouts)`")
        return cls(
            environment=environment,
            scorer=scorer,
            name=spec.name or spec.entry.partition(":")[0],
            tokenizer=ModelTokenizer.load(Path(spec.model)),
            client=EngineClient(spec.lineage),
            truncated_reward=spec.truncated_reward,
        )

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Rollout | Failure:
        """Attempt a prompt once. Raises CancelledError, and nothing else."""
        whereabouts = Whereabouts(EngineAddress(request.engine, request.kind), move)
        try:
            return await self._attempt(request, RolloutPolicy(request, self._client, self._tokenizer, whereabouts))
        finally:
            whereabouts.leave()

    async def _attempt(self, request: AttemptRequest, policy: RolloutPolicy) -> Rollout | Failure:
        started = time.time()
        try:
            outcome: Any = await self._environment(request.prompt, policy)
        except asyncio.CancelledError:
            if _cancelling():
                raise
            return self._failure(policy, "the environment was cancelled from within: something that it awaited was")
        except BaseException as error:  # noqa: BLE001 -- the boundary around the user's code: time limits and panics of Rust are no Exceptions
            ended = self._ended(error, policy)
            if isinstance(ended, Failure):
                return ended
            outcome = ended
        try:
            return self._finish(request, policy, outcome, started)
        except Exception as error:  # noqa: BLE001 -- an outcome may hold anything, also what cannot be stored
            return self._failure(policy, _detail(error), retryable=False)

    async def score(self, request: ScoreRequest) -> list[Score] | Failure:
        """Score rollouts of one prompt. Raises CancelledError, and nothing else."""
        if self._scorer is None:
            return Failure("score_error", "environment.score is not set", retryable=False)
        views = tuple(RolloutView(rollout, self._tokenizer) for rollout in request.rollouts)
        try:
            verdict = await call(self._scorer, request.prompt, views)
            scores = read_verdict(verdict, len(views))
        except asyncio.CancelledError:
            if _cancelling():
                raise
            return Failure("score_error", "the scorer was cancelled from within: something that it awaited was", retryable=True)
        except BaseException as error:  # noqa: BLE001 -- the boundary around the user's code: time limits and panics of Rust are no Exceptions
            return Failure("score_error", _detail(error), retryable=True)
        return Failure("score_error", scores, retryable=False) if isinstance(scores, str) else scores

    async def close(self) -> None:
        """Release connections; idempotent."""
        await self._client.close()

    def _ended(self, error: BaseException, policy: RolloutPolicy) -> Failure | Outcome:
        """Return how an attempt ends by an exception that the environment let pass."""
        cause = _origin(error)
        if isinstance(cause, RolloutTruncated):
            if not policy.sampled_tokens:
                return Failure("prompt_too_long", str(cause), retryable=False)
            return Outcome(self._truncated_reward, finish="truncated")
        if isinstance(cause, GenerationFailed):
            return Failure(cause.cause, str(cause), cause.retryable, policy.sampled_tokens)
        return self._failure(policy, _detail(error), retryable=not isinstance(cause, ConfigError))

    @staticmethod
    def _failure(policy: RolloutPolicy, detail: str, *, retryable: bool = True) -> Failure:
        return Failure("environment_error", detail, retryable, policy.sampled_tokens)

    def _finish(self, request: AttemptRequest, policy: RolloutPolicy, outcome: Any, started: float) -> Rollout | Failure:
        if not isinstance(outcome, Outcome):
            return self._failure(policy, f"the environment returned {outcome!r}: it must return a headway.Outcome", retryable=False)
        known = get_args(Finish)
        if outcome.finish is not None and outcome.finish not in known:
            return self._failure(policy, f"Outcome.finish is {outcome.finish!r}: one of {', '.join(known)}", retryable=False)
        reward, rewards, wrong = _rewards(outcome, needs_reward=self._scorer is None)
        if wrong:
            return Failure("bad_reward", wrong, retryable=False, sampled_tokens=policy.sampled_tokens)
        written = [conversation for conversation in policy.conversations if conversation.sampled]
        if not written:
            return Failure("empty_completion", "the rollout ended without a sampled token", retryable=False)
        versions = [conversation.versions() for conversation in written]
        return Rollout(
            group=request.group,
            member=request.member,
            attempt=request.attempt,
            prompt_id=request.prompt.id,
            environment=self._name,
            reward=reward,
            rewards=rewards,
            finish=outcome.finish or policy.finish,
            turns=policy.turns,
            started=started,
            finished=time.time(),
            engine=policy.whereabouts.engine.url,
            metadata=plain_metadata("outcome", dict(outcome.metadata)),
            samples=len(written),
            tokens=sum(conversation.length for conversation in written),
            sampled_tokens=sum(conversation.sampled for conversation in written),
            head=min(oldest for oldest, _ in versions),
            tail=max(newest for _, newest in versions),
            payload=encode_samples([conversation.sample() for conversation in written]),
        )


async def end_within(task: asyncio.Task[Any], seconds: float) -> bool:
    """Cancel a task and give it `seconds` to clean up; then cancel its clean-up too. Returns whether it ended in time."""
    task.cancel()
    await asyncio.wait((task,), timeout=seconds)
    if task.done():
        return True
    task.cancel()
    return False


def _rewards(outcome: Outcome, *, needs_reward: bool) -> tuple[float | None, dict[str, float], str]:
    """Return the reward, its named parts, and what is wrong with them (empty: nothing)."""
    reward = finite(outcome.reward)
    if reward is None and (needs_reward or outcome.reward is not None):
        return None, {}, f"the reward is {outcome.reward!r}: it must be a finite number"
    parts: dict[str, float] = {}
    for name, value in outcome.rewards.items():
        number = finite(value)
        if number is None:
            return None, {}, f'the reward part "{name}" is {value!r}: it must be a finite number'
        parts[str(name)] = number
    return reward, parts, ""


def _origin(error: BaseException) -> BaseException:
    """Return the exception that explains `error`: an engine's refusal also where the user's code raised something else from it."""
    leaf = first_cause(error)
    cause: BaseException | None = leaf
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, GenerationFailed):
            return cause
        seen.add(id(cause))  # `raise first from second`, of a second that was raised from the first, goes round
        cause = cause.__cause__
    return leaf


def _detail(error: BaseException) -> str:
    """Return what was raised and where, in one line; below it the traceback."""
    leaf = first_cause(error)
    frames = traceback.extract_tb(leaf.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    line = " ".join(f"{type(leaf).__name__}: {_said(leaf)}".split())
    text = "".join(traceback.format_exception(error)).rstrip()
    text = text if len(text) <= _LONGEST_DETAIL else "..." + text[-_LONGEST_DETAIL:]
    told = f"{line[:_LONGEST_LINE]}{where}\n{text}"
    return told.encode(errors="backslashreplace").decode()  # half a surrogate pair is no text that could be stored


def _said(error: BaseException) -> str:
    """Return what an exception says, which is the user's code, too."""
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 -- whatever it is, the first error is the one to tell
        return f"(its text cannot be had: {type(failed).__name__})"


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
