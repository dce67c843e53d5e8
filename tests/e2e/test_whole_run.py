"""A run of headway's own engine and trainer, from its first to its last file."""

import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from real_runs import Ended, audit

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

COLUMNS = {
    *("prompt_id", "group_id", "rollout_id", "environment", "source", "attempt", "birth", "reward", "rewards", "advantage", "trained"),
    *("drop_cause", "finish", "turns", "started", "finished", "engine", "metadata", "samples"),
}


def test_it_reaches_its_target_says_where_it_is_and_leaves_nothing_running(whole_run: Ended):
    assert whole_run.code == 0, whole_run.err
    assert whole_run.out == f"all 8 steps are trained. The run is in {whole_run.run.directory}\n"
    assert (whole_run.recorded["code"], whole_run.recorded["cause"]) == (0, "all 8 steps are trained")


def test_the_bound_holds_and_the_books_close(whole_run: Ended):
    ledger = audit(whole_run, max_staleness=2)
    assert (ledger.trained, ledger.version) == (8, 8)
    assert [row["loss"] is not None for row in whole_run.rows("metrics.jsonl")] == [True] * 8


def test_a_worker_that_was_killed_was_replaced_though_version_0_was_retired(whole_run: Ended):
    assert not (whole_run.run.directory / "weights" / "00000000").exists()
    assert "was ended by SIGKILL" in (whole_run.run.directory / "events.log").read_text()
    audit(
        whole_run, max_staleness=2
    )  # whether rollouts were in flight at that instant or not: the books close, and the run reached its end
    assert len(whole_run.rows("metrics.jsonl")) == 8


def test_rollouts_are_read_by_pyarrow_with_the_columns_of_the_record(whole_run: Ended):
    table = pq.read_table(whole_run.run.directory / "batches" / "00000003" / "rollouts.parquet")
    assert set(table.column_names) >= COLUMNS
    assert table.num_rows == 12


def test_every_published_version_is_loaded_by_transformers(whole_run: Ended):
    weights = sorted((whole_run.run.directory / "weights").iterdir())
    assert [path.name for path in weights][-1] == "00000008"
    code = f"""if True:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        torch.set_num_threads(1)
        for path in {[str(path) for path in weights]}:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForCausalLM.from_pretrained(path)
            ids = tokenizer("<bos>?", add_special_tokens=False, return_tensors="pt").input_ids
            assert ids.shape == (1, 2), ids
            assert model(ids).logits.isfinite().all()
        """
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr


def test_evaluations_are_of_one_version_each_from_the_first_to_the_last(whole_run: Ended):
    rows = whole_run.rows("eval.jsonl")
    assert (rows[0]["version"], rows[-1]["version"]) == (0, 8)
    assert all(row["mixed"] or row["version_min"] == row["version_max"] == row["version"] for row in rows)
