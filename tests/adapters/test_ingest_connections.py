"""Clients of the ingest server that connect and do not come to the point: they are closed in time, and never take the last place."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from ingest_service import Service, body, until

FOR_EVER = 600.0  # a limit that is not met in a test
HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def connected(service, *sent):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(service.address["url"].rpartition(":")[2]))
    for piece in sent:
        writer.write(piece)
    try:
        yield reader, writer
    finally:
        writer.close()


async def is_closed(reader):
    """Wait until the server has closed a connection; return what it said before."""
    async with asyncio.timeout(120):
        with suppress(ConnectionResetError):
            return await reader.read()
    return b""


async def answered(reader):
    async with asyncio.timeout(120):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
    return int(head.split()[1])


def head_of_post(service, data):
    lines = [f"Authorization: Bearer {service.address['token']}", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join(["POST /v1/rollouts HTTP/1.1", "Host: x", *lines, "", ""]).encode()


@pytest.mark.parametrize("sent", [b"", b"P", HEALTH[:-1]])
async def test_who_does_not_send_a_whole_header_is_closed_and_who_is_quick_is_not(tmp_path, sent):
    service = Service(tmp_path, header_seconds=3.0)
    data = json.dumps(body()).encode()
    async with service.listening(), AsyncExitStack() as stack:
        idle = await stack.enter_async_context(connected(service, HEALTH))
        slow_body = await stack.enter_async_context(connected(service, head_of_post(service, data)))
        assert await answered(idle[0]) == 200
        async with connected(service, sent) as (reader, _):
            assert await is_closed(reader) == b""
        idle[1].write(HEALTH)  # their headers came in time: an idle connection, and one whose body is on its way
        assert await answered(idle[0]) == 200
        slow_body[1].write(data)
        assert await answered(slow_body[0]) == 202


async def test_a_header_that_comes_byte_by_byte_gets_no_more_time(tmp_path):
    service = Service(tmp_path, header_seconds=0.1)
    async with service.listening(), connected(service) as (reader, writer), asyncio.timeout(120):
        closed = asyncio.create_task(is_closed(reader))
        writer.write(b"GET /v1/health HTTP/1.1\r\nX: ")
        while not closed.done():  # a byte whenever the server has had time for the last one
            with suppress(ConnectionError):
                writer.write(b"x")
                await writer.drain()
            await asyncio.wait([closed], timeout=0.01)
        assert closed.result() == b""  # as long as bytes come: it would never be, if each gave it more time


async def test_when_all_places_are_taken_who_has_waited_longest_for_a_header_makes_room(tmp_path):
    service = Service(tmp_path, header_seconds=FOR_EVER, connections=4)
    data = json.dumps(body()).encode()
    async with service.listening(), AsyncExitStack() as stack:
        busy = await stack.enter_async_context(connected(service, head_of_post(service, data), data[:1]))
        await until(lambda: service.server.held == 1)
        silent = [await stack.enter_async_context(connected(service, HEALTH[:-1])) for _ in range(12)]
        for reader, _ in silent[:9]:
            assert await is_closed(reader) == b""
        for reader, writer in silent[9:]:
            writer.write(HEALTH[-1:])
            assert await answered(reader) == 200
        assert (await service.post(body()))[0] == 202
        busy[1].write(data[1:])
        assert await answered(busy[0]) == 202


async def test_when_every_place_is_busy_newcomers_are_closed_and_what_is_under_way_is_taken(tmp_path):
    service = Service(tmp_path, header_seconds=FOR_EVER, connections=2)
    data = json.dumps(body()).encode()
    async with service.listening(), AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(connected(service, head_of_post(service, data), data[:1])) for _ in range(2)]
        await until(lambda: service.server.held == 2)
        for _ in range(5):
            async with connected(service, HEALTH) as (reader, _):
                assert await is_closed(reader) == b""
        for reader, writer in busy:
            writer.write(data[1:])
            assert await answered(reader) == 202
        assert (await service.post(body()))[0] == 429  # newcomers are heard again; it is the run that has no slack left
