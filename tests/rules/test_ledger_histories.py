"""The ledger is the fold of the journal: the same as a naive model that keeps everything, over any valid history."""

import random
from collections import Counter
from dataclasses import dataclass, field

from folded import fold
from hypothesis import given
from hypothesis import strategies as st
from ledger_events import admitted, dropped, finished, lost, ready

from headway.events import BatchAcknowledged, BatchFormed, Finished, GroupDropped, Published
from headway.rules.ledger import Ledger, apply

CAUSES = ("stale", "incomplete", "filtered", "zero_advantage", "cancelled")


@dataclass
class Model:
    """Everything that ever happened, and the answers counted out of it."""

    groups: dict = field(default_factory=dict)  # id -> [state, prompt, members, ended, birth]
    waiting: Counter = field(default_factory=Counter)
    version: int = -1
    k: int = 0
    trained: int = 0
    sampled: int = 0

    def of(self, state):
        return [group for group, entry in self.groups.items() if entry[0] == state]

    def check(self, ledger):
        assert sorted(ledger.running) == self.of("running")
        assert sorted(ledger.ready) == self.of("ready")
        assert ledger.rollouts_in_flight == sum(entry[2] - entry[3] for entry in self.groups.values() if entry[0] == "running")
        assert {group: unit.birth for group, unit in ledger.running.items()} == {g: self.groups[g][4] for g in self.of("running")}
        assert ledger.waiting_prompts == self.waiting.total()
        assert (ledger.version, ledger.next_batch, ledger.trained) == (self.version, self.k, self.trained)
        assert (ledger.sampled_tokens, ledger.admitted, ledger.next_group) == (self.sampled, len(self.groups), len(self.groups))
        assert ledger.dropped.total() == len(self.of("dropped"))


def step(model, draw):
    """Let one thing happen that may happen, and return its event."""
    running, done, late = model.of("running"), model.of("ready"), model.of("dropped") + model.of("batched")
    open_groups = [group for group in running if model.groups[group][3] < model.groups[group][2]]
    complete = [group for group in running if group not in open_groups]
    doable = ["admit", "admit", "publish"]
    doable += ["end"] * 4 * bool(open_groups) + ["ready"] * 2 * bool(complete) + ["drop"] * bool(running or done)
    doable += ["form"] * bool(done) + ["acknowledge"] * (model.trained < model.k) + ["late"] * bool(late)
    return globals()[f"_{draw.choice(doable)}"](model, draw, open_groups, complete, late)


def _admit(model, draw, *_):
    group = len(model.groups)
    again = sorted(model.waiting.elements())
    prompt = draw.choice(again) if again and draw.random() < 0.7 else f"p{group}"
    model.waiting -= Counter([prompt])
    members = draw.randint(1, 4)
    model.groups[group] = ["running", prompt, members, 0, model.version]
    return admitted(group, prompt, members=members, birth=model.version)


def _publish(model, draw, *_):
    offered = draw.randint(0, model.trained)
    model.version = max(model.version, offered)
    return Published(0.0, offered, ("e",))


def _end(model, draw, open_groups, *_):
    group = draw.choice(open_groups)
    if draw.random() < 0.2:
        return lost(group, final=False)
    model.groups[group][3] += 1
    if draw.random() < 0.3:
        return lost(group)
    model.sampled += 5
    return finished(group)


def _ready(model, draw, _, complete, *__):
    group = draw.choice(complete)
    model.groups[group][0] = "ready"
    return ready(group, zero=draw.random() < 0.5)


def _drop(model, draw, *_):
    group = draw.choice(model.of("running") + model.of("ready"))
    requeued = draw.random() < 0.5
    model.groups[group][0] = "dropped"
    model.waiting[model.groups[group][1]] += requeued
    return dropped(group, draw.choice(CAUSES), requeued=requeued)


def _form(model, draw, *_):
    done = model.of("ready")
    chosen = draw.sample(done, draw.randint(1, len(done)))
    for group in chosen:
        model.groups[group][0] = "batched"
    model.k += 1
    return BatchFormed(0.0, model.k - 1, tuple(chosen), 0.5)


def _acknowledge(model, draw, *_):
    k = draw.randint(model.trained, model.k - 1)
    model.trained = k + 1
    return BatchAcknowledged(0.0, k)


def _late(model, draw, _, __, late):
    group = draw.choice(late)
    event = draw.choice([finished(group), lost(group), lost(group, final=False), ready(group), dropped(group, requeued=True)])
    model.sampled += 5 * isinstance(event, Finished)
    return event


HISTORIES = st.tuples(st.integers(0, 2**32), st.integers(0, 120))


def history(seed, length):
    draw, model = random.Random(seed), Model()
    return [step(model, draw) for _ in range(length)], model


@given(HISTORIES)
def test_the_ledger_agrees_with_a_naive_model_after_every_event(drawn):
    seed, length = drawn
    draw, model, ledger = random.Random(seed), Model(), Ledger()
    for _ in range(length):
        apply(ledger, step(model, draw))
        model.check(ledger)


@given(HISTORIES)
def test_replaying_a_history_gives_the_same_ledger(drawn):
    events, model = history(*drawn)
    ledger = fold(*events)
    assert ledger == fold(*events)
    model.check(ledger)


@given(HISTORIES)
def test_once_every_live_group_is_forgotten_nothing_is_left_reserved(drawn):
    events, _ = history(*drawn)
    ledger = fold(*events)
    for group in [*ledger.running, *ledger.ready]:
        apply(ledger, dropped(group))
    assert (ledger.running, ledger.ready, ledger.rollouts_in_flight) == ({}, {}, 0)


@given(HISTORIES, st.data())
def test_a_rollout_that_becomes_durable_after_its_group_was_dropped_changes_no_set(drawn, data):
    """The journal may hold `Finished` before `GroupDropped` where the live ledger applied them the other way round."""
    events, _ = history(*drawn)
    ends = [index for index, event in enumerate(events) if isinstance(event, GroupDropped)]
    if not ends:
        return
    index = data.draw(st.sampled_from(ends))
    group = events[index].group
    before = fold(*events[:index])
    if group not in before.running or before.running[group].ended == before.running[group].members:
        return
    assert fold(*events[:index], finished(group), events[index]) == fold(*events[:index], events[index], finished(group))


@given(HISTORIES)
def test_late_events_of_forgotten_groups_change_only_figures_for_reports(drawn):
    events, _ = history(*drawn)
    ledger, untouched = fold(*events), fold(*events)
    gone = [group for group in range(ledger.next_group) if group not in ledger.running and group not in ledger.ready]
    for group in gone:
        for event in (finished(group), lost(group), ready(group, zero=True), dropped(group, requeued=True)):
            apply(ledger, event)
    ledger.sampled_tokens, ledger.lost, ledger.last_loss = untouched.sampled_tokens, untouched.lost, untouched.last_loss
    assert ledger == untouched
