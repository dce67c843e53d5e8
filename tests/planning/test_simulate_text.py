"""The report of a simulation in words: whatever the figures, it is ASCII in 80 columns, and nothing that is there is shown as nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planning.simulate_text import duration, in_words, simulate_text
from headway.sim.distributions import Empirical, Fixed, Lognormal, Mixture, Pareto, Uniform
from headway.sim.intervals import ENGINE, NO_BATCH, TRAINER
from headway.sim.scenario import Scenario, TrainingSection, WorkloadSection
from headway.sim.summary import LengthBias, Staleness, Summary, Tokens

SCENARIO = Scenario(workload=WorkloadSection(tokens=Lognormal(800, 1)), training=TrainingSection(seconds=30.0))
counts = st.integers(0, 10**6)
shares = st.floats(0, 1)
figures = st.floats(0, 1e6)
tenths = st.tuples(*[figures] * 10)
SUMMARIES = st.builds(
    Summary,
    by=st.sampled_from(["virtual loop", "cohorts"]),
    batches=counts,
    seconds=figures,
    batches_per_hour=figures,
    rollouts_per_hour=figures,
    trained_tokens_per_second=figures,
    trainer_busy=shares,
    engines_busy=shares,
    engines_paused=shares,
    trainer_waits=st.dictionaries(st.sampled_from([*NO_BATCH.values(), *TRAINER.values()]), shares),
    engines_wait=st.dictionaries(st.sampled_from(list(ENGINE.values())), shares),
    gate_closed=st.dictionaries(st.sampled_from(["staleness", "concurrency"]), shares),
    in_flight_mean=figures,
    in_flight_max=counts,
    ready_groups_max=counts,
    waiting_bytes_max=counts,
    preemptions=counts,
    tokens=st.builds(
        Tokens,
        sampled=counts,
        trained=counts,
        masked=counts,
        lost=st.dictionaries(st.sampled_from(["stale", "undelivered", "failed"]), counts),
    ),
    staleness=st.builds(
        Staleness,
        mean=figures,
        p99=st.integers(0, 999),
        max=st.integers(0, 999),
        histogram=st.lists(counts, max_size=40).map(tuple),
        masked_histogram=st.dictionaries(st.integers(9, 99), counts),
        head_mean=figures,
        head_p99=st.integers(0, 999),
        head_max=st.integers(0, 999),
    ),
    masked_share=shares,
    head_coverage=shares,
    length_bias=st.builds(LengthBias, tokens=tenths, trained_share=st.tuples(*[shares] * 10), head_coverage=st.tuples(*[shares] * 10)),
    latency_mean=figures,
    cycle_seconds=figures,
)


@settings(max_examples=50)
@given(SUMMARIES)
def test_any_figures_are_told_in_80_columns(summary):
    lines = simulate_text("math", SCENARIO, summary).splitlines()
    assert all(line.isascii() for line in lines)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"math: {summary.batches:,} batch")
    assert {cause for cause in (*summary.trainer_waits, *summary.engines_wait) if not any(line.endswith(cause) for line in lines)} == set()


@settings(max_examples=5)
@given(SUMMARIES)
def test_what_was_not_measured_is_told_below(summary):
    notes = ["prompt_tokens: the journal does not hold them, so they are as the default has it, whatever that may be worth", "turns: 1"]
    *_, before, last = simulate_text("math", SCENARIO, summary, notes).splitlines()
    assert (before.startswith("    "), last) == (True, "assumed: turns: 1")
    assert len(before) <= 80


@pytest.mark.parametrize(
    ("distribution", "words"),
    [
        (Fixed(30), "30"),
        (Fixed(1600), "1,600"),
        (Uniform(10, 50), "10 to 50"),
        (Lognormal(800, 1.5), "800 (lognormal, sigma 1.5)"),
        (Pareto(12.25, 2), "12.25 (Pareto, shape 2)"),
        (Empirical((1.0, 2.0, 3.0)), "2 (3 measured values)"),
        (Mixture(((1.0, Fixed(1)), (1.0, Fixed(3)))), "2 (a mixture of 2)"),
    ],
)
def test_distributions_are_told_with_their_mean(distribution, words):
    assert in_words(distribution) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1e-9, "<0.001 s"),
        (0.04, "0.04 s"),
        (0.43297, "0.433 s"),
        (0, "0.0 s"),
        (84.04, "84.0 s"),
        (119, "119.0 s"),
        (120, "2.0 min"),
        (7200, "2.0 h"),
        (48 * 3600, "2.0 days"),
    ],
)
def test_durations_are_told_as_people_say_them(seconds, words):
    assert duration(seconds) == words
