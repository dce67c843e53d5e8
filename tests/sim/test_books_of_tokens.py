"""In any world, every token that the engines wrote is in exactly one row of the waste ledger, at the end and in between."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.rules.waste import waste
from headway.settings import EvalSection, MetricsSection, RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal, Uniform, mixture
from headway.sim.engine import EngineSettings
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import Fault, RolloutSettings

MODES = [("admission", "mask"), ("admission", "wait"), ("admission", "drop"), ("ship", "mask"), ("ship", "drop"), ("admission", "train")]


def not_all_ones(rewards):
    return sum(rewards) < len(rewards)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(MODES),
    bound=st.integers(0, 3),
    turns=st.integers(1, 3),
    latency=st.sampled_from([Fixed(1.0), Uniform(0.5, 1.5), Lognormal(1.0, 1.0), mixture((0.95, Fixed(1.0)), (0.05, Fixed(50.0)))]),
    faulty=st.booleans(),
    apart=st.booleans(),
    keep=st.sampled_from([None, not_all_ones]),
    incomplete=st.sampled_from(["partial", "drop"]),
    dynamic=st.booleans(),
    sync=st.floats(0, 2),
    drain_at=st.floats(1, 30),
)
def test_every_token_is_in_one_row(seed, mode, bound, turns, latency, faulty, apart, keep, incomplete, dynamic, sync, drain_at):
    enforce, on_stale = mode
    section = RolloutSection(
        groups_per_batch=3,
        group_size=3,
        max_concurrent=40,
        max_staleness=bound,
        steps_ahead=min(bound, 2),
        enforce=enforce,
        on_stale=on_stale,
        incomplete=incomplete,
        dynamic_sampling=dynamic,
        timeout_seconds=20.0,
    )
    faults = (Fault("environment_error", 0.1), Fault("worker_died", 0.05, retryable=False)) if faulty else ()
    world = WorldSettings(
        seed=seed,
        rollouts=RolloutSettings(seconds=latency, turns=turns, faults=faults, scored_apart=apart, score_seconds=Uniform(0, 1)),
        engines=[EngineSettings(transfer_seconds=sync), EngineSettings(pauses=False)],
        eval_prompts=3,
        keep=keep,
    )
    result = simulate(
        world,
        section,
        RunSection(steps=1000, max_empty_batches=1000, max_consecutive_failures=0, drain_timeout_seconds=30),
        evaluation=EvalSection(every=3, prompts="eval", n=2),
        metrics=MetricsSection(interval_seconds=1.0),
        drain_at=drain_at,
    )
    fates = {row["batch"]: row["token_fates"] for row in result.rows["metrics"]}
    books = waste(result.events, fates)
    assert books.problems == []
    assert sum(books.rows.values()) == books.delivered <= result.sampled_tokens
    assert min(books.rows.values()) >= 0
    assert (books.rows["not_itemised"], books.rows["in_flight"]) == (0, 0)
    if not faulty and latency == Fixed(1.0) and on_stale != "drop":  # nothing is cut short: a drain has time for all that is in flight
        assert books.delivered == result.sampled_tokens
    counts = [(row["time"], row["engine_sampled_tokens"]) for row in result.rows["pipeline"] if row["engine_sampled_tokens"] is not None]
    for time, count in counts:
        assert waste(result.events, fates, [time]).delivered_by_count <= count
    assert [count for _, count in counts] == sorted(count for _, count in counts)
