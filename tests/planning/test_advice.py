"""What a plan chooses, and what it thinks of what was chosen: held against the cohort stepper, which plays the rules."""

import math
import re

import msgspec
import pytest

from headway.errors import ConfigError
from headway.planning.advice import recommend
from headway.planning.expected import expect
from headway.planning.judge import judge
from headway.planning.sensitivity import sensitivity, turned
from headway.settings import RolloutSection
from headway.sim.cohorts import step
from headway.sim.distributions import Fixed, Lognormal, Mixture, Pareto, Uniform
from headway.sim.scenario import (
    BudgetSection,
    EvaluationSection,
    Failing,
    FleetSection,
    LengthSection,
    Scenario,
    TrainingSection,
    WorkloadSection,
)

UNIFORM, MILD, HEAVY, PARETO = Uniform(2, 18), Lognormal(10, 0.5), Lognormal(10, 1), Pareto(10, 2.0)
STRAGGLERS = Mixture(((0.99, Fixed(10 / 1.19)), (0.01, Fixed(200 / 1.19))))
IDS = ["uniform", "lognormal .5", "lognormal 1", "pareto 2", "1 % at 20 x"]
WORLDS = [UNIFORM, MILD, HEAVY, PARETO, STRAGGLERS]


def scenario(seconds=HEAVY, *, train=10.0, sync=0.2, steps=100, budget=None, fleet=None, workload=None, **rollout):
    """A world whose rollouts take 10 s on average, and whose batches train in 10 s."""
    knobs = {"groups_per_batch": 64, "group_size": 1, "max_concurrent": 2000, "timeout_seconds": 0.0} | rollout
    return Scenario(
        workload=WorkloadSection(seconds=seconds, **(workload or {})),
        training=TrainingSection(seconds=train, jitter=0.1),
        fleet=FleetSection(**({"sync_seconds": sync} | (fleet or {}))),
        rollout=RolloutSection(**knobs),
        run=LengthSection(steps=steps),
        budget=BudgetSection(**(budget or {})),
    )


LOADED = {"engines": 4, "half_speed_at": 32.0}


# ---- what is expected


@pytest.mark.parametrize("seconds", WORLDS, ids=IDS)
@pytest.mark.parametrize(
    "knobs",
    [
        {"max_staleness": 8, "steps_ahead": 8.0},
        {"max_staleness": 8, "steps_ahead": 2.5},
        {"max_staleness": 4, "steps_ahead": 2.0, "max_concurrent": 48},
        {"max_staleness": 6, "steps_ahead": 3.0, "group_size": 8, "groups_per_batch": 32, "max_lead": 0},
    ],
    ids=["all the way", "a little ahead", "few in flight", "groups"],
)
def test_closed_forms_are_near_what_is_simulated(seconds, knobs):
    world = scenario(seconds, steps=200, **knobs)
    expected, summary = expect(world), step(world)
    assert expected.cycle_seconds == pytest.approx(summary.cycle_seconds, rel=0.12)
    assert expected.mean_staleness == pytest.approx(summary.staleness.mean, abs=0.35)
    assert expected.masked_share == pytest.approx(summary.masked_share, abs=0.02)
    assert expected.head_coverage == pytest.approx(summary.head_coverage, abs=0.01)
    assert expected.in_flight == pytest.approx(summary.in_flight_mean, rel=0.12)


def test_a_little_ahead_is_as_fast_as_all_the_way_with_younger_tokens():
    far, near = (step(scenario(max_staleness=8, steps_ahead=ahead, max_lead=0, groups_per_batch=256)) for ahead in (8.0, 2.0))
    assert near.batches_per_hour == pytest.approx(far.batches_per_hour, rel=0.03)
    assert far.staleness.mean == pytest.approx(7.3, abs=0.3)  # STALENESS.md, knobs
    assert near.staleness.mean == pytest.approx(2.2, abs=0.3)


def test_in_turn_nothing_is_stale():
    expected = expect(scenario(max_staleness=0, steps_ahead=0.0))
    assert (expected.mean_staleness, expected.max_staleness, expected.masked_share, expected.head_coverage) == (0.0, 0, 0.0, 1.0)
    assert expected.cycle_seconds > 40  # the longest of 64, and the training


@pytest.mark.parametrize(
    ("world", "binding"),
    [
        (scenario(max_staleness=8), "trainer"),
        (scenario(max_staleness=8, max_concurrent=32), "max_concurrent"),
        (scenario(max_staleness=8, steps_ahead=1.0, group_size=8, max_concurrent=9000), "gate"),
        (scenario(max_staleness=2, on_stale="wait"), "wait"),
        (scenario(max_staleness=30, steps_ahead=30.0, fleet=LOADED, group_size=8), "engines"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_binds_is_told(world, binding):
    assert expect(world).binding == binding


def test_engines_slow_down_with_what_they_are_given():
    slow, fast = (expect(scenario(max_staleness=8, fleet={"engines": engines, "half_speed_at": 32.0})) for engines in (2, 16))
    assert slow.rollout_seconds > 1.5 * fast.rollout_seconds
    assert fast.rollout_seconds == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize(
    "more",
    [
        {"workload": {"failures": (Failing(cause="environment_error", share=0.2),)}},
        {"workload": {"zero_advantage_share": 0.3}, "dynamic_sampling": True, "group_size": 8},
        {"workload": {"filtered_share": 0.3}},
        {"fleet": {"max_sequences": 40}},
        {"fleet": {"kv_tokens": 30_000}},
        {"fleet": {"prefill_tokens_per_second": 5000.0, "sync_seconds": 2.0}},
        {"workload": {"turns": 3, "tool_seconds": 5.0}},
    ],
    ids=["failures", "replaced groups", "refused groups", "few sequences", "a small cache", "prefill", "tools"],
)
def test_what_engines_do_beside_decoding_costs_them(more):
    base = {"max_staleness": 30, "steps_ahead": 30.0, "train": 1.0, "max_concurrent": 96, "group_size": more.get("group_size", 1)}
    assert expect(scenario(**(base | more))).batches_per_hour < 0.95 * expect(scenario(**base)).batches_per_hour


def test_evaluations_take_part_of_what_flies():
    busy = scenario(max_staleness=30, steps_ahead=30.0, train=1.0, max_concurrent=96)
    held = msgspec.structs.replace(busy, eval=EvaluationSection(every=2, prompts=64))
    assert expect(held).batches_per_hour == pytest.approx(expect(busy).batches_per_hour / 1.5, rel=0.05)


def test_evaluations_that_may_hold_a_sync_up_for_long_are_told():
    world = scenario(max_staleness=8)
    for every, told in ((1, True), (1000, False)):
        judged = judge(msgspec.structs.replace(world, eval=EvaluationSection(every=every, prompts=4, hold_seconds=30)), None)
        assert any(note.startswith("every 1 versions an evaluation may hold a sync up for 30 s") for note in judged.notes) == told


# ---- what is chosen


@pytest.mark.parametrize("seconds", WORLDS, ids=IDS)
@pytest.mark.parametrize("size", [1, 8])
def test_a_plan_meets_its_aims_by_simulation_and_keeps_the_trainer_busy(seconds, size):
    plan = recommend(scenario(seconds, group_size=size), step)
    assert plan.simulated.masked_share <= 0.02
    assert plan.simulated.head_coverage >= 0.95
    assert plan.simulated.trainer_busy > 0.9
    assert plan.choice.steps_ahead != "auto"
    assert plan.choice.steps_ahead <= plan.choice.max_staleness
    assert plan.choice.max_concurrent % size == 0
    assert plan.binding.startswith("the trainer binds: engines could feed 1.")


def test_a_bound_below_the_chosen_one_would_miss_the_aims():
    world = scenario()
    choice = recommend(world, None).choice
    below = turned(world, max_staleness=choice.max_staleness - 1, steps_ahead=choice.steps_ahead, max_concurrent=choice.max_concurrent)
    assert expect(below).masked_share > 0.02


def test_the_fewest_engines_that_feed_the_trainer_are_chosen():
    plan = recommend(scenario(fleet=LOADED, budget={"engines": 40}), None)
    assert 1 < plan.choice.engines < 40
    assert plan.expected.binding == "trainer"
    fewer = recommend(scenario(fleet=LOADED, budget={"engines": plan.choice.engines // 2}), None)
    assert fewer.choice.engines == plan.choice.engines // 2
    assert fewer.expected.batches_per_hour < plan.expected.batches_per_hour
    assert fewer.binding.startswith("engines bind: the trainer waits ")


def test_the_smallest_batch_is_chosen_that_is_nearly_the_fastest():
    sizes = {"budget": {"groups_per_batch": (32, 64, 128)}}
    by_batch = recommend(scenario(**sizes), None)
    assert by_batch.choice.groups_per_batch == 128  # a step takes as long, however large: so the largest trains most
    by_token = scenario(**sizes, train=0.0)
    by_token = msgspec.structs.replace(by_token, training=TrainingSection(tokens_per_second=2000.0))
    assert recommend(by_token, None).choice.groups_per_batch == 32


def test_where_the_simulation_is_worse_than_the_formulas_the_next_bound_is_tried():
    def harsher(planned):
        workload = msgspec.structs.replace(planned.workload, seconds=Lognormal(10, 1.08))
        return step(msgspec.structs.replace(planned, workload=workload))

    plan = recommend(scenario(), harsher)
    assert plan.tried
    assert plan.simulated.masked_share <= 0.02
    assert plan.choice.max_staleness > recommend(scenario(), None).choice.max_staleness


@pytest.mark.parametrize("most", [12, 32], ids=["until none is left", "until it is enough"])
def test_what_was_given_up_is_all_that_was_simulated_but_for_what_was_chosen(most):
    asked = []

    def only_the_first_is_good(planned):
        asked.append((planned.rollout.max_staleness, planned.rollout.steps_ahead))
        slow = {"batches_per_hour": 100.0, "trainer_busy": 0.5, "gate_closed": {"staleness": 1.0}}
        good = {"masked_share": 0.0, "head_coverage": 1.0, **slow}
        return msgspec.structs.replace(step(planned), **(good if len(asked) == 1 else {"masked_share": 0.5}))

    plan = recommend(scenario(steps=30, budget={"max_staleness": most}), only_the_first_is_good)
    assert (plan.choice.max_staleness, plan.choice.steps_ahead) == asked[0]
    told = [re.search(r"max_staleness (\d+), steps_ahead ([\d.]+)", line).groups() for line in plan.tried]
    assert [(int(bound), float(ahead)) for bound, ahead in told] == asked[1:]


def test_simulations_are_bounded_and_a_plan_that_none_confirms_is_refused():
    asked = []

    def hopeless(planned):
        asked.append(planned)
        return msgspec.structs.replace(step(planned), masked_share=0.5)

    with pytest.raises(ConfigError, match="by simulation they are not") as error:
        recommend(scenario(steps=30), hopeless)
    assert 1 < len(asked) <= 6
    assert "\n" not in str(error.value)


def test_a_simulation_that_disagrees_is_told():
    def slower(planned):
        return step(msgspec.structs.replace(planned, training=TrainingSection(seconds=13.0)))

    plan = recommend(scenario(), slower)
    assert any(line.startswith("batches/hour: 360.0 by formula, 27") for line in plan.disagreements)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"max_staleness": 4}, ["of the tokens would be masked (budget.masked_share is 2.0%)", "max_staleness 1"]),
        ({"max_staleness": 4, "masked_share": 1.0}, ["head coverage would be", "(budget.head_coverage is 95.0%)"]),
        ({"max_staleness": 4, "groups_per_batch": (16, 32)}, ["with max_staleness 4 and groups_per_batch 32", "a token limit"]),
    ],
)
def test_a_budget_that_cannot_meet_the_aims_is_told_what_it_takes(budget, said):
    with pytest.raises(ConfigError) as error:
        recommend(scenario(group_size=8, budget=budget), None)
    line = str(error.value)
    assert "\n" not in line
    assert all(words in line for words in said)


def test_what_it_takes_is_enough():
    with pytest.raises(ConfigError) as error:
        recommend(scenario(budget={"max_staleness": 4}), None)
    bound = int(str(error.value).split("it takes max_staleness ")[1].split()[0].rstrip(","))
    assert recommend(scenario(budget={"max_staleness": bound}), None).choice.max_staleness == bound


# ---- what a config is told


def verdicts(world, simulate=None):
    return {verdict.key: verdict for verdict in judge(world, simulate).verdicts}


def test_more_in_flight_than_ever_flies_buys_nothing():
    found = verdicts(scenario(max_staleness=16, steps_ahead=2.5))
    assert list(found) == ["max_concurrent"]
    assert found["max_concurrent"].words == f"2000 buys nothing over {found['max_concurrent'].better}: the trainer binds"
    assert found["max_concurrent"].better < 128


def test_too_few_in_flight_starve_the_trainer():
    found = verdicts(scenario(max_staleness=16, steps_ahead=2.5, max_concurrent=32))
    assert found["max_concurrent"].better > 64
    assert found["max_concurrent"].words.startswith("32 rollouts in flight starve the trainer: batches/hour 1")


def test_steps_ahead_is_neither_too_small_nor_too_large():
    assert verdicts(scenario(max_staleness=16, steps_ahead=16.0, max_concurrent=80))["steps_ahead"].better == pytest.approx(2.5, abs=0.5)
    slow = verdicts(scenario(max_staleness=16, steps_ahead=1.0, max_concurrent=640, group_size=8))["steps_ahead"]
    assert slow.better > 3
    assert slow.words.startswith("1 holds rollouts back: batches/hour ")


@pytest.mark.parametrize("members", [1, 8])
@pytest.mark.parametrize(("bound", "ahead"), [(1, 1.0), (2, 1.0), (2, 2.0), (4, 0.5), (4, 4.0), (64, 2.5)])
@pytest.mark.parametrize("seconds", WORLDS, ids=IDS)
def test_what_is_to_be_changed_can_be_one_after_the_other(seconds, bound, ahead, members):
    """A config refuses a steps_ahead above its max_staleness."""
    world = scenario(seconds, max_staleness=bound, steps_ahead=ahead, group_size=members, max_concurrent=640)
    judged = judge(world, None)
    knobs = {"max_staleness": bound, "steps_ahead": ahead}
    for verdict in judged.verdicts:
        assert verdict.now == knobs.get(verdict.key, verdict.now)
        knobs |= {verdict.key: verdict.better} if verdict.key in knobs else {}
        assert knobs["steps_ahead"] <= knobs["max_staleness"], verdict
    assert knobs == {"max_staleness": judged.better.max_staleness, "steps_ahead": judged.better.steps_ahead}


def test_a_larger_bound_is_asked_for_only_where_steps_ahead_needs_it():
    long = verdicts(scenario(max_staleness=1, steps_ahead=1.0, max_concurrent=2000, group_size=8))
    assert list(long)[:2] == ["max_staleness", "steps_ahead"]
    assert long["steps_ahead"].better > 1
    short = verdicts(scenario(Fixed(5.0), max_staleness=2, steps_ahead=0.5, max_concurrent=640))
    assert "max_staleness" not in short
    assert 0.5 < short["steps_ahead"].better <= 2


def test_a_bound_that_masks_too_much_is_raised_and_one_that_is_far_too_large_lowered():
    assert verdicts(scenario(max_staleness=4, steps_ahead=2.5, max_concurrent=80))["max_staleness"].better in range(8, 12)
    assert verdicts(scenario(max_staleness=64, steps_ahead=2.5, max_concurrent=80))["max_staleness"].better in range(8, 12)


@pytest.mark.parametrize(("mode", "words"), [("wait", "waiting costs"), ("drop", "dropping wastes"), ("train", "without a bound")])
def test_other_modes_are_told_their_price(mode, words):
    found = verdicts(scenario(max_staleness=4, steps_ahead=2.5, on_stale=mode))["on_stale"]
    assert (found.now, found.better) == (mode, "mask")
    assert found.words.startswith(words)


def test_engines_that_are_too_few_or_too_many_are_counted():
    few = verdicts(scenario(max_staleness=30, steps_ahead=10.0, group_size=8, fleet=LOADED, max_concurrent=512))["engines"]
    many = verdicts(scenario(max_staleness=30, steps_ahead=6.0, fleet=LOADED | {"engines": 40}, max_concurrent=320))["engines"]
    assert few.better > 4
    assert many.better < 40
    held = verdicts(scenario(MILD, train=3.0, max_staleness=2, steps_ahead=2.0, max_concurrent=512, fleet={"max_sequences": 64}))["engines"]
    assert held.words == f"{held.better} would keep the trainer busy, with more steps_ahead; budget.engines is 1"


def test_what_a_plan_chose_needs_no_change():
    world = scenario()
    choice = recommend(world, step).choice
    knobs = {"max_staleness": choice.max_staleness, "steps_ahead": choice.steps_ahead, "max_concurrent": choice.max_concurrent}
    judged = judge(turned(world, **knobs), step)
    assert judged.verdicts == ()
    assert judged.aims_met
    assert judged.choice == judged.better == choice


def test_auto_is_what_the_formula_says_and_is_left_alone():
    knobs = {"max_staleness": 16, "max_concurrent": 80}
    by_itself = scenario(steps_ahead="auto", **knobs)
    assert expect(by_itself) == expect(scenario(steps_ahead=2.5, **knobs))
    judged = judge(by_itself, None)
    assert judged.choice.steps_ahead == "auto"
    assert not {"steps_ahead"} & {row.key for row in judged.sensitivity}
    assert "steps_ahead" not in {verdict.key for verdict in judged.verdicts}


def test_batches_that_are_sized_by_tokens_stay_so():
    world = scenario(Fixed(10.0), batch_tokens=48_000, max_rollout_tokens=6000)  # 500 tokens and 256 of the prompt each: 63 fit
    plan = recommend(world, None)
    assert plan.choice.batch_tokens == 48_000
    assert plan.expected.trained_tokens_per_second == pytest.approx(48_000 / 756 * 500 / 10, rel=0.01)


# ---- what each knob is worth


def test_the_bound_cuts_the_tail_and_leaves_the_mean():
    world = scenario(PARETO, max_staleness=4, steps_ahead=2.5, max_concurrent=80)
    rows = {(row.key, row.after): row.words for row in sensitivity(world, expect(world))}
    assert re.match(r"masked (9|10)\.\d% -> 3\.\d%, head coverage 97", rows["max_staleness", 8])
    assert rows["max_staleness", 8].endswith("mean unchanged")
    assert rows["max_concurrent", 160] == "batches/hour unchanged"


def test_every_knob_is_turned_and_nothing_impossible_is():
    world = scenario(max_staleness=1, steps_ahead=1.0, groups_per_batch=1, max_concurrent=1, fleet={"engines": 1})
    rows = sensitivity(world, expect(world))
    assert {row.key for row in rows} >= {"max_staleness", "steps_ahead", "groups_per_batch", "max_concurrent", "engines", "on_stale"}
    assert all(math.isfinite(row.expected.cycle_seconds) and row.expected.cycle_seconds > 0 for row in rows)
    assert all(row.before != row.after for row in rows)
