"""A real vLLM takes new weights while 32 requests are in flight: each token is held against the version that its stamp names.

The other version is far outside of what is let pass, so that a wrong stamp cannot hide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from pushing import WRONG_DIFFERENCE, Fleet, assert_right, differences, fleet, prompts, spans_of
from real_server import RealServer

from headway.adapters.engines.generation import Generated
from headway.types import Checkpoint

REQUESTS = 32
PROMPT_TOKENS = 48
MAX_TOKENS = 400
BEFORE = REQUESTS * 20  # tokens that are written before the weights change
STALE_DIFFERENCE = 0.05  # mean, of new weights on a context of the old ones


async def _written_across(
    it: Fleet, versions: list[Checkpoint], change: Callable[[], Awaitable[None]] | None = None
) -> list[tuple[list[int], Generated]]:
    """Push version 1, let 32 generations begin, push version 2 under them (or `change` the weights otherwise)."""
    await it.push(versions[1])
    asked = prompts(REQUESTS, PROMPT_TOKENS)
    written = await it.across(asked, change or (lambda: it.push(versions[2])), max_tokens=MAX_TOKENS, sampled=BEFORE)
    return list(zip(asked, written, strict=True))


def _load_over_the_cache(server: RealServer, checkpoint: Checkpoint) -> None:
    """Load weights by the server's own routes, and keep what it has cached of the old ones."""
    for path, body in (
        ("/pause?mode=keep&clear_cache=false", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": checkpoint.directory}}),
        ("/update_weight_version", {"new_version": checkpoint.label}),
        ("/resume", None),
    ):
        status, answer = server.call("POST", path, body)
        assert status == 200, answer


def _straddling(written: list[tuple[list[int], Generated]]) -> int:
    for _, generated in written:
        assert len(generated.token_ids) == MAX_TOKENS
        assert generated.finish == "length"
    return sum([version for _, _, version in spans_of(generated)] == [1, 2] for _, generated in written)


@pytest.mark.parametrize(
    "settings",
    [{"weight_sync": "in_flight"}, {"weight_sync": "abort_resume"}, {"recompute_kv": False}],
    ids=["in_flight", "abort_resume", "kept"],
)
async def test_each_token_is_of_the_version_that_its_span_names(
    server: RealServer, versions: list[Checkpoint], settings: dict[str, Any]
) -> None:
    """With a kept cache, too: the server cannot drop old prefixes while requests hold them, so that these are computed anew."""
    async with fleet(server.url, **settings) as it:
        written = await _written_across(it, versions)
    assert _straddling(written) == REQUESTS  # none began anew, none lost its budget
    assert_right(np.concatenate([differences(prompt, generated, versions) for prompt, generated in written]))
    swapped = [differences(prompt, generated, versions, lambda version: 3 - version) for prompt, generated in written]
    assert min(found.mean() for found in swapped) > WRONG_DIFFERENCE


async def test_with_wait_no_generation_has_tokens_of_two_versions(server: RealServer, versions: list[Checkpoint]) -> None:
    async with fleet(server.url, weight_sync="wait") as it:
        written = await _written_across(it, versions)
        after = await it.generate(written[0][0], max_tokens=MAX_TOKENS)
    assert _straddling(written) == 0
    assert {generated.spans[0] for _, generated in written} == {(0, 1)}
    assert after.spans == [(0, 2)]
    written.append((written[0][0], after))
    assert_right(np.concatenate([differences(prompt, generated, versions) for prompt, generated in written]))


async def test_without_recomputing_the_cache_tokens_after_the_switch_are_the_new_versions_on_the_old_ones_context(
    server: RealServer, versions: list[Checkpoint]
) -> None:
    """By the raw routes that recompute_kv = false asks for: stamps are right, but no forward has the log-probabilities after the switch."""
    async with fleet(server.url) as it:
        written = await _written_across(it, versions, lambda: asyncio.to_thread(_load_over_the_cache, server, versions[2]))
    assert _straddling(written) == REQUESTS
    switch = [generated.spans[1][0] for _, generated in written]
    found = [differences(prompt, generated, versions) for prompt, generated in written]
    assert_right(np.concatenate([part[:at] for part, at in zip(found, switch, strict=True)]))
    assert np.concatenate([part[at : at + 20] for part, at in zip(found, switch, strict=True)]).mean() > STALE_DIFFERENCE


async def test_a_long_prompt_is_not_answered_from_a_prefix_cache_of_the_old_weights(server: RealServer, versions: list[Checkpoint]) -> None:
    [prompt] = prompts(1, 512)
    for settings in ({}, {"recompute_kv": False}, {"weight_sync": "wait"}, {"weight_sync": "abort_resume"}):
        async with fleet(server.url, **settings) as it:
            await it.push(versions[1])
            await it.generate(prompt, max_tokens=8)
            hits = server.cached_tokens()
            again = await it.generate(prompt, max_tokens=8)
            assert server.cached_tokens() - hits >= 256  # there is a cache to be stale
            assert_right(differences(prompt, again, versions))
            await it.push(versions[2])
            new = await it.generate(prompt, max_tokens=8)
        assert new.spans == [(0, 2)]
        assert_right(differences(prompt, new, versions))


async def test_what_the_cache_would_have_done_had_it_been_kept(server: RealServer, versions: list[Checkpoint]) -> None:
    """The same by the server's raw routes, nothing reset: the test above can fail."""
    [prompt] = prompts(1, 512)
    async with fleet(server.url) as it:
        await it.push(versions[1])
        await it.generate(prompt, max_tokens=8)
        await asyncio.to_thread(_load_over_the_cache, server, versions[2])
        stale = await it.generate(prompt, max_tokens=8)
    assert stale.spans == [(0, 2)]
    assert differences(prompt, stale, versions).mean() > STALE_DIFFERENCE
