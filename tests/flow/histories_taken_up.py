"""Histories taken up again from a journal in memory, under limits and prompts of a small run."""

from headway.flow.take_up import StoredBatch, read_history, take_up
from headway.protocols import Entry
from headway.rules.admission import GateLimits
from headway.rules.lineage import line_of
from headway.sim.journal import SimJournal
from headway.sim.prompts import ListPrompts

MEMBERS = 2
FIRST = "first"


def limits(mode="mask", **more):
    values = {"groups_per_batch": 2, "group_size": MEMBERS, "max_concurrent": 100, "steps_ahead": 2.0, "steps": 100, "max_staleness": 2}
    return GateLimits(**{**values, "on_stale": mode, **more})


def centred(rewards):
    return rewards - rewards.mean()


def whole(*ks, lineage=FIRST):
    found = {k: StoredBatch(lineage=lineage, max_staleness=2, on_stale="mask", row={"batch": k}) for k in ks}
    return found.get


async def journal_of(events):
    journal = SimJournal()
    await journal.append([Entry(event) for event in events])
    return journal


async def taken_up(events, *, version=0, lineages=None, lineage=FIRST, mode="mask", prompts=None, stored=None, within=None, **more):
    journal = await journal_of(events)
    history = await read_history(journal, lineage=FIRST)
    resumption = await take_up(
        journal,
        history,
        version=version,
        line=line_of(lineage, lineages or {}),
        limits=within or limits(mode),
        prompts=prompts or ListPrompts(20, epochs=2, shuffle=False),
        stored=stored or whole(),
        advantages=more.pop("advantages", centred),
        clock=lambda: 1000.0,
        **more,
    )
    return resumption, journal.events[len(events) :]
