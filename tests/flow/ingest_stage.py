"""Ingest on a stage: groups as somebody outside offers them, one of which nobody can use, and a sink that takes what has a place."""

from contextlib import asynccontextmanager

import msgspec
from doubles import Spine, beside, rollout, turns

from headway.events import GroupDropped, Ingested, Ready
from headway.flow.gate import CapacityGate
from headway.flow.ingest import Ingest
from headway.formats.offered import UNPLACED, OfferedGroup
from headway.rules.admission import GateLimits

UNUSABLE = "unusable"


def group(name="posted", *, members=2, source="external"):
    made = (rollout(UNPLACED, member, reward=float(member), head=-1) for member in range(members))
    return OfferedGroup(name, source, tuple(msgspec.structs.replace(one, source=source, prompt_id=name) for one in made))


class Stage:
    """Ingest between a real gate, a real recorder and a sink that takes everything but what is called unusable."""

    def __init__(self, *, b=4, replayed_groups=2, ahead=0.0, replayed=None, limits=None, **spine):
        self.spine = Spine(**spine)
        self.limits = limits or GateLimits(
            groups_per_batch=b, group_size=2, max_concurrent=1000, steps_ahead=ahead, steps=1000, replayed_groups=replayed_groups
        )
        self.gate = CapacityGate(self.limits, watch=self.spine.watch, record=self.spine.record, clock=self.spine.clock)
        self.sink = []
        self.ingest = Ingest(
            place=self.gate.admit_replayed,
            commit=self.spine.payloads.commit,
            take=self.take,
            watch=self.spine.watch,
            replayed=replayed,
            replayed_at_once=self.limits.replayed_groups,
        )

    def take(self, finished):
        name = finished.admission.prompt.id
        if name == UNUSABLE:
            self.spine.record(GroupDropped(self.spine.clock(), finished.admission.group, "filtered", "", 0))
        else:
            self.sink.append(finished)
            self.spine.record(Ready(self.spine.clock(), finished.admission.group, zero_advantage=False))

    @asynccontextmanager
    async def running(self):
        async with beside(self.ingest.run(), self.spine.recorder.run()) as tasks:
            await turns()
            yield tasks

    def balance(self):
        """Return counts; every one of `submitted` is accounted for, and the gate was asked for exactly those accepted."""
        counts = self.ingest.counts
        assert counts["ingest_accepted"] == len(self.spine.of(Ingested))
        return counts["ingest_submitted"], counts["ingest_accepted"], counts["ingest_refused"], counts["ingest_in_line"]
