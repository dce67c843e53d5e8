"""A run directory and its logs, at hand to be broken: what a writer that is wrong would have left, whole in every other respect."""

import asyncio
import copy
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file, save_file

from headway.adapters.journal.reader import read_events
from headway.adapters.journal.sqlite import SqliteJournal
from headway.formats.batch import RECORDS, TENSORS
from headway.formats.manifest import read_manifest, write_manifest
from headway.formats.run_directory import RunDirectory
from headway.protocols import Entry
from headway.testing import check_run, read_log


class Scene:
    """What `check_run` is given; change any of it, then `broken()` tells which invariants do not hold."""

    def __init__(self, directory, stage):
        self.directory = directory
        self.run = RunDirectory(directory)
        self.engines = [read_log(log) for log in stage.engine_logs]
        self.trainer = stage.trainer.entries()
        self.environment = stage.environment_entries()
        self.exit_code = 0

    def violations(self):
        return check_run(
            self.directory,
            engine_logs=self.engines,
            trainer_logs=[self.trainer],
            environment_logs=[self.environment],
            exit_code=self.exit_code,
        )

    def broken(self):
        return {violation.invariant for violation in self.violations()}

    # ---------------------------------------------------------------------------------------------------------------------- run.json

    @property
    def info(self):
        return json.loads(self.run.run_json.read_bytes())

    def set_info(self, **values):
        self.run.run_json.write_text(json.dumps({**self.info, **values}))

    # ----------------------------------------------------------------------------------------------------------------------- journal

    @property
    def events(self):
        return list(read_events(self.run.state, run_id=self.info["id"]))

    def set_events(self, events):
        """Write the journal anew."""
        shutil.rmtree(self.run.state)

        async def write():
            journal = SqliteJournal(self.run.state, run_id=self.info["id"])
            await journal.append([Entry(event) for event in events])
            await journal.close()

        asyncio.run(write())

    # ----------------------------------------------------------------------------------------------------------------------- batches

    def arrays(self, k):
        return {name: array.copy() for name, array in load_file(self.run.batch(k) / TENSORS).items()}

    def set_arrays(self, k, **changed):
        path = self.run.batch(k) / TENSORS
        save_file({**self.arrays(k), **changed}, path)
        self._manifest(k)

    def rows(self, k):
        return copy.deepcopy(pq.read_table(self.run.batch(k) / RECORDS).to_pylist())

    def set_rows(self, k, rows):
        path = self.run.batch(k) / RECORDS
        schema = pq.read_schema(path)
        pq.write_table(pa.Table.from_pylist(rows, schema), path)
        self._manifest(k)

    def set_facts(self, k, **facts):
        self._manifest(k, **facts)

    def _manifest(self, k, **facts):
        directory = self.run.batch(k)
        manifest = read_manifest(directory)
        write_manifest(directory, kind="batch", lineage=manifest.lineage, id=k, extra={**manifest.extra, **facts})

    # --------------------------------------------------------------------------------------------------------------------------- jsonl

    def metrics(self):
        return [json.loads(line) for line in self.run.metrics_jsonl.read_text().splitlines()]

    def set_metrics(self, rows):
        self.run.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_of(kind, events):
    """Return the first event of a kind."""
    return next(event for event in events if isinstance(event, kind))
