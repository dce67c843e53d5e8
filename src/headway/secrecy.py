"""Secrets that a process knows, kept here so that they are told nowhere: errors, logs and files are written through `concealed`.

A login inside a URL is concealed wherever it stands; any other secret once it was given to `keep_secret`. The list lives in this process
only. Knows nothing of configs, engines or files.
"""

from __future__ import annotations

import logging
import re

SHORTEST = 6  # characters: what is shorter stands in too many innocent words to be taken out of texts
HIDDEN = "***"

_LOGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#\"'<>]*@")
_secrets: set[str] = set()


def keep_secret(value: str) -> None:
    """Conceal `value` from now on, if it is long enough to be one."""
    if len(value) >= SHORTEST:
        _secrets.add(value)


def concealed(text: str) -> str:
    """Return a text without the secrets in it."""
    if "@" in text:
        text = _LOGIN.sub(rf"\g<scheme>{HIDDEN}@", text)
    for secret in tuple(_secrets):  # another thread may learn of one meanwhile
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return text


class ConcealingFormatter(logging.Formatter):
    """Formats records for a log, without the secrets in them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback if there is one."""
        return concealed(super().format(record))


def without_login(url: str) -> str:
    """Return a URL without the user and the password in it."""
    return _LOGIN.sub(r"\g<scheme>", url, count=1)
