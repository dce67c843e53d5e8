"""The embedded engine passes the conformance suite that any other server is held to."""

import shutil

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from headway.embedded.engine.process import running  # noqa: E402
from headway.embedded.engine.settings import EngineServerSettings  # noqa: E402
from headway.testing.conformance import CHECKS, ConformanceSettings, run_conformance  # noqa: E402
from headway.types import EngineAddress  # noqa: E402

pytestmark = pytest.mark.torch


async def test_the_embedded_engine_fails_no_check_and_skips_none_but_adapters(tiny_qwen3, tmp_path):
    other = shutil.copytree(tiny_qwen3, tmp_path / "other")
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(other / "model.safetensors")
    changed = {name: value + torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in tensors.items()}
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    async with running(EngineServerSettings(model=tiny_qwen3, device="cpu", threads=1, max_context_tokens=512, label="found-7")) as (
        url,
        _,
    ):
        settings = ConformanceSettings(tokens=256, concurrency=16)
        verdicts = await run_conformance(EngineAddress(url, "vllm"), model=tiny_qwen3, other=other, settings=settings)
    assert [verdict.name for verdict in verdicts] == list(CHECKS)
    assert [str(verdict) for verdict in verdicts if verdict.outcome != "passed" and verdict.name != "adapters"] == []
