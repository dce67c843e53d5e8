"""Invariants 2, 3 and 4: what a batch holds, token by token, against its own stamps and against what the engines wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.events import ConfigChanged
from headway.testing.check.evidence import Evidence, FoundBatch, versions_of
from headway.testing.log import Entry

_FLOATS = ("logprobs", "advantages")


def bound(found: Evidence) -> Iterator[str]:
    """No contributing token of batch k is staler than max_staleness or newer than k, measured token by token, the oldest included.

    By the trainer's arrays; by the stamps of rollouts.parquet, whose too old tokens must be masked in the arrays; and by the engines' logs:
    no token is stamped newer than the weights that really wrote it. With on_stale = "train" there is no upper bound. The batch's own
    max_staleness is the config's.
    """
    configured = found.setting("rollout.max_staleness")
    for k, batch in found.batches.items():
        most, train = batch.facts.get("max_staleness"), batch.facts.get("on_stale") == "train"
        if configured is not None and not train and isinstance(most, int) and most > configured and not _was_looser(found):
            yield f"batch {k} was made with max_staleness {most}, the config says {configured}"
        mask = batch.arrays["loss_mask"] == 1
        versions = batch.arrays["versions"][mask]
        staleness = k - versions[versions >= 0]
        if staleness.size and staleness.min() < 0:
            yield f"batch {k} trains on a token of version {k - int(staleness.min())}, which is newer than {k}"
        if staleness.size and not train and staleness.max() > (most or 0):
            yield f"batch {k} trains on a token of staleness {int(staleness.max())}, and max_staleness is {most}"
        if batch.facts.get("min_contributing_version") != int(versions[versions >= 0].min(initial=k)):
            yield f"batch {k}: its manifest's min_contributing_version is not that of its tokens"
        yield from _masked(batch, mask)
    for name, record, row in _written(found):
        for position, (stamp, loaded) in enumerate(zip(row, _per_token(record["loaded"]), strict=True)):
            if loaded >= 0 and stamp > loaded:
                yield f"rollout {name}: token {position} is stamped {stamp}, and weights {loaded} wrote it"
                break


def _was_looser(found: Evidence) -> bool:
    """Whether a later resume may have changed the config since: the batch was made under another."""
    return bool(found.info.get("parent")) or any(isinstance(event, ConfigChanged) for event in found.events)


def _masked(batch: FoundBatch, mask: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Tokens that may contribute by the stamps of the Parquet file, against those that do in the arrays."""
    k, most = batch.k, int(batch.facts.get("max_staleness") or 0)
    young = 0
    for row in batch.rows:
        if row["source"] != "live" or not row["trained"]:
            continue
        for sample in row["samples"]:
            try:
                versions = versions_of(sample)
            except ValueError as error:
                yield f"rollout {row['rollout_id']} of batch {k}: {error}"
                return
            in_loss = np.array(sample["loss_mask"], bool)[np.array(sample["sampled_mask"], bool)]
            fits = in_loss if batch.facts.get("on_stale") == "train" else in_loss & (versions >= k - most)
            young += int(np.count_nonzero(fits))
    live = int(np.count_nonzero(mask & (batch.arrays["versions"] >= 0)))
    if young != live:
        yield f"batch {k} trains on {live} tokens, and by the stamps of its rollouts {young} are young enough"


def fidelity(found: Evidence) -> Iterator[str]:
    """Ids, log-probabilities, masks and versions of a sample have equal lengths, and are what the engines wrote, bit for bit.

    In rollouts.parquet and in the trainer's arrays alike, which agree with each other. Of engines with a log: every sampled stretch of a
    live rollout is the answers of its attempt put together, each to the very ids that stand before it; its log-probabilities and stamps are
    those of the answers; a token that no engine wrote is not in the loss, has log-probability 0 and no version.
    """
    for batch in found.batches.values():
        yield from _lengths(batch)
        yield from _arrays_agree(batch)
    if found.engine_logs is not None:
        for name, record, stamps in _written(found):
            if record is _NOBODY:
                yield f"rollout {name} holds sampled tokens that no engine has answered with"
                continue
            labels = [_version_of(label) for label in _per_token(record["labels"])]
            if labels != list(stamps):
                yield f"rollout {name}: stamps {list(stamps)[:8]}, the engine wrote them as {labels[:8]}"


def _lengths(batch: FoundBatch) -> Iterator[str]:
    for row in batch.rows:
        for number, sample in enumerate(row["samples"]):
            who = f"sample {number} of rollout {row['rollout_id']} in batch {batch.k}"
            lengths = {name: len(sample[name]) for name in ("token_ids", "sampled_mask", "loss_mask", "logprobs")}
            if len(set(lengths.values())) != 1:
                yield f"{who} has {lengths}"
                continue
            sampled, loss = np.array(sample["sampled_mask"], bool), np.array(sample["loss_mask"], bool)
            if (loss & ~sampled).any():
                yield f"{who} has a token in the loss that was not sampled"
            if np.array(sample["logprobs"])[~sampled].any():
                yield f"{who} has a log-probability at a token that was not sampled"
            try:
                versions_of(sample)
            except ValueError as error:
                yield f"{who}: {error}"


def _arrays_agree(batch: FoundBatch) -> Iterator[str]:
    """The samples of the arrays are those of the rows they name, in order and token by token, with the versions of their stamps."""
    arrays, offsets = batch.arrays, batch.arrays["sample_offsets"]
    tokens = len(arrays["token_ids"])
    for name in ("loss_mask", "logprobs", "advantages", "versions"):
        if len(arrays[name]) != tokens:
            yield f"batch {batch.k}: {name} has {len(arrays[name])} entries for {tokens} tokens"
            return
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 1).any():
        yield f"batch {batch.k}: sample_offsets do not cut its {tokens} tokens into samples"
        return
    for start, end, place in zip(offsets, offsets[1:], arrays["sample_rollout"], strict=False):
        if place >= len(batch.rows):
            yield f"batch {batch.k}: a sample of the arrays names row {place}, and its record has {len(batch.rows)}"
            continue
        row = batch.rows[place]
        ids, logprobs = arrays["token_ids"][start:end].tolist(), arrays["logprobs"][start:end]
        same = [each for each in row["samples"] if each["token_ids"] == ids and np.array_equal(np.float32(each["logprobs"]), logprobs)]
        if not same:
            yield f"batch {batch.k}: a sample of the arrays is none of rollout {row['rollout_id']}, which it names"
        elif (arrays["loss_mask"][start:end].astype(bool) & ~np.array(same[0]["loss_mask"], bool)).any():
            yield f"batch {batch.k}: a token of rollout {row['rollout_id']} trains that was not in its loss"
        elif not any(np.array_equal(arrays["versions"][start:end], _stamped(row, each)) for each in same):
            yield f"batch {batch.k}: versions of rollout {row['rollout_id']} in the arrays are not those of its stamps"
        advantages = arrays["advantages"][start:end]
        if not np.array_equal(advantages, advantages[:1].repeat(end - start), equal_nan=True):
            yield f"batch {batch.k}: the advantage of rollout {row['rollout_id']} is not one number"


def _stamped(row: dict[str, Any], sample: dict[str, Any]) -> npt.NDArray[np.int64]:
    """Return the version of each token of a sample as arrays have it: -1 where none was sampled, and in rollouts of others."""
    sampled = np.array(sample["sampled_mask"], bool)
    stamped = np.full(len(sampled), -1)
    if row["source"] == "live":
        with suppress(ValueError):  # stamps that do not fit are told by `_lengths`
            stamped[sampled] = versions_of(sample)
    return stamped


def sane_batches(found: Evidence) -> Iterator[str]:
    """No batch that reaches a trainer is empty, all masked, or holds NaN or infinity.

    By the arrays on disk and by what the trainer says it has consumed; rewards of what trains are finite numbers too.
    """
    for k, batch in found.batches.items():
        if not len(batch.arrays["token_ids"]) or not (batch.arrays["loss_mask"] == 1).any():
            yield f"batch {k} has no token that trains"
        for name in _FLOATS:
            if not np.isfinite(batch.arrays[name]).all():
                yield f"batch {k}: {name} holds a value that is not finite"
        for row in batch.rows:
            if row["trained"] and (row["reward"] is None or not np.isfinite(row["reward"])):
                yield f"batch {k} trains on rollout {row['rollout_id']}, whose reward is {row['reward']}"
        if not any(row["trained"] for row in batch.rows):
            yield f"batch {k} has no rollout that trains"
    for entry in found.trainer_log or ():
        if entry["what"] == "consumed" and not (entry["contributing"] > 0 and entry["prompts"]):
            yield f"the trainer consumed batch {entry['k']} with nothing in it: {entry['contributing']} tokens train"


# ------------------------------------------------------------------------------------------------------------------ what the engines wrote

_NOBODY: Entry = {"labels": [], "loaded": []}


def _written(found: Evidence) -> Iterator[tuple[str, Entry, list[int]]]:
    """Yield (rollout, the engine's answer, the stamps of its tokens in the sample) for each answer that live samples are made of."""
    if found.engine_logs is None:
        return
    for batch in found.batches.values():
        for row in batch.rows:
            if row["source"] != "live":
                continue
            answers = found.answers(row["group_id"], row["member"], row["attempt"])
            for sample in row["samples"]:
                yield from _answers(row["rollout_id"], sample, answers)


def _answers(name: str, sample: dict[str, Any], answers: list[Entry]) -> Iterator[tuple[str, Entry, list[int]]]:
    try:
        versions = versions_of(sample).tolist()
    except ValueError:
        return  # told by fidelity
    ids, sampled = sample["token_ids"], sample["sampled_mask"]
    logprobs: list[float] = np.array(sample["logprobs"], np.float32).tolist()
    at = stamped = 0
    while at < len(ids):
        if not sampled[at]:
            at += 1
            continue
        found = _answer_at(ids, sampled, logprobs, at, answers)
        if found is None:
            yield name, _NOBODY, []
            return
        count = len(found["ids"])
        yield name, found, versions[stamped : stamped + count]
        at, stamped = at + count, stamped + count


def _answer_at(ids: list[int], sampled: list[bool], logprobs: list[float], at: int, answers: list[Entry]) -> Entry | None:
    """Return the answer that wrote the tokens from `at` on: the longest that fits ids, mask and log-probabilities exactly.

    Rather one under a version's label: an engine that was started anew may have written the same, which was refused, and asked for again.
    """
    fitting = [
        entry
        for entry in answers
        if entry["ids"]
        and len(entry["prompt"]) == at
        and not entry["disconnected"]
        and entry["prompt"] == ids[:at]
        and entry["ids"] == ids[at : at + len(entry["ids"])]
        and all(sampled[at : at + len(entry["ids"])])
        and entry["logprobs"] == logprobs[at : at + len(entry["ids"])]
    ]
    return max(fitting, key=lambda entry: (len(entry["ids"]), min(map(_version_of, _per_token(entry["labels"]))) >= 0), default=None)


def _version_of(label: Any) -> int:
    """Return the version that a label names; -1: none."""
    number = str(label).rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _per_token(spans: list[list[Any]]) -> list[Any]:
    return [value for value, start, end in spans for _ in range(start, end)]
