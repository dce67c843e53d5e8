"""Addresses of engines: what is written, and what is refused with a cause; and the file that is watched."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.adapters.engines.addresses import read_address
from headway.adapters.engines.roster import UrlsFile, read_addresses
from headway.types import EngineAddress

POLL = 0.01


def looks_of(file):
    """Return the looks at it, which the caller closes."""
    looks = aiter(file)
    assert isinstance(looks, AsyncGenerator)
    return aclosing(looks)


@pytest.mark.parametrize(
    ("text", "url", "kind"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "vllm"),
        ("HTTP://Engines.Example:8000/", "http://engines.example:8000", "vllm"),
        ("sglang+http://10.0.0.7:30000", "http://10.0.0.7:30000", "sglang"),
        ("SGLang+HTTPS://engines.example/Pool/a//", "https://engines.example/Pool/a", "sglang"),
        ("vllm+http://[2001:DB8::7]:8000", "http://[2001:db8::7]:8000", "vllm"),
        ("https://Ann:Se+cret@Engines.example", "https://Ann:Se+cret@engines.example", "vllm"),
        ("sglang+https://ann@engines.example/a+b", "https://ann@engines.example/a+b", "sglang"),
    ],
)
def test_an_address_says_where_and_what(text, url, kind):
    assert read_address(text, "vllm") == EngineAddress(url, kind)
    if "+" not in text.partition("://")[0]:
        assert read_address(text, "sglang") == EngineAddress(url, "sglang")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a base URL like"),
        ("localhost:8000", "must be a base URL like"),
        ("tgi+http://127.0.0.1:80", 'there are "vllm\\+" and "sglang\\+"'),
        ("vllm+127.0.0.1:80", "must be a base URL like"),
        ("vllm+sglang+http://a", "must be a base URL like"),
        ("ftp://127.0.0.1:80", "must be a base URL like"),
        ("http://::1:8000", r"an IPv6 address stands in \[ \]"),
        ("http://[::1", "must be a base URL like"),
        ("http://a:70000", "its host or its port cannot be read"),
        ("http://a:0", "there is no port 0"),
        ("http://a/?key=1", "without anything from"),
        ("http://a/#b", "without anything from"),
        ("http://a/?", "without anything from"),
        ("http://a b", "blanks"),
        ("http://a\n", "control characters"),
    ],
)
def test_what_is_no_address_is_refused_with_the_cause(text, words):
    with pytest.raises(ValueError, match=words):
        read_address(text, "vllm")


@given(st.text(max_size=60))
def test_any_text_is_an_address_that_reads_the_same_again_or_is_refused_in_one_short_line(text):
    try:
        address, refusal = read_address(text, "sglang"), ""
    except ValueError as error:
        address, refusal = None, str(error)
    assert len(refusal) < 300
    assert "\n" not in refusal
    if address is not None:
        assert read_address(f"{address.kind}+{address.url}", "vllm") == address


def test_a_file_names_engines_line_by_line(tmp_path):
    file = tmp_path / "engines.txt"
    file.write_text("# the first rack\nhttp://a:1\n\n  sglang+http://b:2/  \nhttp://A:1\n")
    assert read_addresses(file, "vllm") == (EngineAddress("http://a:1"), EngineAddress("http://b:2", "sglang"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"engines\.txt: cannot be read: No such file"),
        (b"\xff\xfe\x00", r"engines\.txt: line 1 is no text in UTF-8: its byte 1 is 0xff$"),
        (b"\xef\xbb\xbf# racks\r\n\r\nhttp://b\xc3\xbc\xe9:1\n", r"line 3 is no text in UTF-8: its byte 11 is 0xe9$"),
        (b"http://a:1\n\xe9", r"line 2 is no text in UTF-8: its byte 1 is 0xe9$"),
        (b"#" * (4 * 1024**2 + 1), "is no list of URLs: "),
        (b"http://a:1\nb:2\n", r"line 2 is no engine's URL: must be a base URL like"),
        (b"http://ann:secret@a:1\n", "line 1 has a login in it"),
        (b"http://a:1\nsglang+http://a:1\n", "line 2 names an engine for the second time"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_its_line_and_without_its_secrets(content, words, tmp_path):
    file = tmp_path / "engines.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_addresses(file, "vllm")
    assert "secret" not in str(caught.value)


def ports(addresses):
    return [int(address.url.rpartition(":")[2]) for address in addresses]


async def warned(caplog, count):
    async with asyncio.timeout(60):
        while len(caplog.records) < count:  # noqa: ASYNC110 -- a thread looks at the file
            await asyncio.sleep(POLL)


async def test_a_change_is_told_once_and_a_file_that_is_gone_or_garbled_changes_nothing(tmp_path, caplog):
    file = tmp_path / "engines.txt"
    file.write_text("http://a:1\n")
    caplog.set_level(logging.WARNING, "headway")
    async with looks_of(UrlsFile(file, "vllm", poll_seconds=POLL)) as told:
        assert ports(await anext(told)) == [1]
        change = asyncio.ensure_future(anext(told))
        garbled = (lambda: file.write_text("http://a:2\n%%%\n"), lambda: file.write_bytes(b"http://a:2\n\xff"))
        for number, harm in enumerate((file.unlink, *garbled), 1):
            harm()
            await warned(caplog, number)
            assert not change.done()
        file.write_text("http://a:1\n")
        await asyncio.sleep(5 * POLL)  # so that it may be looked at: nothing tells that it was
        assert not change.done()
        file.write_text("http://a:1\nhttp://a:3\n")
        assert ports(await change) == [1, 3]
        file.write_text("")
        assert await anext(told) == ()
    assert [record.message.partition(": ")[2].partition(";")[0][:16] for record in caplog.records] == [
        "cannot be read: ",
        "line 2 is no eng",
        "line 2 is no tex",
    ]
    assert all(record.message.endswith("; the engines stay those that it named before (engine.urls_file)") for record in caplog.records)


async def test_a_file_that_is_not_there_yet_names_nobody_until_it_is(tmp_path):
    async with looks_of(UrlsFile(tmp_path / "engines.txt", "sglang", poll_seconds=POLL)) as told:
        assert await anext(told) == ()
        (tmp_path / "engines.txt").write_text("http://a:1\n")
        assert await anext(told) == (EngineAddress("http://a:1", "sglang"),)


async def test_what_stands_in_the_file_for_one_look_only_is_not_taken(tmp_path, monkeypatch):
    """As of a file that is being written: the looks are scripted, since nobody can write between two of them on purpose."""
    looks = [(EngineAddress("http://a:8000"),)] * 2 + [(), (EngineAddress("http://a:80"),)] + [(EngineAddress("http://b:1"),)] * 3
    file = UrlsFile(tmp_path / "engines.txt", "vllm", poll_seconds=0.0, read=lambda *_: looks.pop(0))
    async with looks_of(file) as told:
        assert [ports(await anext(told)), ports(await anext(told))] == [[8000], [1]]
