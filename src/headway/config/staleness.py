"""What the keys of the bound say about each other: how far ahead, what happens past it, how batches are sized, what comes from elsewhere.

Pure: a config in, problems out. Whether a rollout timeout suits `on_stale = "wait"` depends on how long a batch takes, which only a run
can measure: it advises then (`rules.pacing`). Here is refused what hangs for certain.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.config.problems import Problem, is_wrong
from headway.settings import Config, smallest_batch, steps_ahead

_CORRECTING = 'trainer.loss = "decoupled_ppo", "tis" or "ppo"'


def staleness_contradictions(config: Config) -> list[Problem]:
    """Return what is wrong with the keys that pace a run."""
    return [*_pacing(config), *_past_the_bound(config), *_ship(config), *_batch_size(config), *_from_elsewhere(config), *_debug(config)]


def _pacing(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if isinstance(rollout.steps_ahead, float) and rollout.steps_ahead > rollout.max_staleness:
        yield is_wrong(
            "rollout.steps_ahead",
            rollout.steps_ahead,
            f"at most rollout.max_staleness ({rollout.max_staleness}): what starts further ahead would be too old to train on",
        )
    if rollout.max_concurrent < rollout.group_size:
        yield is_wrong(
            "rollout.max_concurrent",
            rollout.max_concurrent,
            f"at least rollout.group_size ({rollout.group_size}): a group starts as a whole, so none ever could",
        )


def _past_the_bound(config: Config) -> Iterator[Problem]:
    rollout, trainer, environment = config.rollout, config.trainer, config.environment
    if rollout.on_stale == "wait":
        if not rollout.timeout_seconds:
            yield is_wrong(
                "rollout.timeout_seconds", 0, 'with on_stale = "wait" one rollout that never ends would hold the run for ever: set a limit'
            )
        if environment.score and not environment.score_timeout_seconds:
            yield is_wrong(
                "environment.score_timeout_seconds",
                0,
                'with on_stale = "wait" one score that never comes would hold the run for ever: set a limit',
            )
    if rollout.on_stale == "train" and trainer.kind == "embedded" and trainer.loss == "reinforce" and not trainer.allow_uncorrected:
        yield is_wrong(
            "trainer.loss",
            trainer.loss,
            f'it does not correct for staleness, and on_stale = "train" sets no bound to it: use {_CORRECTING}, '
            "or set trainer.allow_uncorrected = true",
        )


def _ship(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.enforce != "ship":
        return
    if rollout.on_stale == "wait":
        yield is_wrong(
            "rollout.enforce",
            "ship",
            'with on_stale = "wait" groups would grow too old while they wait: keep enforce = "admission", or on_stale = "mask" or "drop"',
        )
    if rollout.steps_ahead == "auto":
        yield is_wrong("rollout.steps_ahead", "auto", 'enforce = "ship" keeps the engines full and does not use it: remove one of the two')
    if 0 < rollout.max_ready_groups < smallest_batch(rollout):
        yield is_wrong(
            "rollout.max_ready_groups",
            rollout.max_ready_groups,
            f"at least a batch ({smallest_batch(rollout)} groups), or 0 for (max_staleness + 1) batches",
        )


def _batch_size(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if not rollout.batch_tokens:
        return
    if not rollout.max_rollout_tokens:
        yield is_wrong(
            "rollout.max_rollout_tokens", 0, "rollout.batch_tokens needs it: without a longest rollout nobody knows how many groups fit"
        )
    elif not smallest_batch(rollout):
        group = rollout.group_size * rollout.max_rollout_tokens
        yield is_wrong(
            "rollout.batch_tokens",
            rollout.batch_tokens,
            f"one group may have {group} tokens (group_size x max_rollout_tokens): make it {group} or more",
        )


def _from_elsewhere(config: Config) -> Iterator[Problem]:
    """A batch keeps a live group: otherwise live ones could wait for ever behind others that are offered and never trained."""
    rollout = config.rollout
    smallest = smallest_batch(rollout)
    used = config.replay is not None or config.ingest is not None
    if used and smallest == 1:
        key, value = ("rollout.batch_tokens", rollout.batch_tokens) if rollout.batch_tokens else ("rollout.groups_per_batch", 1)
        yield is_wrong(key, value, "with [replay] or [ingest] a batch must have 2 groups or more: one of them stays live")
    elif rollout.replayed_groups is not None and rollout.replayed_groups >= smallest > 1:
        yield is_wrong(
            "rollout.replayed_groups",
            rollout.replayed_groups,
            f"at most {smallest - 1}: a batch may have no more than {smallest} groups, and one of them stays live",
        )
    elif used and rollout.replayed_groups == 0:
        yield is_wrong("rollout.replayed_groups", 0, "with [replay] or [ingest] it must be 1 or more: nothing would ever be taken in")


def _debug(config: Config) -> Iterator[Problem]:
    rollout, lag = config.rollout, config.debug.publish_lag
    if not lag:
        return
    if rollout.steps_ahead == "auto":
        yield is_wrong("rollout.steps_ahead", "auto", "debug.publish_lag needs a fixed one: set both to the same number")
    elif lag > steps_ahead(rollout):
        yield is_wrong(
            "debug.publish_lag",
            lag,
            f"at most rollout.steps_ahead ({steps_ahead(rollout):g}): otherwise the batch that it waits for may never start",
        )
    if config.trainer.kind == "embedded" and config.trainer.keep_checkpoints <= lag:
        yield is_wrong(
            "trainer.keep_checkpoints",
            config.trainer.keep_checkpoints,
            f"debug.publish_lag serves a version {lag} behind the newest: keep {lag + 1} or more",
        )
