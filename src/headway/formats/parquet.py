"""`rollouts.parquet`: the rollout record, schema version 1, one row per rollout, for people and their tools.

Identity, reward and advantage, what became of it, timing, `metadata` (JSON), and `samples`, a list of structs whose token lists have equal
lengths; `loss_mask` is the mask as sampled, before any staleness. `extras` are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headway.formats.records import Records
from headway.formats.rollout import SCHEMA_VERSION
from headway.types import Cause

_REPEATING = ["prompt_id", "environment", "source", "drop_cause", "finish", "engine"]  # dictionaries of token columns would save nothing
_VALUES_AT_ONCE = 1 << 20  # a third less time than with pyarrow's 1024: a rollout's list is one value of thousands of tokens


def _lists(values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> Any:
    """Return a list array over `values`, cut into pieces of these lengths; loud when a batch outgrows 2**31 tokens."""
    offsets = np.concatenate(([0], lengths.cumsum()))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


def record_table(records: Records, trained: npt.NDArray[np.bool_], causes: Sequence[Cause | None]) -> Any:
    """Return the record as a table; `trained` and `causes` (why not) align with its rollouts."""
    rollouts, columns = records.rollouts, records.columns
    births = [group.admission.birth for group in records.batch.groups]
    samples = pa.StructArray.from_arrays(
        [
            _lists(columns.token_ids, records.tokens),
            _lists(columns.sampled, records.tokens),
            _lists(columns.loss, records.tokens),
            _lists(columns.logprobs, records.tokens),
            _lists(columns.span_start, np.array(columns.spans)),
            _lists(columns.span_version, np.array(columns.spans)),
            pa.array(records.policies, pa.string()),
        ],
        names=["token_ids", "sampled_mask", "loss_mask", "logprobs", "span_start", "span_version", "policy_id"],
    )
    per_rollout = np.concatenate(([0], np.bincount(records.rollout).cumsum()))
    return pa.table(
        {
            "prompt_id": pa.array([r.prompt_id for r in rollouts], pa.string()),
            "group_id": pa.array([r.group for r in rollouts], pa.int64()),
            "rollout_id": pa.array([f"{r.group}-{r.member}" for r in rollouts], pa.string()),
            "member": pa.array([r.member for r in rollouts], pa.int32()),
            "environment": pa.array([r.environment for r in rollouts], pa.string()),
            "source": pa.array([r.source for r in rollouts], pa.string()),
            "attempt": pa.array([r.attempt for r in rollouts], pa.int32()),
            "birth": pa.array([births[i] for i in records.group], pa.int64()),
            "reward": pa.array([r.reward for r in rollouts], pa.float64()),
            "rewards": pa.array([list(r.rewards.items()) for r in rollouts], pa.map_(pa.string(), pa.float64())),
            "advantage": pa.array(records.advantage),
            "trained": pa.array(trained),
            "drop_cause": pa.array(list(causes), pa.string()),
            "finish": pa.array([r.finish for r in rollouts], pa.string()),
            "turns": pa.array([r.turns for r in rollouts], pa.int32()),
            "started": pa.array([r.started for r in rollouts], pa.float64()),
            "finished": pa.array([r.finished for r in rollouts], pa.float64()),
            "engine": pa.array([r.engine for r in rollouts], pa.string()),
            "metadata": pa.array([msgspec.json.encode(r.metadata).decode() for r in rollouts], pa.string()),
            "samples": pa.ListArray.from_arrays(pa.array(per_rollout, pa.int32()), samples),
        }
    ).replace_schema_metadata({"headway.rollout_schema": str(SCHEMA_VERSION)})


def write_records(path: Path, records: Records, trained: npt.NDArray[np.bool_], causes: Sequence[Cause | None]) -> None:
    """Write the record of a batch to `path`."""
    table = record_table(records, trained, causes)
    pq.write_table(table, path, use_dictionary=_REPEATING, write_batch_size=_VALUES_AT_ONCE)  # type: ignore[arg-type]  # stubs forget lists
