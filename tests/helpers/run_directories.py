"""Run directories of simulated runs: the files that a real run leaves behind, written by the same formats, for those who read them."""

import asyncio
import json
from pathlib import Path

from headway.adapters.exporters.jsonl import JsonlExporter
from headway.adapters.journal.sqlite import SqliteJournal
from headway.config.toml import resolved
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, save_run_info
from headway.protocols import Entry
from headway.settings import Config, EnvironmentSection, PromptsSection, RolloutSection, RunSection

RUN_ID = "0123456789abcdef"


def run_info(*, ended=True):
    return RunInfo(
        id=RUN_ID,
        lineage="sim",
        headway_version="0",
        engine_version="sim",
        trainer_version="sim",
        seed=0,
        created=0.0,
        ended=Ending(0, "done", 1.0) if ended else None,
    )


def write_run(path: Path, result, rollout: RolloutSection, *, ended=True, counted=True, state="") -> Path:
    """Write what a simulated run would have left in `path`. `counted`: its engines said what they have sampled."""
    run = RunDirectory.create(path)
    try:
        save_run_info(run, run_info(ended=ended))
        config = Config(
            run=RunSection(name="simulated", state_directory=state),
            rollout=rollout,
            prompts=PromptsSection(source="world:prompts"),
            environment=EnvironmentSection(entry="world:attempt"),
        )
        run.config.write_text(resolved(config))
        write_journal(Path(state) if state else run.state, result.events)
        exporter = JsonlExporter(run)
        for row in result.rows["metrics"]:
            exporter.export("metrics", row)
        for row in result.rows["pipeline"]:
            exporter.export("pipeline", row if counted else {**row, "engine_sampled_tokens": None})
        exporter.close()
    finally:
        run.close()
    return path


def write_journal(directory: Path, events) -> None:
    """Write a history as a run's journal."""

    async def write() -> None:
        journal = SqliteJournal(directory, run_id=RUN_ID)
        await journal.append([Entry(event) for event in events])
        await journal.close()

    asyncio.run(write())


def strictly(text):
    """Read JSON that holds no NaN and no infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)
