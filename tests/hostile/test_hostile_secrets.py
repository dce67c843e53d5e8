"""Keys and logins: used, and told nowhere: not in errors, logs, the kept config, URLs that are stored with rollouts, or tracebacks."""

import asyncio
import base64
import logging
import os
import traceback
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.adapters.engines.credentials import KEY, LOGINS, Credentials, handed_down, logins
from headway.adapters.engines.http import ConnectionFailed, HttpPool
from headway.adapters.engines.vllm.admin import VllmEngine
from headway.config import check_world, load_config, resolved
from headway.errors import ConfigError, EngineFailed, HeadwayError, StorageError
from headway.launch.access import engine_access
from headway.secrecy import ConcealingFormatter, concealed, keep_secret, without_login
from headway.settings import EngineSection

PASSWORD = "pa55-w0rd-of-nobody"
URL = f"http://nobody:{PASSWORD}@127.0.0.1:9"
CONFIG = """
[model]
init = {architecture = "qwen3"}
[prompts]
source = "prompts.jsonl"
[environment]
entry = "guess:attempt"
[engine]
"""


@pytest.fixture
def config(tmp_path):
    def write(lines):
        file = tmp_path / "run.toml"
        file.write_text(CONFIG + lines)
        return file

    return write


@given(st.text(alphabet=st.characters(exclude_characters="/?#\"'<>@ ", exclude_categories=["C", "Z"]), min_size=1))
def test_a_login_in_a_url_is_concealed_wherever_it_stands(login):
    for text in (f"http://{login}@host:1/x", f'cannot reach "https://{login}@host": no', f"a http://{login}@h b http://{login}@h"):
        assert f"{login}@" not in concealed(text).replace("***@", "")
    assert without_login(f"http://{login}@host:1/x") == "http://host:1/x"


def test_texts_without_secrets_are_left_as_they_are():
    for text in ("a@b.c", "http://host/a@b", "http://host?x=a@b", "", "rollout 3-1 at engine-0"):
        assert concealed(text) == text


def test_errors_and_their_tracebacks_hold_no_secret():
    keep_secret(PASSWORD)
    for kind in (HeadwayError, ConfigError, StorageError, EngineFailed):
        try:
            raise kind(f"{URL} said {PASSWORD}", detail=f"key={PASSWORD}")
        except HeadwayError as error:
            shown = "".join(traceback.format_exception(error)).replace('raise kind(f"{URL} said {PASSWORD}"', "")
            told = f"{error}{error.detail}{error!r}{shown}"
        assert PASSWORD not in told
        assert "***" in told


def test_log_lines_and_tracebacks_in_them_hold_no_secret():
    keep_secret(PASSWORD)
    formatter = ConcealingFormatter("%(message)s")
    try:
        raise ValueError(URL)
    except ValueError as error:
        record = logging.LogRecord("headway", logging.ERROR, "x", 1, "at %s", (URL,), (ValueError, error, error.__traceback__))
    assert PASSWORD not in formatter.format(record)


def test_the_kept_config_has_no_login_and_reads_back_to_the_same_engines(config, tmp_path):
    loaded = load_config(config(f'urls = ["{URL}", "http://127.0.0.1:8"]'))
    assert PASSWORD in loaded.engine.urls[0], "the run itself has it"
    kept = resolved(loaded)
    assert PASSWORD not in kept
    assert "nobody" not in kept
    (tmp_path / "kept.toml").write_text(kept)
    assert load_config(tmp_path / "kept.toml").engine.urls == ("http://127.0.0.1:9", "http://127.0.0.1:8")


@pytest.mark.parametrize("wrong", [URL + "?x=1", URL + "#x", URL.replace("http", "ftp"), URL.replace(":9", ":0")])
def test_a_url_that_is_refused_is_shown_without_its_login(config, wrong):
    with pytest.raises(ConfigError, match=r"engine\.urls") as refused:
        load_config(config(f'urls = ["{wrong}"]'))
    assert PASSWORD not in str(refused.value) + refused.value.detail


def test_logins_are_unquoted_and_kept_by_engine():
    assert logins([URL, "http://a%40b:c%3Ad@Host:1/", "http://plain:2"]) == {
        "http://127.0.0.1:9": f"nobody:{PASSWORD}",
        "http://host:1": "a@b:c:d",
    }


def test_what_is_handed_down_is_in_the_environment_for_as_long_as_the_run(config, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    monkeypatch.delenv(KEY, raising=False)
    attached = load_config(config(f'urls = ["{URL}"]\napi_key_variable = "MY_KEY"'))
    with engine_access(attached):
        found = Credentials()
        assert found.authorization("http://127.0.0.1:9/generate") == "Basic " + base64.b64encode(f"nobody:{PASSWORD}".encode()).decode()
        assert found.authorization("http://elsewhere:1/") == "Bearer sk-0123456789"
        assert "sk-0123456789" not in concealed("it said sk-0123456789")
    assert KEY not in os.environ
    assert LOGINS not in os.environ
    assert "sk-0123456789" not in resolved(attached)


def test_a_launched_engine_gets_a_key_of_its_own_each_time(config, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    launched = load_config(config(""))
    keys = []
    for _ in range(2):
        with engine_access(launched):
            keys.append(os.environ[KEY])
    assert len(set(keys)) == 2
    assert all(len(key) == 64 for key in keys)


def test_a_key_that_is_not_there_or_cannot_be_one_is_refused_before_anything_starts(config, monkeypatch):
    file = config('launch = "none"\nurls = ["http://127.0.0.1:9"]\napi_key_variable = "MY_KEY"')
    for value, says in ((None, "which is not set"), ("", "which is not set"), ("sk a", "blanks"), ("sk\n", "blanks"), ("sk-é", "blanks")):
        monkeypatch.delenv("MY_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("MY_KEY", value)
        with pytest.raises(ConfigError) as refused:
            check_world(load_config(file), file, open_prompts=False)
        told = str(refused.value) + refused.value.detail
        assert f'engine.api_key_variable is "MY_KEY", {says}' in told or ("holds " + says) in told
        assert not value or value not in told.replace(str(file), "")


@asynccontextmanager
async def listening(seen):
    async def handle(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 40\r\nConnection: close\r\n\r\n" + seen[-1][-60:-20].ljust(40)[:40])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_requests_carry_the_credentials_and_what_fails_names_none(monkeypatch):
    seen = []
    async with listening(seen) as port:
        url = f"http://nobody:{PASSWORD}@127.0.0.1:{port}"
        with handed_down(key="sk-0123456789", urls=[url]):
            engine = VllmEngine("engine-0", without_login(url), EngineSection(), retries=0)
            pool = HttpPool()
        with pytest.raises(EngineFailed, match="answered 401") as refused:
            await engine.label()
        await pool.request("GET", f"http://localhost:{port}/")
        assert PASSWORD not in str(refused.value)
        assert PASSWORD not in engine.url
    encoded = base64.b64encode(f"nobody:{PASSWORD}".encode())
    assert b"Authorization: Basic " + encoded in seen[0]
    assert b"Authorization: Bearer sk-0123456789" in seen[1]
    with pytest.raises(ConnectionFailed) as broken:
        await pool.request("GET", f"http://nobody:{PASSWORD}@127.0.0.1:9/")
    assert PASSWORD not in str(broken.value)
    await engine.close()
    await pool.close()


async def test_an_embedded_engine_with_a_key_answers_nobody_without_it():
    pytest.importorskip("torch")
    from aiohttp import web

    from headway.embedded.engine.server import EngineApi

    alive: Any = SimpleNamespace(died=asyncio.get_running_loop().create_future())
    scheduler: Any = SimpleNamespace(context=8, label="run-3")
    api = EngineApi(alive, scheduler, name="m", key="sk-0123456789")
    runner = web.ServerRunner(api.server(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{site.port}") as session:
            for given in ({}, {"Authorization": "Bearer sk-012345678"}, {"Authorization": "Bearer é"}, {"Authorization": "sk-0123456789"}):
                for method, path in (("POST", "/collective_rpc"), ("POST", "/pause"), ("GET", "/weight_info"), ("GET", "/metrics")):
                    async with session.request(method, path, headers=given) as answer:
                        assert answer.status == 401
                        assert "sk-0123456789" not in await answer.text()
            async with session.get("/health") as answer:
                assert answer.status == 200
            async with session.get("/weight_info", headers={"Authorization": "Bearer sk-0123456789"}) as answer:
                assert await answer.json() == {"weight_version": "run-3"}
    finally:
        await runner.cleanup()
