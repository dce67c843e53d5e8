"""An engine with a tiny model, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine_client import Client


@pytest.fixture
async def engine(tiny_qwen3: Path) -> AsyncIterator[Client]:
    """Serve it for one test; torch is imported here, since collecting tests must not need it."""
    from engine_client import engine_on

    async with engine_on(tiny_qwen3) as client:
        yield client
