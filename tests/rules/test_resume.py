"""What a run goes on with: fault cases A01 and A08, the resume trap, and each rule of STALENESS.md's line "resume"."""

import pytest
from folded import completed, fold
from hypothesis import given
from hypothesis import strategies as st
from small_world import deadlines_hold

from headway.events import Admitted, BatchAcknowledged, BatchFormed, Finished, GroupDropped, Published, Ready, Resumed
from headway.rules.admission import GateLimits, capacity
from headway.rules.batching import can_form, chosen, groups_to_take, in_the_way
from headway.rules.ledger import apply
from headway.rules.lineage import Line, line_of
from headway.rules.resume import CompleteGroup, Evicted, PersistedBatch, UnfinishedGroup, resume_plan

B, S = 8, 2
OURS = Line("ours")
BOUNDED = ("mask", "wait", "drop")


def limits(mode="mask", *, bound=S, groups=B, **more):
    return GateLimits(
        groups_per_batch=groups,
        group_size=1,
        max_concurrent=10**6,
        steps_ahead=float(bound),
        steps=10**9,
        max_staleness=bound,
        on_stale=mode,
        **more,
    )


def group(number, birth, tail=None, *, lineage="ours"):
    return CompleteGroup(group=number, birth=birth, head=birth, tail=birth if tail is None else tail, lineage=lineage)


def begun(number, birth, tail=None, *, finished=1, lineage="ours"):
    tail = birth if tail is None else tail
    return UnfinishedGroup(group=number, birth=birth, finished=finished, head=birth, tail=tail, lineage=lineage)


def batch(k, *groups, newest=None, valid=True, lineage="ours", bound=S, mode="mask"):
    newest = max((one.tail for one in groups), default=0) if newest is None else newest
    return PersistedBatch(k=k, lineage=lineage, newest=newest, valid=valid, max_staleness=bound, on_stale=mode, groups=groups)


def plan(version, *, ready=(), batches=(), running=(), mode="mask", line=OURS, **more):
    return resume_plan(version=version, line=line, batches=batches, ready=ready, running=running, limits=limits(mode), **more)


# ---- A01 and the resume trap -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOUNDED)
@pytest.mark.parametrize("version", [0, 50, 500])
def test_a01_a_resume_opens_one_window_whatever_the_version_and_however_often(mode, version):
    ledger = fold(Resumed(0.0, version, version, "ours"))
    started = 0
    while capacity(ledger, limits(mode)) > 0:
        apply(ledger, Admitted(0.0, ledger.next_group, f"p{started}", 0, 1, ledger.version))
        started += 1
    assert started == (S + 1) * B == 24
    apply(ledger, Resumed(0.0, version, version, "ours"))
    assert capacity(ledger, limits(mode)) == 24


@pytest.mark.parametrize("surplus", [8, 16, 23])
def test_the_resume_trap_restored_groups_take_room_from_the_window_and_none_is_over_its_bound(surplus):
    """V = 40, S = 2, B = 8: counters admit 24 always, and staleness becomes 3, 4 and 5."""
    restored = [group(number, 40) for number in range(surplus)]
    for mode in BOUNDED:
        kept = plan(40, ready=restored, mode=mode)
        assert len(kept.kept) == surplus
        events = [event for one in restored for event in completed(one.group, one.birth)]
        ledger = fold(*events, Resumed(0.0, 40, 40, "ours"))
        assert capacity(ledger, limits(mode)) == 24 - surplus
        assert _oldest_of_a_run_with_slow_groups(ledger, mode) <= S


def _oldest_of_a_run_with_slow_groups(ledger, mode):
    """Let new groups overtake each other by all that the gate allows: the newest ends first. Return the stalest that was consumed."""
    stalest = 0
    for _ in range(30):
        while capacity(ledger, limits(mode)) > 0:
            apply(ledger, Admitted(0.0, ledger.next_group, f"p{ledger.next_group}", 0, 1, ledger.version))
        while not can_form(ledger, limits(mode)):
            newest = max(ledger.running)
            apply(ledger, Finished(0.0, newest, 0, 0, 1.0, 1, 1, 0, 0))
            apply(ledger, Ready(0.0, newest, zero_advantage=False))
            _drop_masked(ledger, mode)
        k = ledger.next_batch
        if mode == "drop":
            for number in in_the_way(ledger, limits(mode), B):
                apply(ledger, GroupDropped(0.0, number, "stale", "", 0))
        groups = chosen(ledger, groups_to_take(ledger, limits(mode)))
        stalest = max(stalest, *(k - ledger.ready[number].birth for number in groups))
        apply(ledger, BatchFormed(0.0, k, tuple(groups), 0.0))
        apply(ledger, BatchAcknowledged(0.0, k))
        apply(ledger, Published(0.0, k + 1, ()))
        _drop_masked(ledger, mode)
    return stalest


def _drop_masked(ledger, mode):
    if mode == "mask":
        for number in [number for number, unit in ledger.ready.items() if unit.birth < ledger.next_batch - S]:
            apply(ledger, GroupDropped(0.0, number, "stale", "", 0))


@pytest.mark.parametrize("surplus", [25, 40])
def test_more_than_a_window_is_absorbed_under_a_mask_and_cut_to_what_can_be_consumed_otherwise(surplus):
    restored = [group(number, 40) for number in range(surplus)]
    assert len(plan(40, ready=restored).kept) == surplus
    assert capacity(fold(*[event for one in restored for event in completed(one.group, 40)], Resumed(0.0, 40, 40, "o")), limits()) == 0
    for mode in ("wait", "drop"):
        cut = plan(40, ready=restored, mode=mode)
        assert cut.kept == tuple(range(24))
        assert cut.counts == {"no room": surplus - 24}
        assert cut.requeued == tuple(range(24, surplus))


@pytest.mark.parametrize("mode", ["wait", "drop"])
def test_the_right_number_is_not_enough_where_too_many_are_due_at_once(mode):
    restored = [group(number, 38) for number in range(23)]
    cut = plan(40, ready=restored, mode=mode)
    assert cut.kept == tuple(range(8))
    assert "batches 40 to 40 have no room" in cut.evicted[0].detail


# ---- A08 ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOUNDED)
def test_a08_entries_over_age_are_evicted_counted_and_made_again_and_the_step_ships(mode):
    old, fresh = [group(number, 37) for number in range(3)], [group(number, 39) for number in range(3, 8)]
    found = plan(40, ready=[*old, *fresh], mode=mode)
    assert found.kept == (3, 4, 5, 6, 7)
    assert found.counts == {"over age": 3}
    assert found.requeued == (0, 1, 2)
    assert found.k == 40

    events = [event for one in [*old, *fresh] for event in completed(one.group, one.birth)]
    ledger = fold(*events, Resumed(0.0, found.version, found.k, "ours"))
    for evicted in found.evicted:
        apply(ledger, GroupDropped(0.0, evicted.group, "stale", evicted.detail, 4, requeued=True))
    assert sorted(ledger.ready) == list(found.kept)
    assert (ledger.waiting_prompts, ledger.dropped["stale"]) == (3, 3)
    assert set(ledger.requeued) == {("p0", 0), ("p1", 0), ("p2", 0)}
    for number, prompt in enumerate(("p0", "p1", "p2"), start=8):
        assert capacity(ledger, limits(mode)) > 0
        apply(ledger, Admitted(0.0, number, prompt, 0, 1, 40))
        apply(ledger, Finished(0.0, number, 0, 0, 1.0, 5, 4, 40, 40))
        apply(ledger, Ready(0.0, number, zero_advantage=False))
    assert can_form(ledger, limits(mode))
    assert sorted(chosen(ledger, groups_to_take(ledger, limits(mode)))) == [3, 4, 5, 6, 7, 8, 9, 10]


# ---- which batches are shipped again -----------------------------------------------------------------------------------------------


def test_k_is_the_first_batch_without_a_valid_persisted_one():
    again = plan(40, batches=[batch(41, group(2, 40)), batch(39, group(0, 39)), batch(40, group(1, 39))])
    assert (again.version, again.k, again.ship_again, again.dissolved, again.kept) == (40, 42, (40, 41), (), ())


@pytest.mark.parametrize(
    "spoilt",
    [
        {"valid": False},
        {"newest": 42},
        {"lineage": "parent"},
        {"lineage": "theirs"},
        {"bound": 3},
        {"mode": "train"},
    ],
)
def test_a_batch_that_cannot_ship_again_is_dissolved_with_all_later_ones(spoilt):
    line = line_of("ours", {"ours": "parent-41"})
    batches = [batch(41, group(1, 41)), batch(42, group(2, 41), **spoilt), batch(43, group(3, 41))]
    found = plan(41, batches=batches, line=line, ready=[group(4, 40)])
    assert (found.k, found.ship_again, found.dissolved) == (42, (41,), (42, 43))
    assert found.kept == (4, 2, 3)


def test_what_lies_beyond_a_gap_is_dissolved():
    found = plan(41, batches=[batch(42, group(2, 41)), batch(44, group(3, 41))])
    assert (found.k, found.ship_again, found.dissolved, found.kept) == (41, (), (42, 44), (2, 3))


# ---- which groups stay -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*BOUNDED, "train"])
def test_stamps_of_weights_that_exist_no_more_never_survive(mode):
    line = line_of("ours", {"ours": "parent-38"})
    ready = [
        group(0, 40, 41),
        group(1, 38, 39, lineage="parent"),
        group(2, 38, lineage="parent"),
        group(3, 39, lineage="theirs"),
        group(4, 41, 40),
        group(5, 40),
    ]
    found = plan(40, ready=ready, line=line, mode=mode)
    assert found.kept == (2, 5)
    assert [(entry.group, entry.reason) for entry in found.evicted] == [(1, "alien"), (3, "alien"), (0, "newer"), (4, "newer")]


def test_a_mask_keeps_what_holds_a_token_young_enough_and_no_more():
    found = plan(40, ready=[group(0, 30, 38), group(1, 30, 37)])
    assert found.kept == (0,)
    assert found.evicted == (Evicted(1, "over age", "its newest token is of version 37: 3 versions old in batch 40"),)


@pytest.mark.parametrize("mode", ["wait", "drop"])
def test_wait_and_drop_go_by_birth(mode):
    found = plan(40, ready=[group(0, 37, 40), group(1, 38, 38)], mode=mode)
    assert found.kept == (1,)
    assert found.evicted == (Evicted(0, "over age", "it was born at version 37: 3 versions old in batch 40"),)


def test_enforced_at_the_shipper_births_count_and_room_does_not():
    many = [group(number, 38) for number in range(30)]
    found = resume_plan(version=40, line=OURS, batches=(), ready=[*many, group(30, 37)], running=(), limits=limits("drop", enforce="ship"))
    assert found.kept == tuple(range(30))
    assert found.counts == {"over age": 1}


def test_who_trains_on_everything_keeps_whatever_its_own_weights_wrote():
    assert plan(40, ready=[group(0, 0)], mode="train").kept == (0,)


def test_a_batch_of_a_tighter_bound_ships_again_and_whoever_trains_on_everything_ships_any():
    assert plan(40, batches=[batch(40, group(1, 39), bound=1, mode="drop")]).ship_again == (40,)
    assert plan(40, batches=[batch(40, group(1, 9), bound=9, mode="train")], mode="train").ship_again == (40,)


def test_groups_of_which_nothing_had_finished_are_tried_again_and_the_others_go_on():
    found = plan(40, running=(begun(9, 40, finished=0), begun(8, 40), begun(7, 39, finished=0), begun(6, 39, 40, finished=3)))
    assert (found.interrupted, found.requeued, found.continued, found.evicted) == ((7, 9), (7, 9), (6, 8), ())


@pytest.mark.parametrize("mode", ["wait", "drop"])
def test_a_group_that_had_begun_goes_on_only_within_its_deadline_and_after_complete_ones_of_its_birth(mode):
    ready = [group(number, 38) for number in range(5, 10)]
    running = [begun(0, 37), *(begun(number, 38) for number in range(1, 5))]
    found = plan(40, ready=ready, running=running, mode=mode)
    assert (found.kept, found.continued) == ((5, 6, 7, 8, 9), (1, 2, 3))
    assert [(entry.group, entry.reason) for entry in found.evicted] == [(0, "over age"), (4, "no room")]


def test_a_mask_lets_a_group_go_on_whose_finished_members_are_too_old_as_younger_ones_are_to_come():
    assert plan(40, running=[begun(0, 30)]).continued == (0,)


@pytest.mark.parametrize("mode", [*BOUNDED, "train"])
def test_a_group_that_had_begun_under_other_weights_does_not_go_on(mode):
    line = line_of("ours", {"ours": "parent-38"})
    found = plan(40, running=[begun(0, 38, 39, lineage="parent"), begun(1, 40, 41), begun(2, 38, lineage="parent")], line=line, mode=mode)
    assert found.continued == (2,)
    assert [(entry.group, entry.reason) for entry in found.evicted] == [(0, "alien"), (1, "newer")]


def test_places_of_replayed_groups_leave_less_room():
    ready = [group(number, 38) for number in range(8)]
    found = plan(40, ready=ready, mode="wait", promised={40: 2})
    assert found.kept == tuple(range(6))


GROUPS = st.lists(st.tuples(st.integers(36, 42), st.integers(0, 3), st.sampled_from(["ours", "ours", "parent", "theirs"])), max_size=40)


@given(GROUPS, st.sampled_from([*BOUNDED, "train"]), st.integers(0, 3), st.integers(1, 4))
def test_the_plan_keeps_all_that_fits_and_nothing_else(entries, mode, bound, groups):
    """Each group is either kept or evicted for a reason that is true; and none that was evicted for room would have fitted."""
    line = line_of("ours", {"ours": "parent-39"})
    ready = [group(number, birth, birth + more, lineage=lineage) for number, (birth, more, lineage) in enumerate(entries)]
    within = limits(mode, bound=bound, groups=groups)
    found = resume_plan(version=40, line=line, batches=(), ready=ready, running=(), limits=within)
    by_id = {one.group: one for one in ready}
    births = [by_id[number].birth for number in found.kept]
    assert births == sorted(births)
    assert sorted([*found.kept, *(entry.group for entry in found.evicted)]) == list(range(len(ready)))

    def fits(extra):
        return deadlines_hold([*births, *extra], 40, bound, lambda _: groups)

    assert mode in {"mask", "train"} or fits([])
    for entry in found.evicted:
        one = by_id[entry.group]
        match entry.reason:
            case "alien":
                assert one.lineage == "theirs" or (one.lineage == "parent" and one.tail > 39)
            case "newer":
                assert one.tail > 40
            case "over age":
                assert (one.tail if mode == "mask" else one.birth) < 40 - bound
            case "no room":
                assert not fits([one.birth])
