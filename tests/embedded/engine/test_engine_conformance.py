"""The embedded engine passes the conformance suite that any other server is held to."""

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from headway.embedded.engine.process import running  # noqa: E402
from headway.embedded.engine.settings import EngineServerSettings  # noqa: E402
from headway.testing.conformance import CHECKS, ConformanceSettings, run_conformance  # noqa: E402
from headway.types import EngineAddress  # noqa: E402

pytestmark = pytest.mark.torch

CONTEXT = 2048  # tokens: half of it is generated while others look, who may stand still for a moment and must meet it all the same


async def test_the_embedded_engine_fails_no_check_and_skips_none_but_adapters(tiny_qwen3, tmp_path):
    model, other = (Path(shutil.copytree(tiny_qwen3, tmp_path / name)) for name in ("model", "other"))
    for directory in (model, other):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(other / "model.safetensors")
    changed = {name: value + torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in tensors.items()}
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    async with running(EngineServerSettings(model=model, device="cpu", threads=1, label="found-7")) as (url, _):
        settings = ConformanceSettings(tokens=CONTEXT // 2, concurrency=16, freed_seconds=60.0)
        verdicts = await run_conformance(EngineAddress(url, "vllm"), model=model, other=other, settings=settings)
    assert [verdict.name for verdict in verdicts] == list(CHECKS)
    assert [str(verdict) for verdict in verdicts if verdict.outcome != "passed" and verdict.name != "adapters"] == []
