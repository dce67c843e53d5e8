"""The HTTP client: what an engine may answer, what it may not, and how connections are kept and given up."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from headway.adapters.engines.http import BadResponse, ConnectionFailed, HttpPool, Response

BODY = b'{"x": "\r\n\r\n"}'


def sized(body: bytes = BODY, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\ncontent-length: " + str(len(body)).encode() + b"\r\n" + headers + b"\r\n" + body


@asynccontextmanager
async def server(handle):
    """Serve by `handle(number of the connection, reader, writer)`."""
    numbers = iter(range(1000))
    writers = []

    async def connected(reader, writer):
        writers.append(writer)
        await handle(next(numbers), reader, writer)

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (sized(), Response(200, BODY, "")),
        (sized(b""), Response(200, b"", "")),
        (sized(b"no", b"429 Too Many Requests", b"Retry-After:  7 \r\nConnection: close\r\n"), Response(429, b"no", "7")),
        (sized(b"", b"302 Found", b"Location: /elsewhere\r\n"), Response(302, b"", "")),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n", Response(200, b"abcde", "")),
    ],
)
async def test_answers_are_returned_whole_whatever_their_status(answer, expected):
    async def handle(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)

    pool = HttpPool()
    async with server(handle) as url:
        assert await pool.request("GET", url) == expected
    await pool.close()


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"x" * 70_000],
)
async def test_what_is_no_response_is_refused(answer):
    async def handle(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    pool = HttpPool()
    async with server(handle) as url:
        with pytest.raises(ConnectionFailed):
            await pool.request("GET", url)
    await pool.close()


@pytest.mark.parametrize("head", [b"Content-Length: 11", b"Transfer-Encoding: chunked"])
async def test_a_body_past_the_limit_is_refused(head):
    async def handle(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = b"b\r\n" + b"x" * 11 + b"\r\n0\r\n\r\n" if b"chunked" in head else b"x" * 11
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body)

    pool = HttpPool()
    async with server(handle) as url:
        with pytest.raises(BadResponse, match="more than 10 bytes"):
            await pool.request("GET", url, most=10)
    await pool.close()


async def test_connections_are_kept_unless_a_fresh_one_is_asked_for():
    async def handle(number, reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(sized(b"%d" % number))

    pool = HttpPool()
    async with server(handle) as url:
        assert [(await pool.request("GET", url)).body for _ in range(3)] == [b"0", b"0", b"0"]
        assert (await pool.request("GET", url, fresh=True)).body == b"1"
        await pool.close()


async def test_I08_proxy_variables_are_ignored(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def handle(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sized())

    pool = HttpPool()
    async with server(handle) as url:
        assert (await pool.request("GET", url)).status == 200
    await pool.close()


async def test_400_requests_are_in_flight_at_once():
    inside = 0
    all_in = asyncio.Event()

    async def handle(number, reader, writer):
        nonlocal inside
        await reader.readuntil(b"\r\n\r\n")
        inside += 1
        if inside == 400:
            all_in.set()
        await all_in.wait()
        writer.write(sized())

    pool = HttpPool()
    async with server(handle) as url, asyncio.timeout(120):
        answers = await asyncio.gather(*(pool.request("GET", url) for _ in range(400)))
    assert {answer.status for answer in answers} == {200}
    await pool.close()


async def test_cancelling_a_request_closes_its_connection():
    asked, gone = asyncio.Event(), asyncio.Event()

    async def handle(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        if await reader.read() == b"":
            gone.set()

    pool = HttpPool()
    async with server(handle) as url, asyncio.timeout(120):
        request = asyncio.create_task(pool.request("GET", url))
        await asked.wait()
        request.cancel()
        await gone.wait()
    await pool.close()


async def test_a_connection_that_breaks_within_an_answer_is_an_error():
    async def handle(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sized()[:-3])
        writer.close()

    pool = HttpPool()
    async with server(handle) as url:
        with pytest.raises(ConnectionFailed, match="broke before the answer was complete"):
            await pool.request("GET", url)
    await pool.close()


@pytest.mark.parametrize("url", ["ftp://x/", "localhost:80", "http://"])
async def test_a_url_that_is_none_is_refused(url):
    pool = HttpPool()
    with pytest.raises(ConnectionFailed, match="is no http"):
        await pool.request("GET", url)
    await pool.close()


@pytest.mark.parametrize("fresh", [False, True])
async def test_whoever_outlives_a_closed_pool_opens_no_connection_anew(fresh):
    async def handle(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sized())

    async with server(handle) as url:
        pool = HttpPool()
        await pool.request("GET", url)
        await pool.close()
        with pytest.raises(ConnectionFailed, match="the connections are closed"):
            await pool.request("GET", url, fresh=fresh)
        await pool.close()


async def test_what_is_not_http_is_told_in_one_short_line():
    async def speak(_, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes(range(128, 256)) * 40)
        writer.close()

    pool = HttpPool()
    async with server(speak) as url:
        with pytest.raises(BadResponse, match="did not answer in HTTP") as refused:
            await pool.request("GET", url)
        await pool.close()
    said = str(refused.value)
    assert len(said) < 400
    assert "\n" not in said
