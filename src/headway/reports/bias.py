"""Selection bias: are the rollouts that were trained on like those that were generated? And which prompts never get their turn?

*Generated* is every rollout that finished, *trained* those of which a token was in the loss of a trained batch. Length, turns, duration and
reward of both stand side by side, per environment. Ranges are chosen by the generated ones: one for each value where there are few values,
otherwise tenths, so that an unbiased run trains a tenth in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headway.errors import HeadwayError
from headway.events import Finished
from headway.reports.bias_history import History
from headway.reports.run_files import RunFiles, sane
from headway.rules.staleness import oldest_contributing

RANGES = 10
MOST_STARVED = 10
QUANTITIES: Mapping[str, Callable[[Finished], float | None]] = {
    "length": lambda rollout: rollout.sampled_tokens,
    "turns": lambda rollout: rollout.turns,
    "seconds": lambda rollout: rollout.seconds,
    "reward": lambda rollout: rollout.reward,
}


class Range(msgspec.Struct, frozen=True):
    """Rollouts with a value above `low` and up to `high`; the first range holds `low` too, and so does one whose ends are equal."""

    low: float
    high: float
    generated: int
    trained: int


class Audit(msgspec.Struct, frozen=True):
    """One quantity of an environment's rollouts: `length` in sampled tokens, `turns`, `seconds`, `reward`."""

    quantity: str
    generated_mean: float | None
    trained_mean: float | None
    ranges: list[Range]


class EnvironmentBias(msgspec.Struct, frozen=True):
    """An environment's rollouts."""

    environment: str
    generated: int
    trained: int
    audits: list[Audit]


class StarvedPrompt(msgspec.Struct, frozen=True):
    """How often a prompt was admitted, trained on, put back to be tried again, and given up as always too late."""

    prompt_id: str
    admitted: int
    trained: int
    requeued: int
    given_up: int


class BiasReport(msgspec.Struct, frozen=True):
    """`headway inspect RUN bias`. `lost`: members that never finished and so have no length, by their cause or their group's."""

    run: str
    ended: bool
    environments: list[EnvironmentBias]
    lost: dict[str, int]
    prompts: int
    prompts_never_trained: int
    starved: list[StarvedPrompt]


def bias_report(run: RunFiles) -> BiasReport:
    """Read the report; raises HeadwayError when no rollout has finished, StorageError when a file is damaged."""
    history = History()
    with sane(run.state):
        for event in run.events():
            history.apply(event)
    generated = [rollout for group in history.groups.values() for rollout in group.rollouts.values()]
    if not generated:
        raise HeadwayError(f"{run.directory.path}: no rollout has finished yet")
    batches = history.trained()
    trained = _trained_members(run, history, batches)
    flags = np.array([(rollout.group, rollout.member) in trained for rollout in generated])
    environments = np.array([rollout.environment for rollout in generated])
    prompts, starved, never = _prompts(history, batches)
    return BiasReport(
        run=run.name,
        ended=run.info.ended is not None,
        environments=[_environment(str(name), generated, environments == name, flags) for name in sorted(set(environments.tolist()))],
        lost=dict(sorted((+history.lost).items())),
        prompts=prompts,
        prompts_never_trained=never,
        starved=starved,
    )


def _trained_members(run: RunFiles, history: History, batches: Mapping[int, int]) -> set[tuple[int, int]]:
    """Return the rollouts of which a token was in the loss."""
    mask, bound = run.rollout.on_stale == "mask", run.rollout.max_staleness
    trained = {
        (group, member)
        for group, k in batches.items()
        for member, rollout in history.groups[group].rollouts.items()
        if member not in history.groups[group].gone and not (mask and rollout.tail < oldest_contributing(k, bound))
    }
    if run.rollout.overlong == "mask":
        trained -= _overlong(run, sorted(set(batches.values())))
    return trained


def _overlong(run: RunFiles, batches: Sequence[int]) -> set[tuple[int, int]]:
    """Return the rollouts that were kept out of the loss for their length: only the batches' records know."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from headway.formats.batch import RECORDS

    found: set[tuple[int, int]] = set()
    for k in batches:
        path = run.directory.batch(k) / RECORDS
        if not path.exists():
            continue  # retired: what its rows of metrics say of length still holds
        with sane(path):
            try:
                table = pq.read_table(path, columns=["group_id", "member", "drop_cause"])
            except (OSError, pa.ArrowInvalid) as error:
                raise ValueError(error) from error
            found.update((row["group_id"], row["member"]) for row in table.to_pylist() if row["drop_cause"] == "over_length")
    return found


def _environment(name: str, generated: Sequence[Finished], here: npt.NDArray[np.bool_], trained: npt.NDArray[np.bool_]) -> EnvironmentBias:
    rollouts = [generated[index] for index in np.flatnonzero(here).tolist()]
    flags = trained[here]
    return EnvironmentBias(
        environment=name,
        generated=len(rollouts),
        trained=int(np.count_nonzero(flags)),
        audits=[_audit(quantity, [value(rollout) for rollout in rollouts], flags) for quantity, value in QUANTITIES.items()],
    )


def _audit(quantity: str, values: Sequence[float | None], trained: npt.NDArray[np.bool_]) -> Audit:
    known = np.array([value is not None for value in values])
    numbers = np.array([value for value in values if value is not None], np.float64)
    flags = trained[known]
    return Audit(
        quantity=quantity,
        generated_mean=float(numbers.mean()) if numbers.size else None,
        trained_mean=float(numbers[flags].mean()) if flags.any() else None,
        ranges=ranges(numbers, flags) if numbers.size else [],
    )


def ranges(values: npt.NDArray[np.float64], trained: npt.NDArray[np.bool_]) -> list[Range]:
    """Return how many of `values`, float64 (n), at least one, lie in each range, and how many of these are `trained`, bool (n)."""
    distinct = np.unique(values)
    if len(distinct) <= RANGES:
        highs, lows = distinct, distinct
    else:
        highs = np.unique(np.quantile(values, np.arange(1, RANGES + 1) / RANGES, method="inverted_cdf"))
        lows = np.append(distinct[0], highs[:-1])
    place = np.searchsorted(highs, values)
    generated = np.bincount(place, minlength=len(highs))
    of_them = np.bincount(place[trained], minlength=len(highs))
    return [
        Range(low, high, all_, some)
        for low, high, all_, some in zip(lows.tolist(), highs.tolist(), generated.tolist(), of_them.tolist(), strict=True)
    ]


def _prompts(history: History, batches: Mapping[int, int]) -> tuple[int, list[StarvedPrompt], int]:
    """Return how many prompts there were, those that were put back most, and how many came to an end and never trained."""
    admitted = Counter(group.prompt_id for group in history.groups.values())
    trained = Counter(history.groups[group].prompt_id for group in batches)
    ended = {group.prompt_id for group in history.groups.values() if group.dropped}
    back = [prompt for prompt in admitted if history.requeued[prompt] or history.given_up[prompt]]
    back.sort(key=lambda prompt: (-history.given_up[prompt], -history.requeued[prompt], prompt))
    starved = [
        StarvedPrompt(prompt, admitted[prompt], trained[prompt], history.requeued[prompt], history.given_up[prompt])
        for prompt in back[:MOST_STARVED]
    ]
    return len(admitted), starved, len(ended - trained.keys())
