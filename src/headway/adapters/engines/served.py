"""What a client knows of one server that it sends generations to; learnt from its answers, and forgotten when a connection to it breaks.

A server that is back may have been started otherwise.
"""

from __future__ import annotations

import msgspec

from headway.adapters.engines.generation import Dialect
from headway.adapters.engines.http import BadResponse, ConnectionFailed, HttpPool
from headway.adapters.engines.vllm.wire import GENERATE, read_label
from headway.types import EngineAddress

_MOST_LABEL_BYTES = 1024**2
_FIRST: dict[str, Dialect] = {"vllm": GENERATE}


class Served:
    """One server. `names_versions`: it does so in its answers; of others the label is asked for before each request."""

    def __init__(self, engine: EngineAddress) -> None:
        self.engine = engine
        self.dialect = _FIRST[engine.kind]
        self.names_versions = False

    async def label(self, http: HttpPool) -> str | None:
        """Return the label that the engine serves now; None when it does not say."""
        for path in self.dialect.label_paths:
            try:
                response = await http.request("GET", self.engine.url + path, most=_MOST_LABEL_BYTES)
                if response.status == 200:
                    return read_label(response.body)
            except (BadResponse, ConnectionFailed, msgspec.DecodeError):
                return None
        return None
