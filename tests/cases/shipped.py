"""What a run has shipped, as a test looks at it: rows of the batches on disk, and what the journal says became of the rest."""

from collections import Counter

from headway.adapters.journal.reader import read_events
from headway.events import GroupDropped, RolloutDropped
from headway.testing.check.evidence import Evidence, versions_of


def batches_of(stage):
    """Every whole batch on disk, by k: `rows` (rollouts.parquet), `arrays` (batch.safetensors)."""
    return Evidence(stage.run).batches


def rows_of(stage, **wanted):
    """Rows of rollouts.parquet of all batches whose columns are as `wanted`, each with its batch's `k`."""
    rows = [{"k": k, **row} for k, batch in sorted(batches_of(stage).items()) for row in batch.rows]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def sampled_of(sample):
    """The ids of a sample that the policy wrote."""
    return [token for token, written in zip(sample["token_ids"], sample["sampled_mask"], strict=True) if written]


def stamped(sample):
    """(version, in the loss) of every sampled token."""
    in_loss = [mask for mask, written in zip(sample["loss_mask"], sample["sampled_mask"], strict=True) if written]
    return list(zip(versions_of(sample).tolist(), in_loss, strict=True))


def events_of(stage, *kinds):
    """The journal's events of these kinds."""
    return [event for event in read_events(stage.run / "state", run_id=stage.info()["id"]) if isinstance(event, kinds)]


def lost_of(stage, group):
    """Members of a group that were lost for good: {member: cause}."""
    return {event.member: event.cause for event in events_of(stage, RolloutDropped) if event.group == group and event.final}


def dropped_groups(stage):
    """{group: (cause, requeued)}."""
    return {event.group: (event.cause, event.requeued) for event in events_of(stage, GroupDropped)}


def failed_attempts(stage, group):
    """(member, cause) of the attempts of a group that failed, counted."""
    return Counter((event.member, event.cause) for event in events_of(stage, RolloutDropped) if event.group == group)
