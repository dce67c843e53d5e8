"""Addresses of engines as users write them: a base URL, and what is spoken there where that is not the default.

http://127.0.0.1:8000            https://engines.example/a             http://[2001:db8::7]:8000
sglang+http://10.0.0.7:30000     vllm+https://user:password@engines.example
"""

from __future__ import annotations

from typing import get_args
from urllib.parse import SplitResult, urlsplit

from headway.types import EngineAddress, EngineKind

_KINDS: dict[str, EngineKind] = {kind: kind for kind in get_args(EngineKind)}
_EXAMPLE = '"http://127.0.0.1:8000", or "sglang+http://127.0.0.1:30000"'


def read_address(text: str, default: EngineKind) -> EngineAddress:
    """Return what an address says; `default`: the kind of one that says none. Scheme and host are in small letters, without a / at the end.

    A login that stands in it stays in it (`secrecy.without_login`). Raises ValueError: what is wrong, without the text.
    """
    prefix, plus, rest = text.partition("+")
    kind, url = default, text
    if plus and "://" not in prefix:
        known = _KINDS.get(prefix.lower())
        if known is None:
            kinds = " and ".join(f'"{name}+"' for name in _KINDS)
            raise ValueError(f"it begins with a protocol that headway does not speak: there are {kinds}")
        kind, url = known, rest
    parts = _parts(url)
    login, at, place = parts.netloc.rpartition("@")
    return EngineAddress(f"{parts.scheme}://{login}{at}{place.lower()}{parts.path.rstrip('/')}", kind)


def _parts(url: str) -> SplitResult:
    """Split a base URL. Raises ValueError for what is none."""
    if not url.isprintable() or " " in url:
        raise ValueError("it has blanks or control characters in it: take them out")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # what it says may hold a part of a password
        how = "an IPv6 address stands in [ ]" if url.count(":") > 2 else "its host or its port cannot be read"
        raise ValueError(f"must be a base URL like {_EXAMPLE}: {how}") from None
    if parts.scheme not in {"http", "https"} or not host:
        raise ValueError(f"must be a base URL like {_EXAMPLE}")
    if port == 0:
        raise ValueError("must be a base URL with the port at which the engine listens: there is no port 0")
    if parts.query or parts.fragment or url[-1] in "?#":
        raise ValueError("must be a base URL: without anything from ? or # on")
    return parts
