"""A run directory as a process leaves it: journal, batches, weights and rows of real formats, without any process having run."""

import json
from contextlib import asynccontextmanager

from small_rollouts import small_batch, small_rollout

from headway.adapters.batch_store import DirectoryBatchStore
from headway.adapters.journal.sqlite import SqliteJournal
from headway.config import resolved, state_path
from headway.events import Admitted, BatchAcknowledged, BatchFormed, Published, Ready
from headway.flow.durable import finished_event
from headway.formats.manifest import publish, staging, write_manifest
from headway.formats.run_directory import RunDirectory, RunInfo, load_run_info, save_run_info
from headway.launch.build import Inputs
from headway.launch.resume import Resume
from headway.protocols import Entry
from headway.rules.advantages import ADVANTAGES
from headway.settings import (
    Config,
    EnvironmentSection,
    InitSection,
    ModelSection,
    PromptsSection,
    RolloutSection,
    RunSection,
    TrainerSection,
)
from headway.sim.prompts import ListPrompts

ID, LINE = "0123456789abcdef", "aaaaaa"


def config_of(path, *, steps=10, run=None, trainer="directory", **rollout):
    return Config(
        run=RunSection(name="r", directory=str(path), steps=steps, **(run or {})),
        model=ModelSection(init=InitSection()),
        rollout=RolloutSection(**{"groups_per_batch": 2, "group_size": 2, "max_staleness": 2, **rollout}),
        prompts=PromptsSection(source="world:prompts"),
        environment=EnvironmentSection(entry="world:attempt"),
        trainer=TrainerSection(kind=trainer),
    )


def info_of(**more):
    facts = {"headway_version": "1", "engine_version": "e1", "trainer_version": "t1", "seed": 0, "created": 5.0}
    return RunInfo(**{"id": ID, "lineage": LINE, "lineages": {LINE: None}, **facts, **more})


class Disk:
    """A run directory with `trained` versions and `formed` batches of two groups each, and then some complete groups."""

    def __init__(self, path, *, trainer="directory"):
        self.path = path
        self.config = config_of(path, trainer=trainer)
        self.run = RunDirectory.create(path)
        self.groups = 0
        self.batches = 0

    async def write(self, *, formed=0, trained=0, loose=0, info=None, stored=True):
        self.run.config.write_text(resolved(self.config))
        save_run_info(self.run, info or info_of())
        self.weights(0)
        async with self.journal() as journal:
            await journal.append([Entry(Published(1.0, 0, ("engine-0",)))])
            for k in range(formed):
                await self.batch(journal, k, min(k, trained), stored=stored)
                if k < trained:
                    self.trained(k)
                    await journal.append([Entry(BatchAcknowledged(9.0, k)), Entry(Published(9.0, k + 1, ("engine-0",)))])
            for _ in range(loose):
                await self.group(journal, version=min(formed, trained))
        return self

    @asynccontextmanager
    async def journal(self):
        journal = SqliteJournal(state_path(self.config), run_id=ID)
        yield journal
        await journal.close()

    async def group(self, journal, *, version):
        number, self.groups = self.groups, self.groups + 1
        rollouts = [small_rollout(number, member, version=version) for member in range(2)]
        await journal.append(
            [
                Entry(Admitted(2.0, number, f"prompt-{number}", 0, 2, version)),
                *(Entry(finished_event(rollout, 3.0), rollout) for rollout in rollouts),
                Entry(Ready(4.0, number, zero_advantage=False)),
            ]
        )
        return number

    async def batch(self, journal, k, version, *, stored=True, lineage=LINE):
        groups = [await self.group(journal, version=version) for _ in range(2)]
        await journal.append([Entry(BatchFormed(5.0, k, tuple(groups), 0.5))])
        if stored:
            await DirectoryBatchStore(self.run, lineage).write(small_batch(k, version=version))

    def weights(self, version, *, lineage=LINE):
        self._directory(self.run.weight(version), "weights", version, lineage)
        if version:
            self._directory(self.run.trainer_state(version), "trainer", version, lineage)

    def _directory(self, final, kind, number, lineage):
        temporary = staging(final)
        (temporary / "model.bin").write_bytes(b"weights " * 100)
        write_manifest(temporary, kind=kind, lineage=lineage, id=number)
        publish(temporary, final)

    def trained(self, k, *, row=True):
        """What the trainer and the metrics loop leave behind of batch k."""
        self.weights(k + 1)
        self.run.trainer_metric(k).write_text(json.dumps({"loss": k / 10}))
        if row:
            with self.run.metrics_jsonl.open("a") as file:
                file.write(json.dumps({"batch": k, "reward_mean": 0.5, "loss": k / 10}) + "\n")

    @asynccontextmanager
    async def resuming(self, config=None, *, now=None):
        """Own the directory as the next process does; yield (resume, history, journal)."""
        self.run.close()
        run = RunDirectory.take_up(self.path)
        assert run is not None
        config = config or self.config
        try:
            async with self.journal() as journal:
                resume = Resume(config, run, load_run_info(run), now or info_of(id="new", lineage="unused", created=99.0))
                yield resume, await resume.history(journal), journal
        finally:
            run.close()

    async def taken_up(self, config=None, *, prompts=None, now=None):
        async with self.resuming(config, now=now) as (resume, history, journal):
            return await resume.take_up(journal, history, inputs(prompts))

    async def events(self):
        async with self.journal() as journal:
            return list(journal.replay())

    def rows(self):
        return [json.loads(line) for line in self.run.metrics_jsonl.read_text().splitlines()]


def inputs(prompts=None):
    """What the user gives to such a run."""
    return Inputs(prompts=prompts or ListPrompts(50, epochs=1), eval_prompts=(), advantages=ADVANTAGES["grpo"], keep=None)
