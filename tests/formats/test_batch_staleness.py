"""How stale a batch is: every figure against a reading token by token."""

import dataclasses
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_strategies import batch_of, batches, plain_sample, rollout_of

from headway.formats.batch import contributing_mask
from headway.formats.batch_metrics import version_spans
from headway.formats.batch_staleness import coverage_by_length, length_classes, staleness_figures
from headway.formats.records import open_records
from headway.formats.rollout import decode_samples


def figures(batch):
    records = open_records(batch)
    return staleness_figures(batch, version_spans(records, contributing_mask(records)))


def tokens_of(rollout):
    """(version, in the loss) of every sampled token."""
    found = []
    for sample in decode_samples(rollout.payload):
        ends = [*sample.span_start[1:], sample.sampled_mask.sum()] if len(sample.span_start) else []
        versions = np.repeat(sample.span_version, np.diff([0, *ends])) if ends else []
        found += zip(versions, sample.loss_mask[sample.sampled_mask], strict=True)
    return found


@st.composite
def mixed_batches(draw):
    """Batches some of whose groups are replayed, with rollouts of two environments, that became ready at some version."""
    batch = draw(batches())
    groups = []
    for group in batch.groups:
        source = draw(st.sampled_from(["live", "live", "replay", "external"]))
        environment = st.sampled_from(["guess", "maths"])
        rollouts = tuple(changed(rollout, source=source, environment=draw(environment)) for rollout in group.rollouts)
        advantages = draw(st.sampled_from([group.advantages, (0.0,) * len(rollouts)]))
        groups.append(dataclasses.replace(group, rollouts=rollouts, advantages=advantages, ready_version=draw(st.integers(0, batch.k))))
    return dataclasses.replace(batch, groups=tuple(groups))


def changed(rollout, **changes):
    return type(rollout)(**{name: getattr(rollout, name) for name in rollout.__struct_fields__} | changes)


@settings(max_examples=200)
@given(mixed_batches())
def test_figures_are_those_of_a_token_by_token_reading(batch):
    row = figures(batch)
    contributing, masked, fates = Counter(), Counter(), Counter()
    in_flight = queued = replayed = 0
    heads, covered = [], defaultdict(list)
    for group in batch.groups:
        for rollout in group.rollouts:
            ages, first = [], None
            out = (rollout.group, rollout.member) in batch.overlong_masked
            for version, loss in tokens_of(rollout):
                if rollout.source != "live":
                    replayed += loss and not out
                    continue
                age = batch.k - version
                trains = loss and not out and (batch.on_stale != "mask" or age <= batch.max_staleness)
                if trains:
                    ages.append(age)
                    in_flight += max(0, group.ready_version - version)
                    queued += batch.k - max(group.ready_version, version)
                elif loss and not out:
                    masked[str(age)] += 1
                fate = "zero_advantage" if group.zero_advantage else "trained"
                fates["not_in_loss" if not loss else "over_length" if out else fate if trains else "masked"] += 1
                if loss and not out and first is None:
                    first = bool(trains)
            contributing.update(ages)
            heads += [max(ages)] if ages else []
            if first is not None:
                covered[rollout.environment].append(first)
    total = sum(contributing.values())
    assert row["token_staleness_histogram"] == [contributing[age] for age in range(max(contributing, default=-1) + 1)]
    assert row["head_staleness_histogram"] == [heads.count(age) for age in range(max(heads, default=-1) + 1)]
    assert row["masked_staleness_histogram"] == masked
    assert +Counter(row["token_fates"]) == +fates
    assert row["share_over_bound"] == pytest.approx(
        sum(count for age, count in contributing.items() if age > batch.max_staleness) / max(1, total)
    )
    assert row["replayed_groups"] == sum(group.rollouts[0].source != "live" for group in batch.groups)
    assert row["replayed_tokens"] == replayed
    if total:
        assert row["staleness_in_flight_mean"] == pytest.approx(in_flight / total)
        assert row["staleness_queued_mean"] == pytest.approx(queued / total)
        assert row["staleness_in_flight_mean"] + row["staleness_queued_mean"] == pytest.approx(row["token_staleness_mean"])
    else:
        assert row["token_staleness_mean"] is row["token_staleness_max"] is row["staleness_queued_mean"] is None
    assert row["rollouts_by_environment"] == {name: len(firsts) for name, firsts in covered.items()}
    assert row["head_coverage_by_environment"] == pytest.approx({name: np.mean(firsts) for name, firsts in covered.items()})
    for name, shares in row["head_coverage_by_length"].items():
        weights = np.bincount(length_classes(len(covered[name])), minlength=10)
        assert [share is None for share in shares] == [not weight for weight in weights]
        assert sum(share * weight for share, weight in zip(shares, weights, strict=True) if weight) == pytest.approx(sum(covered[name]))


@given(st.integers(1, 200))
def test_length_classes_are_tenths_as_even_as_can_be(rollouts):
    classes = length_classes(rollouts)
    sizes = np.bincount(classes, minlength=10)
    assert (np.diff(classes) >= 0).all()
    assert len(sizes) == 10
    assert sizes.max() - sizes.min() <= 1


def test_the_long_tenth_that_is_never_covered_stands_out():
    lengths = np.arange(100, 0, -1)
    assert coverage_by_length(lengths, lengths <= 90) == [1.0] * 9 + [0.0]


def test_rollouts_of_one_length_share_their_coverage_whatever_their_order():
    lengths = np.full(20, 7)
    assert coverage_by_length(lengths, np.arange(20) < 5) == [0.25] * 10


def test_a_rollout_that_overlong_keeps_out_is_not_uncovered():
    young, long = rollout_of([plain_sample([3, 3])], group=10, member=0), rollout_of([plain_sample([3, 3, 3])], group=10, member=1)
    row = figures(batch_of([[young, long]], k=3, max_staleness=1, overlong_masked={(10, 1)}))
    assert (row["head_coverage"], row["rollouts_by_environment"]) == (1.0, {"guess": 1})
    assert row["token_fates"] == {"trained": 2, "masked": 0, "zero_advantage": 0, "over_length": 3, "not_in_loss": 0}


def test_nothing_over_the_bound_but_where_everything_is_trained_on():
    rollouts = [rollout_of([plain_sample([0, 3])], group=10, member=0), rollout_of([plain_sample([3, 3])], group=10, member=1)]
    assert figures(batch_of([rollouts], k=3, max_staleness=1))["share_over_bound"] == 0
    assert figures(batch_of([rollouts], k=3, max_staleness=1, on_stale="train"))["share_over_bound"] == 0.25
