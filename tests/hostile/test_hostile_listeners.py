"""What listens: on loopback unless told otherwise, behind a token that is read by its owner alone and gone at the end."""

import asyncio
import json
import logging
import os
import stat

import aiohttp
import pytest
from ingest_service import Service, body, until

from headway.config.keys import KEYS
from headway.loopback import is_loopback
from headway.secrecy import ConcealingFormatter


def test_every_address_in_the_config_is_loopback_by_default():
    hosts = {path: key.default for path, key in KEYS.items() if key.name in {"host", "address", "bind"}}
    assert hosts == {"ingest.host": "127.0.0.1"}
    assert all(map(is_loopback, hosts.values()))


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
@pytest.mark.parametrize("suffix", ["", " "])
def test_what_counts_as_this_machine_alone(host, own, suffix):
    assert is_loopback(host + suffix) is (own and not suffix)


@pytest.mark.parametrize("host", ["::", "", "0", "example.org", "10.0.0.1", "localhost.example.org"])
def test_everything_else_is_beyond_this_machine(host):
    assert not is_loopback(host)


async def test_the_token_is_for_its_owner_from_its_first_byte_and_gone_at_the_end(tmp_path):
    seen = set()
    service = Service(tmp_path)
    previous = os.umask(0)  # the worst: nothing is taken away
    try:
        async with service.listening():
            for path in tmp_path.iterdir():
                seen.add((path.name, stat.S_IMODE(path.stat().st_mode)))
    finally:
        os.umask(previous)
    assert seen == {("ingest.json", 0o600)}
    assert list(tmp_path.iterdir()) == []


async def test_a_token_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "ingest.json").mkdir()
    (tmp_path / "ingest.json" / "in the way").touch()
    with pytest.raises(BaseException, match="ingest"):
        await Service(tmp_path).server.run()
    assert [path.name for path in tmp_path.iterdir()] == ["ingest.json"]


WRONG = ["", "Bearer", "Bearer ", "bearer x", "Basic eA==", "Bearer é", "Bearer " + "0" * 64, "Bearer " + "0" * 4000]


@pytest.mark.parametrize("given", WRONG)
async def test_a_wrong_token_is_refused_before_the_body_is_read_and_named_nowhere(tmp_path, given, caplog):
    service = Service(tmp_path)
    with caplog.at_level(logging.DEBUG):
        async with service.listening():
            token = service.address["token"]
            status, answer, _ = await service.post(body(), Authorization=given)
            assert status == 401
            assert service.server.held == 0
            assert token not in json.dumps(answer)
    assert all(token not in record.getMessage() for record in caplog.records)


async def test_broken_requests_with_the_right_token_leave_no_token_in_the_log(tmp_path, caplog):
    service = Service(tmp_path)
    formatter = ConcealingFormatter("%(message)s")
    with caplog.at_level(logging.DEBUG):
        async with service.listening():
            token, port = service.address["token"], int(service.address["url"].rpartition(":")[2])
            for line in (f"Authorization Bearer {token}\r\n", f"Authorization: Bearer {token}\r\nAuthor\x00: {token}\r\n", f"{token}\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\n{line}\r\n".encode())
                assert b" 400 " in await reader.readline()
                writer.close()
                await writer.wait_closed()
    assert all(token not in formatter.format(record) for record in caplog.records)


HOSTILE = [
    b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /v1/rollouts HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"POST /v1/rollouts HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
    b"POST /v1/rollouts HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/rollouts HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /v1/rollouts HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
    b"POST /v1/rollouts HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00" * 1000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST http://elsewhere/v1/rollouts HTTP/1.1\r\n\r\n",
    b"POST /v1/rollouts/../rollouts HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("request_bytes", HOSTILE, ids=range(len(HOSTILE)))
async def test_whatever_arrives_without_the_token_takes_nothing_in_and_the_server_lives_on(tmp_path, request_bytes):
    service = Service(tmp_path)
    async with service.listening():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(service.address["url"].rpartition(":")[2]))
        writer.write(request_bytes)
        writer.write_eof()
        try:
            async with asyncio.timeout(120):
                answer = await reader.read(1 << 16)
        except ConnectionError:
            answer = b""
        writer.close()
        assert b" 200 " not in answer.partition(b"\r\n")[0]
        assert b" 202 " not in answer.partition(b"\r\n")[0]
        assert service.taken == []
        assert service.server.held == 0
        status, *_ = await service.post(body())
        assert status == 202


async def test_a_client_that_sends_its_body_byte_by_byte_is_cut_off_at_the_limit(tmp_path):
    service = Service(tmp_path, body_seconds=0.2)
    async with service.listening():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(service.address["url"].rpartition(":")[2]))
        head = "POST /v1/rollouts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n"
        writer.write(f"{head}Authorization: Bearer {service.address['token']}\r\n\r\n{{".encode())
        async with asyncio.timeout(120):
            assert b" 408 " in await reader.readline()
        writer.close()
        await until(lambda: service.server.held == 0)


async def test_a_page_in_a_browser_cannot_post(tmp_path):
    """Pages of other origins send no Authorization without asking first, and are told no."""
    service = Service(tmp_path)
    asked = {"Origin": "http://evil", "Access-Control-Request-Method": "POST"}
    async with service.listening(), aiohttp.ClientSession() as session:  # noqa: SIM117
        async with session.options(service.address["url"] + "/v1/rollouts", headers=asked) as answer:
            assert answer.status == 405
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]
