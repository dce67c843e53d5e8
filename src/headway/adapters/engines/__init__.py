"""Inference servers: who generates at them (`client`), and who administers them (`admin_of`); wire formats in one package per protocol."""

from __future__ import annotations

from headway.protocols import Engine
from headway.settings import EngineSection
from headway.types import EngineAddress, SamplingParams

__all__ = ["admin_of"]


def admin_of(
    name: str, address: EngineAddress, settings: EngineSection, *, sampling: SamplingParams | None = None, model: str = ""
) -> Engine:
    """Return the administrative client of an engine. `sampling`: how the run samples; `model`: the checkpoint that it starts from.

    Only here are the clients of a protocol imported: rollout workers import this package and need none.
    """
    if address.kind == "sglang":
        from headway.adapters.engines.sglang.admin import SglangEngine

        return SglangEngine(name, address.url, settings, sampling=sampling, model=model)
    from headway.adapters.engines.vllm.admin import VllmEngine

    return VllmEngine(name, address.url, settings, sampling=sampling, model=model)
