"""What engines are shown so that they answer: a key, or a login that stood in an engine's URL.

Both reach rollout workers and launched engines through the environment of their processes, which no other user can read, and neither is
ever part of a URL again: URLs are stored with each rollout.

    HEADWAY_ENGINE_KEY      sent as `Authorization: Bearer`; asked for by an embedded engine that is started with it
    HEADWAY_ENGINE_LOGINS   JSON, {"http://host:port": "user:password"}: sent as `Authorization: Basic` to that engine
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from headway.secrecy import keep_secret, without_login

KEY, LOGINS = "HEADWAY_ENGINE_KEY", "HEADWAY_ENGINE_LOGINS"


class Credentials:
    """What to send to which engine, as this process was told when the object was made."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        key = environment.get(KEY, "")
        keep_secret(key)
        self._bearer = f"Bearer {key}" if key else ""
        self._logins: dict[str, str] = {}
        for origin, login in json.loads(environment.get(LOGINS) or "{}").items():
            encoded = base64.b64encode(login.encode()).decode()
            for secret in (login, login.partition(":")[2], encoded):
                keep_secret(secret)
            self._logins[origin] = f"Basic {encoded}"

    def authorization(self, url: str) -> str:
        """Return the header to send with a request to this URL; empty: none."""
        return self._logins.get(_origin(url), self._bearer)


def logins(urls: Sequence[str]) -> dict[str, str]:
    """Return the logins in these URLs, by the scheme, host and port that they are for."""
    found = {}
    for url in urls:
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            found[_origin(url)] = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return found


@contextmanager
def handed_down(*, key: str, urls: Sequence[str]) -> Iterator[None]:
    """Let this process and those it starts within the block have a key (empty: none) and the logins of `urls`."""
    given = {KEY: key, LOGINS: json.dumps(found) if (found := logins(urls)) else ""}
    before = {name: os.environ.get(name) for name in given}
    _set(given)
    Credentials()  # what is secret is known to be from here on
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def _origin(url: str) -> str:
    parts = urlsplit(without_login(url))
    return f"{parts.scheme}://{parts.netloc}".lower()
