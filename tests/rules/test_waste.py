"""The waste ledger: in any history every delivered token is in exactly one row."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    Continued,
    EvalFinished,
    EvalStarted,
    Finished,
    GroupDropped,
    Ingested,
    Published,
    Ready,
    Resumed,
    RolloutDropped,
)
from headway.rules.waste import BATCH_ROWS, ROWS, waste

MEMBERS = 3


class History:
    """A history that grows step by step, and by its own simple books where each token is: one entry per token count, moved by hand."""

    def __init__(self, draw):
        self.draw = draw
        self.events = []
        self.time = 0.0
        self.running, self.ready, self.replayed = {}, {}, set()  # group -> {member: tokens}
        self.batches = []  # [k, {group: {member: tokens}}, trained]
        self.where = {}  # (group, member) or a counter -> (row, tokens)
        self.extra = 0
        self.next_group = 0
        self.cut = set()  # members of dropped groups that may still turn out to be durable
        self.fates = {}

    def record(self, kind, *fields, **more):
        self.time += 1.0
        self.events.append(kind(self.time, *fields, **more))

    def lose(self, row, tokens):
        self.extra += 1
        self.where[self.extra] = (row, tokens)

    def admit(self):
        self.record(Admitted, self.next_group, f"p{self.next_group % 3}", 0, MEMBERS, 0)
        self.running[self.next_group] = {}
        self.next_group += 1

    def ingest(self):
        group, self.next_group = self.next_group, self.next_group + 1
        self.record(Ingested, group, "old", "replay", 1, len(self.batches))
        self.record(Finished, group, 0, 0, 1.0, 50, 40, 0, 0)
        self.replayed.add(group)

    def finish(self):
        group = self.draw(st.sampled_from(sorted(self.running)))
        member = len(self.running[group])
        if member < MEMBERS:
            tokens = self.draw(st.integers(1, 100))
            self.record(Finished, group, member, 0, 1.0, tokens + 5, tokens, 0, 0)
            self.running[group][member] = tokens

    def finish_late(self):
        group, row = self.draw(st.sampled_from(sorted(self.cut)))
        self.cut.discard((group, row))
        self.record(Finished, group, MEMBERS - 1, 0, 1.0, 20, 7, 0, 0)
        self.lose(row, 7)

    def fail(self):
        group = self.draw(st.sampled_from(sorted(self.running)))
        cause = self.draw(st.sampled_from(["timeout", "environment_error", "over_length"]))
        self.record(RolloutDropped, group, MEMBERS - 1, 0, cause, "", 11, final=self.draw(st.booleans()))
        self.lose(cause if cause in ROWS else "failed", 11)

    def lose_finished(self):
        group = self.draw(st.sampled_from(sorted(self.running)))
        if self.running[group]:
            member = self.draw(st.sampled_from(sorted(self.running[group])))
            cause = self.draw(st.sampled_from(["score_error", "bad_reward", "over_length", "cancelled"]))
            tokens = self.running[group].pop(member)
            self.record(RolloutDropped, group, member, 0, cause, "", tokens, final=True, finished=True)
            self.lose(cause if cause in ROWS else "failed", tokens)
            self.running[group][member] = 0  # its place is taken

    def complete(self):
        group = self.draw(st.sampled_from(sorted(self.running)))
        self.record(Ready, group, False)
        self.ready[group] = self.running.pop(group)

    def drop(self):
        group = self.draw(st.sampled_from(sorted({**self.running, **self.ready})))
        cause = self.draw(st.sampled_from(["stale", "filtered", "zero_advantage", "incomplete", "cancelled", "over_length"]))
        was_running = group in self.running
        tokens = (self.running.pop(group) if was_running else self.ready.pop(group)).values()
        self.record(GroupDropped, group, cause, "", sum(tokens), requeued=self.draw(st.booleans()))
        self.lose(cause, sum(tokens))
        if was_running and len(tokens) < MEMBERS:
            self.cut.add((group, cause))

    def form(self):
        chosen = self.draw(st.lists(st.sampled_from(sorted(self.ready)), min_size=1, unique=True))
        taken, self.replayed = sorted(self.replayed), set()
        self.record(BatchFormed, len(self.batches), (*taken, *chosen), 0.5)
        self.batches.append([len(self.batches), {group: self.ready.pop(group) for group in chosen}, False])

    def acknowledge(self):
        batch = next(batch for batch in self.batches if not batch[2])
        batch[2] = True
        self.record(BatchAcknowledged, batch[0])
        left = sum(sum(group.values()) for group in batch[1].values())
        fates = {}
        for name in BATCH_ROWS[:-1]:
            fates[name] = self.draw(st.integers(0, left))
            left -= fates[name]
        self.fates[batch[0]] = fates | {BATCH_ROWS[-1]: left}

    def evaluate(self):
        self.record(EvalStarted, 0, 4)
        self.record(EvalFinished, 0, 4, 0, mixed=False, sampled_tokens=13)
        self.lose("evaluation", 13)

    def publish(self):
        self.record(Published, 0, ("e",), sync_engine_seconds=0.25)

    def crash(self):
        k = self.draw(st.integers(0, len(self.batches)))
        self.record(Resumed, 0, k, "line")
        for group in sorted({**self.running, **self.ready}):
            causes = ["interrupted", "lineage", "stale", None, None] if group in self.running else ["lineage", "stale", None, None, None]
            cause = self.draw(st.sampled_from(causes))
            tokens = self.running.get(group) or self.ready.get(group) or {}
            if cause is not None:
                self.record(GroupDropped, group, cause, "", sum(tokens.values()), requeued=True)
                self.lose("stale" if cause == "stale" else "lost_in_crash", sum(tokens.values()))
                self.running.pop(group, None)
                self.ready.pop(group, None)
            elif group in self.running:
                self.record(Continued, group)
        for number, groups, _ in self.batches[k:]:
            self.ready.update(groups)
            self.fates.pop(number, None)
        del self.batches[k:]

    def possible(self):
        steps = [self.admit, self.ingest, self.evaluate, self.publish, self.crash]
        steps += [self.finish, self.fail, self.lose_finished, self.complete] * bool(self.running)
        steps += [self.drop] * bool(self.running or self.ready)
        steps += [self.form] * bool(self.ready) + [self.finish_late] * bool(self.cut)
        steps += [self.acknowledge] * any(not batch[2] for batch in self.batches)
        return steps

    def rows(self):
        rows = dict.fromkeys(ROWS, 0)
        for row, tokens in self.where.values():
            rows[row] += tokens
        rows["in_flight"] += sum(sum(group.values()) for group in self.running.values())
        rows["waiting"] += sum(sum(group.values()) for group in self.ready.values())
        for k, groups, trained in self.batches:
            if trained:
                for name, count in self.fates[k].items():
                    rows[name] += count
            else:
                rows["waiting"] += sum(sum(group.values()) for group in groups.values())
        return rows


@settings(max_examples=300)
@given(st.data())
def test_every_token_is_in_exactly_one_row_in_any_history(data):
    history = History(data.draw)
    for _ in range(data.draw(st.integers(0, 40))):
        data.draw(st.sampled_from(history.possible()))()
    found = waste(history.events, history.fates)
    assert found.rows == history.rows()
    assert sum(found.rows.values()) == found.delivered
    assert sum(found.failed.values()) == found.rows["failed"]
    assert found.problems == []
    assert found.sync_engine_seconds == 0.25 * sum(isinstance(event, Published) for event in history.events)
    delivered = 0
    replayed = {event.group for event in history.events if isinstance(event, Ingested)}
    for event in history.events:
        if isinstance(event, (Finished, EvalFinished)) or (isinstance(event, RolloutDropped) and not event.finished):
            delivered += event.sampled_tokens if getattr(event, "group", None) not in replayed else 0
    assert found.delivered == delivered


def trained_batch():
    return [
        Admitted(0.0, 0, "p", 0, 1, 0),
        Finished(1.0, 0, 0, 0, 1.0, 30, 20, 0, 0),
        Ready(2.0, 0, False),
        BatchFormed(3.0, 0, (0,), 1.0),
        BatchAcknowledged(4.0, 0),
    ]


def test_what_comes_from_elsewhere_and_what_has_ended_moves_no_token():
    events: list[AnyEvent] = [
        Ingested(0.0, 0, "old", "replay", 2, 0),
        Finished(0.0, 0, 0, 0, 1.0, 50, 40, 0, 0),
        RolloutDropped(0.0, 0, 1, 0, "bad_reward", "", 40, final=True),
        Ready(0.0, 0, False),
        GroupDropped(0.0, 0, "stale", "", 40),
        Admitted(0.0, 1, "p", 0, 1, 0),
        Finished(0.0, 1, 0, 0, 1.0, 30, 20, 0, 0),
        GroupDropped(0.0, 1, "filtered", "", 20),
        RolloutDropped(0.0, 1, 0, 0, "cancelled", "", 20, final=True, finished=True),
        GroupDropped(0.0, 1, "cancelled", "", 20),
    ]
    found = waste(events, {})
    assert {name: tokens for name, tokens in found.rows.items() if tokens} == {"filtered": 20}
    assert (found.delivered, found.failed) == (20, {})


def test_a_trained_batch_without_a_row_is_not_lost_from_the_books():
    found = waste(trained_batch(), {})
    assert found.rows["not_itemised"] == found.delivered == 20
    assert found.problems == []


def test_a_row_that_counts_otherwise_than_the_journal_is_told():
    found = waste(trained_batch(), {0: {"trained": 18, "masked": 1}})
    assert found.problems == ["batch 0: the journal counts 20 sampled tokens, its row of metrics 19"]
    assert sum(found.rows.values()) == found.delivered == 20


@pytest.mark.parametrize(("counted_at", "by_then"), [((0.5,), 0), ((1.0,), 20), ((), 0)])
def test_what_was_delivered_when_the_engines_were_asked(counted_at, by_then):
    assert waste(trained_batch(), {}, counted_at).delivered_by_count == by_then


def test_each_process_has_its_own_last_count():
    events = [*trained_batch(), Resumed(10.0, 1, 1, "line"), EvalFinished(11.0, 1, 1, 0, mixed=False, sampled_tokens=5)]
    assert waste(events, {}, (1.0, 10.5)).delivered_by_count == 20
    assert waste(events, {}, (0.5, 11.0)).delivered_by_count == 5
    assert waste(events, {}, (4.0, 12.0)).delivered_by_count == 25


def test_a_history_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="group 7 finished, which was never admitted"):
        waste([Finished(0.0, 7, 0, 0, 1.0, 1, 1, 0, 0)], {})
