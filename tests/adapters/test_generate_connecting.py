"""Connections are opened a few at a time per server; the time limit, and a server that accepts none, count once for all that wait."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from headway.adapters.engines.connecting import MOST_CONNECTING, PatientConnector
from headway.adapters.engines.http import HttpPool

MANY = 4 * MOST_CONNECTING


class Scripted(PatientConnector):
    """Opens nothing before `gate`; then fails by `error`, or connects. `full`: as many connect as may."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(keep_seconds=4.0)
        self.gate, self.full = asyncio.Event(), asyncio.Event()
        self.error = error
        self.now = self.most = self.attempts = 0

    async def _in_time(self, req, traces, timeout):
        self.attempts += 1
        self.now += 1
        self.most = max(self.most, self.now)
        if self.attempts == MOST_CONNECTING:
            self.full.set()
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return await super()._in_time(req, traces, timeout)
        finally:
            self.now -= 1


async def _serve(arrived: list[int], together: asyncio.Event) -> tuple[web.ServerRunner, str]:
    async def answer(request):
        arrived.append(1)
        if len(arrived) == MANY:
            together.set()
        await together.wait()
        return web.Response(text="{}")

    runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/"


async def _get(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as response:
        return response.status


async def test_requests_that_begin_together_are_all_in_flight_at_once_having_connected_a_few_at_a_time():
    arrived: list[int] = []
    runner, url = await _serve(arrived, asyncio.Event())
    connector = Scripted(None)
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            sent = [asyncio.create_task(_get(session, url)) for _ in range(MANY)]
            await connector.full.wait()
            connector.gate.set()
            assert await asyncio.gather(*sent) == [200] * MANY  # answered when all have arrived
        assert connector.most == MOST_CONNECTING
    finally:
        await runner.cleanup()


async def test_no_request_fails_when_many_more_begin_together_than_are_connected_at_once():
    arrived: list[int] = []
    runner, url = await _serve(arrived, asyncio.Event())
    pool = HttpPool()
    try:
        answers = await asyncio.gather(*(pool.request("GET", url) for _ in range(MANY)))
        assert [answer.status for answer in answers] == [200] * MANY
    finally:
        await pool.close()
        await runner.cleanup()


@pytest.mark.parametrize("error", [TimeoutError(), None], ids=["silent", "refusing"])
async def test_whoever_waits_for_a_server_that_accepts_nobody_fails_with_the_first_and_not_in_turn(error):
    connector = Scripted(error)
    async with aiohttp.ClientSession(connector=connector) as session:
        sent = [asyncio.create_task(_get(session, "http://127.0.0.1:1/")) for _ in range(MANY)]
        await connector.full.wait()
        connector.gate.set()
        failures = await asyncio.gather(*sent, return_exceptions=True)
        kind = aiohttp.ConnectionTimeoutError if error is not None else aiohttp.ClientConnectorError
        assert {type(failure) for failure in failures} == {kind}
        assert connector.attempts == MOST_CONNECTING
        with pytest.raises(kind):  # turns are free again
            await _get(session, "http://127.0.0.1:1/")
        assert connector.attempts == MOST_CONNECTING + 1


async def test_a_request_that_is_cancelled_hands_its_turn_on():
    arrived: list[int] = []
    together = asyncio.Event()
    together.set()
    runner, url = await _serve(arrived, together)
    connector = Scripted(None)
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            sent = [asyncio.create_task(_get(session, url)) for _ in range(MOST_CONNECTING + 2)]
            await connector.full.wait()
            for task in [*sent[:MOST_CONNECTING], sent[-1]]:  # all that connect, and one that waits
                task.cancel()
            connector.gate.set()
            assert await sent[MOST_CONNECTING] == 200
            assert await asyncio.gather(*(_get(session, url) for _ in range(3))) == [200] * 3
    finally:
        await runner.cleanup()
