"""F07: what weight syncs have cut keeps ids, masks, logprobs and versions of one length, and is masked by the version that wrote it."""

from itertools import pairwise

import msgspec
import pytest
from shipped import batches_of, rows_of, stamped

from headway.testing import Act, EngineScript, EnvironmentScript, Reply, Rule, Stage, TrainerScript, Turn

pytestmark = pytest.mark.e2e

QUICK = Reply(tokens=(10, 20), token_seconds=0.04)
LONG = range(0, 200, 4)  # groups that do not end before syncs have cut them twice
STRADDLING = [
    Rule(match={"group": group, "member": member}, nth=(1, 2), do=Reply(tokens=400, token_seconds=0.04))
    for group in LONG
    for member in range(2)
]
ENGINE = EngineScript(rules=(*STRADDLING, Rule(match={"group": [*LONG]}, do=Reply(tokens=4))), default=QUICK)
STEADY = TrainerScript(step_seconds=0.4)  # so that something is written under each version
ONE_TURN = EnvironmentScript(prompts=100, default=Act(turns=(Turn(max_tokens=512),)))
CUT = {
    "run.steps": 12,
    "rollout.groups_per_batch": 1,
    "rollout.group_size": 2,
    "rollout.max_concurrent": 16,
    "rollout.max_tokens": 512,
    "rollout.steps_ahead": 0,
    "rollout.max_staleness": 0,
    "rollout.enforce": "ship",
    "rollout.max_lead": 0,
    "engine.weight_sync": "abort_resume",
    "run.max_uncovered_batches": 0,
}


def masks_of(k, arrays):
    """Per sample of batch `k`: the loss mask of what older versions wrote, and of what version `k` wrote."""
    assert len({len(arrays[name]) for name in ("token_ids", "loss_mask", "logprobs", "advantages", "versions")}) == 1
    for start, end in pairwise(arrays["sample_offsets"]):
        mask, versions = arrays["loss_mask"][start:end], arrays["versions"][start:end]
        yield mask[(versions >= 0) & (versions < k)].tolist(), mask[versions == k].tolist()


@pytest.mark.parametrize(("speaks", "on_stale"), [("vllm", "mask"), ("sglang", "mask"), ("vllm", "train")])
def test_F07_what_aborts_have_cut_is_whole_and_masked_by_the_version_that_wrote_it(tmp_path, speaks, on_stale):
    engine, settings = msgspec.structs.replace(ENGINE, speaks=speaks), {**CUT, "engine.kind": speaks, "rollout.on_stale": on_stale}
    with Stage(tmp_path, engines=[engine], environment=ONE_TURN, trainer=STEADY, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        samples = [sample for row in rows_of(stage) for sample in row["samples"]]
        for sample in samples:
            assert len({len(sample[name]) for name in ("token_ids", "sampled_mask", "loss_mask", "logprobs")}) == 1
            assert all(in_loss for _, in_loss in stamped(sample)), "the record keeps the mask as it was sampled"
        assert any(len(sample["span_version"]) > 2 for sample in samples), "cut twice"
        masks = [each for k, batch in batches_of(stage).items() for each in masks_of(k, batch.arrays)]
        straddling = [(old, last) for old, last in masks if old and (last or on_stale == "train")]
        assert straddling
        assert {mask for old, _ in straddling for mask in old} == ({0} if on_stale == "mask" else {1})
        assert {mask for _, last in masks for mask in last} == {1}
        assert (sum(row["masked_tokens"] for row in stage.rows("metrics.jsonl")) > 0) == (on_stale == "mask")
