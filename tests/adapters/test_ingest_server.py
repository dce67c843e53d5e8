"""The ingest server on real sockets: who may post, what is answered, and what hostile clients can do (nothing)."""

import asyncio
import json
import logging
import stat
from pathlib import Path

import aiohttp
import msgspec
import pytest
from ingest_service import SAMPLE, Service, body, until

from headway.adapters.ingest.server import HELD_BODIES
from headway.errors import ConfigError
from headway.events import BatchFormed, Draining, Finished, Ingested, Published


@pytest.fixture
def service(tmp_path):
    return Service(tmp_path)


async def test_a_posted_group_is_durable_when_it_is_answered(service):
    async with service.listening():
        status, answer, _ = await service.post(body())
        assert (status, answer) == (202, {"group": 0, "batch": 0})
        durable = [event for event in service.journal.events if isinstance(event, (Ingested, Finished))]
        assert [type(event).__name__ for event in durable] == ["Ingested", "Finished", "Finished"]
        rollout = await service.journal.read(durable[1].reference)
        assert (rollout.source, rollout.prompt_id, rollout.started, rollout.finished) == ("external", "posted", 1.5, 1.5)
        assert service.taken == ["posted"]
        assert service.ledger.promised == {0: 1}


async def test_msgpack_is_taken_too_and_what_the_sink_cannot_use_has_no_batch(service):
    async with service.listening():
        packed = msgspec.msgpack.encode(body("unusable"))
        for content_type in ("application/msgpack", "application/x-msgpack"):
            status, answer, _ = await service.post(data=packed, content_type=content_type)
            assert (status, answer["batch"]) == (202, None)


async def test_many_groups_go_over_one_connection(service):
    async with service.listening(), service.client(**{"Content-Type": "application/json"}) as session:
        for n in range(2):
            async with session.post("/v1/rollouts", data=json.dumps(body())) as answer:
                assert (answer.status, await answer.json()) == (202, {"group": n, "batch": 0})


async def test_without_slack_the_answer_is_429_with_retry_after(service):
    async with service.listening():
        for _ in range(2):
            await service.post(body())
        status, answer, headers = await service.post(body())
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "no batch can spare a place" in answer["error"]
        assert service.ingest.counts == {
            "ingest_submitted": 3,
            "ingest_accepted": 2,
            "ingest_refused": {"no slack": 1},
            "ingest_in_line": 2,
        }


async def test_before_the_start_and_at_the_end_the_answer_is_503_and_health_says_so(tmp_path):
    service = Service(tmp_path, published=False)

    async def health():
        async with aiohttp.ClientSession(service.address["url"]) as session, session.get("/v1/health") as answer:
            return answer.status, (await answer.json())["status"]

    async with service.listening():
        status, _, headers = await service.post(body())
        assert (status, headers["Retry-After"]) == (503, "1")
        assert await health() == (503, "not started")
        service.recorder.record(Published(0.0, 0, ("e",)))
        assert await health() == (200, "ready")
        service.recorder.record(Draining(0.0, "asked to"))
        status, answer, headers = await service.post(body())
        assert (status, "Retry-After" in headers) == (503, False)
        assert "ending" in answer["error"]
        assert await health() == (503, "ending")


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Bearer x", "Basic {token}", "{token}", "Bearer {token}0", "Bearer é"])
async def test_without_the_token_nothing_is_read_or_taken(service, given):
    async with service.listening():
        header = given and given.format(token=service.address["token"])
        status, answer, headers = await service.post(body(), Authorization=header)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "token" in answer["error"].lower()
        assert service.address["token"] not in answer["error"]
        assert not service.taken
        assert service.ingest.counts["ingest_refused"] == {"unauthorized": 1}


async def test_the_token_is_new_for_each_run_for_its_user_only_and_gone_at_the_end(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    tokens = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        service = Service(tmp_path / name)
        async with service.listening():
            assert stat.S_IMODE(service.address_file.stat().st_mode) == 0o600
            assert service.address["url"].startswith("http://127.0.0.1:")
            tokens.add(service.address["token"])
            await service.post({"name": 1})
            await service.post(body())
        assert [*(tmp_path / name).iterdir()] == []
    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)
    assert not any(token in caplog.text for token in tokens)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/rollouts", 405),
        ("PUT", "/v1/rollouts", 405),
        ("POST", "/v1/health", 405),
        ("POST", "/v1/rollout", 404),
        ("GET", "/", 404),
    ],
)
async def test_what_is_not_served_is_told(service, method, path, status):
    async with service.listening(), service.client() as session, session.request(method, path) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]
        assert ("Allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\x00\xff", "malformed"),
        (b"null", "Expected `object`"),
        (b"[" * 4000, "Expected `object`"),
        (b'{"name": "a", "rollouts": [{"metadata": {"a": ' + b"[" * 4000, "recursion"),
        (json.dumps(body(rollouts=[{"reward": float("nan"), "samples": [SAMPLE]}])).encode(), "malformed"),
        (json.dumps(body(rollouts=[{"reward": 1.0, "samples": [SAMPLE | {"logprobs": [0.0]}]}])).encode(), "samples[0].logprobs has 1"),
        (json.dumps(body(rollouts=[{"reward": 1.0, "samples": [SAMPLE | {"token_ids": [1, 2, 50]}]}])).encode(), "ids are 0 to 49"),
        (json.dumps(body(extra=1)).encode(), "unknown field `extra`"),
    ],
)
async def test_what_cannot_be_trained_on_is_400_with_one_line_that_names_the_field(service, data, what):
    async with service.listening():
        status, answer, _ = await service.post(data=data)
        assert status == 400
        assert what in answer["error"]
        assert "\n" not in answer["error"]
        assert service.ingest.counts["ingest_refused"] == {"invalid": 1}
        assert (await service.post(body()))[0] == 202  # and the next is taken as if nothing had been


@pytest.mark.parametrize("headers", [{"content_type": "text/plain"}, {"content_type": ""}, {"Content-Encoding": "gzip"}])
async def test_other_forms_are_415(service, headers):
    async with service.listening():
        assert (await service.post(body(), **headers))[0] == 415


async def test_a_body_that_is_declared_too_large_is_refused_unread(service):
    async with service.listening():
        answer = await service.raw(token=service.address["token"], lines=["Content-Length: 5000", "Expect: 100-continue"])
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"ingest.max_request_bytes (4096)" in answer
        assert service.ingest.counts["ingest_refused"] == {"too large": 1}


async def test_a_body_that_grows_too_large_is_cut_while_it_is_read(service):
    async with service.listening():
        chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
        sent = [chunk] * 5 + [b"0\r\n\r\n"]
        answer = await service.raw(*sent, token=service.address["token"], lines=["Transfer-Encoding: chunked"])
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert service.server.held == 0


async def test_a_client_that_asks_first_is_told_to_go_on(service):
    async with service.listening():
        data = json.dumps(body()).encode()
        lines = [f"Content-Length: {len(data)}", "Expect: 100-continue"]
        answer = await service.raw(data, token=service.address["token"], lines=lines)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 ")
        answer = await service.raw(token="wrong", lines=lines)
        assert answer.startswith(b"HTTP/1.1 401 ")


async def test_a_body_that_comes_byte_by_byte_is_taken(service):
    async with service.listening():
        data = json.dumps(body()).encode()
        pieces = [data[i : i + 20] for i in range(0, len(data), 20)]
        answer = await service.raw(*pieces, token=service.address["token"], lines=[f"Content-Length: {len(data)}"])
        assert b" 202 " in answer


async def test_a_body_that_does_not_come_is_given_up(tmp_path):
    service = Service(tmp_path, body_seconds=0.05)
    async with service.listening():
        answer = await service.raw(b"{", token=service.address["token"], lines=["Content-Length: 100"])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert service.ingest.counts["ingest_refused"] == {"incomplete": 1}
        assert service.server.held == 0


@pytest.mark.parametrize("lines", [["Content-Length: 100"], ["Transfer-Encoding: chunked"]])
async def test_who_goes_away_in_the_middle_leaves_nothing(service, lines):
    async with service.listening():
        _, writer = await asyncio.open_connection("127.0.0.1", int(service.address["url"].rpartition(":")[2]))
        head = ["POST /v1/rollouts HTTP/1.1", "Host: x", "Content-Type: application/json", *lines]
        writer.write("\r\n".join([*head, f"Authorization: Bearer {service.address['token']}"]).encode() + b'\r\n\r\n5\r\n{"nam')
        await until(lambda: service.server.held)
        writer.close()
        await until(lambda: not service.server.held)
        assert service.ingest.counts["ingest_refused"] == {"incomplete": 1}
        assert (await service.post(body()))[0] == 202


@pytest.mark.parametrize(
    "garbage", [b"\r\n\r\n", b"GET\r\n\r\n", b"POST /v1/rollouts HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"\x16\x03\x01" * 99]
)
async def test_what_is_no_http_is_no_matter(service, garbage):
    async with service.listening():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(service.address["url"].rpartition(":")[2]))
        writer.write(garbage)
        writer.write_eof()
        async with asyncio.timeout(120):
            await reader.read()
        writer.close()
        assert (await service.post(body()))[0] == 202


async def test_all_bodies_together_hold_no_more_than_a_few_of_the_largest(service):
    async with service.listening():
        token = service.address["token"]
        part = b" " * 4000
        stuck = [asyncio.create_task(service.raw(part, token=token, lines=["Content-Length: 4096"])) for _ in range(HELD_BODIES)]
        await until(lambda: service.server.held == HELD_BODIES * len(part))
        status, _, headers = await service.post(data=b" " * 4000)
        assert (status, headers["Retry-After"]) == (429, "1")
        for task in stuck:
            task.cancel()


async def test_an_address_that_cannot_be_had_is_told_in_one_line(tmp_path):
    taken = Service(tmp_path)
    async with taken.listening():
        port = int(taken.address["url"].rpartition(":")[2])
        (tmp_path / "second").mkdir()
        second = Service(tmp_path / "second", port=port)
        with pytest.raises(ConfigError, match=rf"ingest\.host, ingest\.port: 127\.0\.0\.1:{port} cannot be listened on"):
            await second.server.run()
        assert not second.address_file.exists()


async def test_listening_beyond_this_machine_is_said_in_the_log(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    service = Service(tmp_path, host="0.0.0.0")
    async with service.listening():
        assert "beyond this machine" in caplog.text


async def test_ipv6_loopback_is_loopback(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    service = Service(tmp_path, host="::1")
    try:
        async with service.listening():
            assert service.address["url"].startswith("http://[::1]:")
            assert (await service.post(body()))[0] == 202
    except* ConfigError:
        pytest.skip("this machine has no IPv6")
    assert "beyond this machine" not in caplog.text


def documented_client():
    """Return the `post` of docs/how-to/replay-and-ingest.md, and the group that it shows."""
    page = (Path(__file__).parents[2] / "docs/how-to/replay-and-ingest.md").read_text()
    code, group = (page.partition(f"```{language}\n")[2].partition("```")[0] for language in ("python", "json"))
    names = {}
    exec(code, names)
    return names["post"], json.loads(group)


async def test_the_documented_client_posts_the_documented_group_and_comes_again_when_told(tmp_path):
    service = Service(tmp_path)
    post, group = documented_client()
    async with service.listening():
        for _ in range(2):
            assert await asyncio.to_thread(post, tmp_path, group) == {"group": service.ledger.next_group - 1, "batch": 0}
        third = asyncio.create_task(asyncio.to_thread(post, tmp_path, group))
        await until(lambda: service.ingest.counts["ingest_refused"] == {"no slack": 1})
        service.recorder.record(BatchFormed(0.0, 0, (0, 1), 0.5))
        service.recorder.record(Published(0.0, 1, ("e",)))
        assert await third == {"group": 2, "batch": 1}
        with pytest.raises(ValueError, match="unknown field `extra`"):
            await asyncio.to_thread(post, tmp_path, {**group, "extra": 1})
        service.recorder.record(Draining(0.0, "asked to"))
        assert await asyncio.to_thread(post, tmp_path, group) is None
