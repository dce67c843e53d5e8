"""Invariants 1 and 5: nothing vanishes, and what is trained is trained once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from headway.events import Admitted, Finished, RolloutDropped
from headway.rules.ledger import Ledger, apply
from headway.testing.check.books import Books, counted
from headway.testing.check.evidence import Evidence
from headway.testing.log import Entry


def accounting(found: Evidence) -> Iterator[str]:
    """Groups opened == shipped + dropped (by cause) + ready + in flight, by number and not only in sum; the same for their rollouts.

    By the journal, counted anew and by the ledger's fold, which must agree. A group is in one place at a time, and only in one batch; its
    members have each finished, been lost with a cause, or run. Batches on disk hold the very groups and rollouts that the journal says, and
    metrics.jsonl has the same counts. Where the run ended well, nothing is in flight, and every attempt that the environment began and
    ended has an end in the journal, unless its group was dropped.
    """
    books = counted(found.events)
    yield from books.problems
    yield from _folded(found, books)
    if found.ended is not None and not found.was_killed and found.ended.get("code") == 0:
        for place in ("running", "interrupted"):
            if books.at[place]:
                yield f"{books.at[place]} groups are still {place} after the run has ended"
    yield from _on_disk(found, books)
    yield from _rows(found)
    yield from _attempts(found, books)


def _folded(found: Evidence, books: Books) -> Iterator[str]:
    ledger = Ledger()
    try:
        for event in found.events:
            apply(ledger, event)
    except ValueError as error:
        yield f"the journal contradicts itself: {error}"
        return
    pairs = [
        ("groups in flight", len(ledger.running), books.at["running"]),
        ("ready groups", len(ledger.ready), books.at["ready"]),
        ("interrupted groups", len(ledger.interrupted), books.at["interrupted"]),
        ("groups admitted", ledger.admitted, sum(group.live for group in books.groups.values())),
        (
            "rollouts in flight",
            ledger.rollouts_in_flight,
            sum(g.members - len(g.finished.keys() | g.lost.keys()) for g in books.groups.values() if g.place == "running"),
        ),
    ]
    for what, by_ledger, by_count in pairs:
        if by_ledger != by_count:
            yield f"{what}: {by_ledger} by the ledger, {by_count} counted in the journal"


def _on_disk(found: Evidence, books: Books) -> Iterator[str]:
    for k, batch in found.batches.items():
        formed = books.batches.get(k)
        if formed is None:
            if not found.was_killed:
                yield f"batch {k} lies on disk, and no BatchFormed of the journal stands for it"
            continue
        by_disk: dict[int, set[int]] = {}
        for row in batch.rows:
            by_disk.setdefault(int(row["group_id"]), set()).add(int(row["member"]))
        if set(formed) != set(by_disk):
            yield f"batch {k} has groups {sorted(by_disk)} on disk and {sorted(formed)} in the journal"
        for number, members in by_disk.items():
            group = books.groups.get(number)
            if group is None or not group.live:
                continue
            kept = group.finished.keys() - group.lost.keys()
            if members != kept:
                yield f"group {number} of batch {k} has members {sorted(members)} on disk and {sorted(kept)} in the journal"


def _rows(found: Evidence) -> Iterator[str]:
    for row in found.jsonl("metrics.jsonl"):
        batch = found.batches.get(row.get("batch", -1))
        if batch is None:
            continue
        counts = {"groups": len({each["group_id"] for each in batch.rows}), "rollouts": len(batch.rows)}
        for name, count in counts.items():
            if row.get(name) != count:
                yield f"metrics.jsonl says {name} {row.get(name)} of batch {batch.k}, on disk are {count}"


def _attempts(found: Evidence, books: Books) -> Iterator[str]:
    """Attempts that the environment saw through, against the journal; those of a process that did not end well may have no end there."""
    if found.environment_log is None or found.was_killed or books.resumes or (found.ended or {}).get("code") != 0:
        return
    ended = {(event.group, event.member, event.attempt) for event in found.events if isinstance(event, Finished | RolloutDropped)}
    begun: set[tuple[int, int, int]] = set()
    for entry in found.environment_log:
        if entry.get("purpose") != "train" or entry["what"] not in {"reset", "close"}:
            continue
        name = entry["group"], entry["member"], entry["attempt"]
        if entry["what"] == "reset":
            begun.add(name)
        elif name in begun and name not in ended:
            group = books.groups.get(entry["group"])
            if group is None or group.place != "dropped":
                yield f"attempt {name[2]} of rollout {name[0]}-{name[1]} was played to its end, and the journal has no end of it"
    for event in found.events:
        if isinstance(event, Finished) and event.group in books.groups and books.groups[event.group].live:
            name = event.group, event.member, event.attempt
            if name not in begun:
                yield f"rollout {name[0]}-{name[1]} finished in attempt {name[2]}, which the environment has never begun"


def trained_once(found: Evidence) -> Iterator[str]:
    """A prompt is trained once per epoch, across kills and resumes, and each batch by exactly one published line of versions.

    The line is the trainer's: what it consumed and then published, undone where it took up an older version. Within a lineage no batch id
    is consumed twice into it, and a version is published once. A batch that came twice in one lineage came byte-identical, unless it was
    dissolved between. Where the prompts were exhausted and the run ended well, none was lost: each (prompt, epoch) that was admitted was
    trained, dropped for good, or is left over.
    """
    books = counted(found.events)
    line = _trained_line(found, books)
    yield from line.problems
    seen: dict[tuple[str, int], int] = {}
    for k in sorted(line.batches):
        for number in books.batches.get(k, ()):
            group = books.groups.get(number)
            if group is None or not group.live:
                continue
            prompt = group.prompt_id, group.epoch
            if prompt in seen:
                yield f"prompt {prompt[0]} was trained in batch {seen[prompt]} and in batch {k}, both of epoch {prompt[1]}"
            seen[prompt] = k
        if (sent := line.batches[k]) and (formed := books.batches.get(k)) and set(sent) != set(formed):
            yield f"batch {k} was trained with groups {sorted(sent)}, and the journal formed it of {sorted(formed)}"
    yield from _all_trained(found, books)


class _Line:
    """The batches behind the newest version, with the groups that the trainer saw in each (empty: nobody has told)."""

    def __init__(self) -> None:
        self.batches: dict[int, tuple[int, ...]] = {}
        self.problems: list[str] = []


def _trained_line(found: Evidence, books: Books) -> _Line:
    line = _Line()
    if found.trainer_log is None:
        line.batches = dict.fromkeys((k for k in books.batches if k < books.trained), ())
        return line
    pending: dict[int, Entry] = {}
    shas: dict[tuple[str, int], str] = {}
    published: dict[str, int] = {}
    for entry in found.trainer_log:
        match entry["what"]:
            case "started":  # with a version that its last process made and did not live to tell, or with an older one than it had made
                version = entry["version"]
                line.batches |= {k: tuple(each["groups"]) for k, each in pending.items() if k < version}
                line.batches = {k: groups for k, groups in line.batches.items() if k < version}
                published = {lineage: min(newest, version) for lineage, newest in published.items()}
                pending = {}
            case "consumed":
                k, key = entry["k"], (entry["lineage"], entry["k"])
                if k in pending or k in line.batches:
                    line.problems.append(f"batch {k} was consumed twice by one line of versions")
                if shas.setdefault(key, entry["sha"]) != entry["sha"] and not books.resumes:
                    line.problems.append(f"batch {k} came to the trainer twice, with different bytes")
                pending[k] = entry
            case "published":
                version, lineage = entry["version"], str(entry["lineage"])
                if version <= published.get(lineage, -1):
                    line.problems.append(f"version {version} of lineage {lineage} was published twice")
                published[lineage] = version
                line.batches |= {k: tuple(each["groups"]) for k, each in pending.items() if k < version}
                pending = {k: each for k, each in pending.items() if k >= version}
    if (gaps := [f"{a} and {b}" for a, b in pairwise(sorted(line.batches)) if b != a + 1]) and line.batches:
        line.problems.append(f"no batch between {', '.join(gaps)} was trained")
    return line


def _all_trained(found: Evidence, books: Books) -> Iterator[str]:
    """When a run ended because its prompts did, no prompt waits to be tried again."""
    if not books.exhausted or found.was_killed or (found.ended or {}).get("code") != 0:
        return
    last: dict[tuple[str, int], Any] = {}
    for event in found.events:
        if isinstance(event, Admitted):
            last[event.prompt_id, event.epoch] = books.groups[event.group]  # it was counted there
    waiting = Counter(
        group.cause
        for (prompt, _), group in last.items()
        if group.place == "dropped" and group.requeued and prompt not in books.gone_prompts and group.cause != "cancelled"
    )
    for cause, count in sorted(waiting.items()):
        yield f"{count} prompts were to be tried again ({cause}) and never were, though the run says that it has had them all"
