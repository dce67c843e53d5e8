"""The HTTP client's parser on every kind of response, however it is cut; and its connections."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.adapters.engines.http import HttpPool
from headway.adapters.engines.http_response import MAX_BODY_BYTES, BadResponse, ConnectionFailed, Response, ResponseParser

BODY = b'{"x": "\r\n\r\n"}'


def sized(body: bytes = BODY, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\ncontent-length: " + str(len(body)).encode() + b"\r\n" + headers + b"\r\n" + body


def chunked(*parts: bytes, trailer: bytes = b"") -> bytes:
    chunks = b"".join(f"{len(part):X};extension=1\r\n".encode() + part + b"\r\n" for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


RESPONSES = [
    (sized(), Response(200, BODY, "", True)),
    (sized(b""), Response(200, b"", "", True)),
    (sized(b"no", b"429 Too Many Requests", b"Retry-After:  7 \r\nConnection: close\r\n"), Response(429, b"no", "7", False)),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + sized(), Response(200, BODY, "", True)),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", Response(200, b"ok", "", False)),
    (b"HTTP/1.1 204 No Content\r\n\r\n", Response(204, b"", "", True)),
    (chunked(b"ab", b"cde" * 100), Response(200, b"ab" + b"cde" * 100, "", True)),
    (chunked(), Response(200, b"", "", True)),
    (chunked(b"ab\r\n", trailer=b"Checksum: 1\r\n"), Response(200, b"ab\r\n", "", True)),
]


@given(st.sampled_from(RESPONSES), st.lists(st.integers(1, 40), max_size=60))
def test_a_response_is_read_however_it_is_cut(case, cuts):
    data, expected = case
    parser = ResponseParser()
    for cut in cuts:
        piece, data = data[:cut], data[cut:]
        if data and piece:
            assert parser.feed(piece) is None
        else:
            data = piece
            break
    assert parser.feed(data) == expected


def test_a_body_without_a_length_ends_with_its_connection():
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 200 OK\r\n\r\nhalf") is None
    assert parser.feed(b" and half") is None
    assert parser.end() == Response(200, b"half and half", "", False)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200", sized()[:-1], chunked(b"ab")[:-3]])
def test_a_connection_that_ends_early_brings_no_response(data):
    parser = ResponseParser()
    assert parser.feed(data) is None
    assert parser.end() is None


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 70_000,
        b"x" * 70_000,
        sized() + b"more",
    ],
)
def test_what_is_no_response_is_refused(data):
    with pytest.raises(BadResponse):
        ResponseParser().feed(data)


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


async def test_a_kept_connection_that_the_server_has_closed_is_replaced_without_a_word():
    connections = []

    async def handle(number, reader, writer):
        connections.append(number)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sized(b"%d" % number))
        await reader.readuntil(b"\r\n\r\n")  # the second request on this connection is not answered
        writer.close()

    pool = HttpPool()
    async with server(handle) as url:
        assert [(await pool.request("GET", url)).body for _ in range(2)] == [b"0", b"1"]
    pool.close()


async def test_a_connection_that_breaks_within_an_answer_is_an_error():
    async def handle(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sized()[:-3])
        writer.close()

    pool = HttpPool()
    async with server(handle) as url:
        with pytest.raises(ConnectionFailed, match="broke before the answer was complete"):
            await pool.request("GET", url)


async def test_requests_carry_host_path_and_body():
    seen = []

    async def handle(number, reader, writer):
        seen.append(await reader.readexactly(len(expected)))
        writer.write(sized())

    pool = HttpPool()
    async with server(handle) as url:
        host = url.removeprefix("http://")
        expected = f"POST /a?b=c HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        await pool.request("POST", url + "/a?b=c", b"{}")
    pool.close()
    assert seen == [expected]


@pytest.mark.parametrize("url", ["ftp://x/", "localhost:80", "http://"])
async def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConnectionFailed, match="is no http"):
        await HttpPool().request("GET", url)
