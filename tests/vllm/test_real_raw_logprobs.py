"""A real vLLM as it starts by itself returns log-probabilities of another distribution than it samples from: refused, by the flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from pushing import fleet
from real_server import RealServer, serving

from headway.errors import EngineFailed
from headway.types import Checkpoint


async def test_raw_logprobs_are_refused_with_the_flag_to_set(python: Path, versions: list[Checkpoint], tmp_path: Path) -> None:
    with serving(RealServer(python, Path(versions[0].directory), tmp_path / "log", ())) as server:
        async with fleet(server.url) as it:
            with pytest.raises(EngineFailed, match="--logprobs-mode processed_logprobs"):
                await it.push(versions[1])
            await it.engine.abandon()
        assert not server.paused()
        assert server.healthy()
