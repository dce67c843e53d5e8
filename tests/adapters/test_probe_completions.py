"""The probe at a vLLM without --enable-scale-out: what the model suggests to sample by must not be taken for what the weights say."""

import json

from aiohttp import web

from headway.adapters.engines.vllm.admin import VllmEngine
from headway.settings import EngineSection


async def probed(**asked):
    """Return the completions request that a probe sends."""
    seen = []

    async def answer(http: web.Request) -> web.Response:
        if http.path != "/v1/completions":
            return web.Response(status=403)
        seen.append(json.loads(await http.read()))
        return web.json_response({"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}}]})

    application = web.Application()
    application.router.add_route("POST", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine = VllmEngine("engine-0", f"http://127.0.0.1:{runner.addresses[0][1]}", EngineSection())
    try:
        await engine._sample([1, 2], temperature=1.0, max_tokens=1, request_id="probe-1", adapter="", **asked)
    finally:
        await engine.close()
        await runner.cleanup()
    return seen[0]


async def test_it_says_how_to_sample_and_leaves_nothing_to_the_model():
    body = await probed(likeliest=False)
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {key: body[key] for key in neutral} == neutral


async def test_the_likeliest_token_is_asked_for_by_top_k():
    assert (await probed(likeliest=True))["top_k"] == 1
