"""What is not believed of an engine, of either kind: labels that lie, other weights, raw log-probabilities, no answer to a probe."""

import pytest
from synced_engines import KINDS, checkpoint, served, sync

from headway.errors import EngineFailed
from headway.testing import EngineScript, Reply, Rule
from headway.types import SamplingParams


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize(
    ("kind", "lie"),
    [
        ("vllm", Rule(match={"path": "/update_weight_version", "version": "abc-5"}, do=Reply(json={"success": True}))),
        ("sglang", Rule(match={"path": "/update_weights_from_disk", "version": "abc-5"}, do=Reply(json={"success": True}))),
    ],
)
async def test_an_engine_that_keeps_the_old_label_is_not_believed(tmp_path, kind, lie):
    async with served(kind, lie) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        with pytest.raises(EngineFailed, match='says it serves "abc-4" after it was given "abc-5"'):
            await sync(admin, checkpoint(tmp_path, 5))
        await admin.abandon()
        assert not server.paused


async def test_an_engine_that_has_the_label_and_other_weights_is_found_out_by_its_probe(tmp_path):
    lie = Rule(match={"path": "/collective_rpc", "weights": "5"}, do=Reply(json={"results": [None]}))
    async with served("vllm", lie) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        with pytest.raises(EngineFailed, match=r"serves other weights than .*/5: after the probe's prompt, token \d+ has log-probability"):
            await sync(admin, checkpoint(tmp_path, 5))
        assert server.weights.label == "abc-5"
        await admin.abandon()
        assert (await admin.label(), server.paused) == ("unknown", False), "or it would be taken for one that has been loaded"
        await sync(admin, checkpoint(tmp_path, 6))


async def test_without_a_probe_in_the_checkpoint_the_label_has_to_do(tmp_path, kind):
    async with served(kind) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4, probe=False))
        await sync(admin, checkpoint(tmp_path, 5, probe=False))
        assert len(server.log.of("probed")) == 2, "by which its log-probabilities were judged"


@pytest.mark.parametrize(("kind", "flag"), [("vllm", "--logprobs-mode processed_logprobs"), ("sglang", "SGLANG_RETURN_ORIGINAL_LOGPROB")])
async def test_raw_log_probabilities_are_refused_with_the_flag_to_set(tmp_path, kind, flag):
    async with served(kind, default=Reply(logprobs="raw")) as (server, admin):
        with pytest.raises(EngineFailed, match=flag):
            await sync(admin, checkpoint(tmp_path, 4))
        await admin.abandon()
        assert not server.paused


async def test_an_engine_is_heard_again_after_a_restart(tmp_path):
    async with served("vllm") as (server, admin):
        weights = checkpoint(tmp_path, 4)
        await sync(admin, weights)
        await server.kill()
        server.default = Reply(logprobs="raw")  # started anew, and without the flag
        await server.start()
        assert await admin.label() == "default"
        with pytest.raises(EngineFailed, match="processed_logprobs"):
            await sync(admin, weights)


async def test_an_engine_that_forgets_what_top_k_cut_off_is_refused_where_that_is_asked_for(tmp_path):
    async with served("sglang", sampling=SamplingParams(top_k=5)) as (_, admin):
        with pytest.raises(EngineFailed, match=r"set rollout\.top_k = 0"):
            await sync(admin, checkpoint(tmp_path, 4))


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(status=400, text="no such id"), "answered 400: no such id; so it cannot be checked"),
        (Reply(logprobs="fewer"), "no usable answer"),
        (Reply(logprobs="absent"), "no usable answer"),
        (Reply(ids=()), "sampled nothing"),
        (Reply(text="<html>"), "no usable answer"),
    ],
)
async def test_an_engine_that_cannot_be_probed_fails_by_name(tmp_path, kind, reply, says):
    async with served(kind, Rule(match={"purpose": "probe"}, do=reply)) as (_, admin):
        with pytest.raises(EngineFailed, match=says):
            await sync(admin, checkpoint(tmp_path, 4))


async def test_a_vllm_without_the_generate_route_is_probed_by_completions(tmp_path):
    async with served("vllm", script=EngineScript(generate_route=False)) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        assert {entry["path"] for entry in server.log.of("probed")} == {"/v1/completions"}
