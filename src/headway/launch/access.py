"""What the engines of a run are shown, and ask for: the key that the config names, or one made for this run; logins in engine.urls."""

from __future__ import annotations

import os
import secrets
from contextlib import AbstractContextManager

from headway.adapters.engines.addresses import read_address
from headway.adapters.engines.credentials import KEY, handed_down
from headway.settings import Config


def engine_access(config: Config) -> AbstractContextManager[None]:
    """Return a context within which this process, its workers and its engines have what they need to talk to each other.

    Engines that the run launches ask for a key that nobody else knows: other users of the machine reach their port as well.
    """
    named = config.engine.api_key_variable
    key = os.environ.get(named or KEY, "")
    if not key and config.engine.launch != "none":
        key = secrets.token_hex(32)
    return handed_down(key=key, urls=[read_address(text, config.engine.kind).url for text in config.engine.urls])
