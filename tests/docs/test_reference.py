"""The reference pages name what a run writes."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from headway.events import AnyEvent
from headway.formats.batch import DTYPES, BatchFacts, assemble
from headway.formats.manifest import Manifest
from headway.formats.parquet import record_table
from headway.formats.rollout import encode_samples
from headway.formats.run_directory import RunInfo
from headway.settings import EvalSection, RolloutSection, RunSection
from headway.sim.run import WorldSettings, simulate
from headway.types import Admission, Batch, Cause, Prompt, ReadyGroup, Rollout, Sample

DOCS = Path(__file__).parents[2] / "docs"


def words(page: str) -> set[str]:
    """Return everything that a page sets as code; in "`a_mean`, `_max`" the second stands for `a_max`."""
    found: set[str] = set()
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        stem = ""
        for word in re.findall(r"`([^`]+)`", line):
            if not word.startswith("_"):
                stem = word
            found.add(stem.rpartition("_")[0] + word if word.startswith("_") else word)
    return found


def small_batch() -> Batch:
    """Return a batch of one group of two rollouts, one token sampled in each."""
    mask = np.array([False, True])
    start, version = np.zeros(1, np.int32), np.zeros(1, np.int32)
    sample = Sample(np.arange(2, dtype=np.int32), mask, mask, np.where(mask, np.float32(-1), np.float32(0)), start, version)
    payload = encode_samples([sample])
    rollouts = tuple(
        Rollout(0, i, 0, "p", "guess", float(i), {}, "stop", 1, 0.0, 1.0, "engine-0", {}, 1, 2, 1, 0, 0, payload) for i in range(2)
    )
    return Batch(0, (ReadyGroup(Admission(0, Prompt("p", 0, {}), 2, 0), rollouts, (-1.0, 1.0)),), 2, "mask", 1.0)


def test_every_key_of_a_batchs_row_is_explained():
    assert set(assemble(small_batch()).metrics) <= words("reference/metrics.md")


def test_every_key_of_the_other_rows_is_explained():
    result = simulate(
        WorldSettings(eval_prompts=2),
        RolloutSection(groups_per_batch=2, group_size=2, max_concurrent=16, max_staleness=1),
        RunSection(steps=3),
        evaluation=EvalSection(every=2, prompts="eval"),
    )
    explained = words("reference/metrics.md")
    for stream in ("pipeline", "eval"):
        assert result.rows[stream]
        assert set().union(*result.rows[stream]) <= explained


def test_every_field_that_a_run_writes_is_explained():
    explained = words("reference/formats.md")
    for event in get_args(AnyEvent):
        assert event.__struct_config__.tag in explained
        assert {field.name for field in msgspec.structs.fields(event)} - {"time"} <= explained
    for struct in (RunInfo, Manifest, BatchFacts):
        assert {field.name for field in msgspec.structs.fields(struct)} - {"extra"} <= explained
    assembled = assemble(small_batch())
    table = record_table(assembled.records, assembled.trained, assembled.drop_causes)
    assert set(table.column_names) <= explained
    assert {field.name for field in table.schema.field("samples").type.value_type} <= explained


def test_every_array_and_every_cause_is_explained():
    assert set(DTYPES) <= words("how-to/bring-your-own-trainer.md")
    assert set(get_args(Cause)) <= words("glossary.md")
