"""Engines that speak vLLM's token-in, token-out API: a real vLLM and headway's embedded engine alike.

`VllmClient` generates (in rollout workers); `VllmEngine` administers one server: label, weight sync (in the orchestrator).
"""

from headway.adapters.engines.vllm.admin import VllmEngine
from headway.adapters.engines.vllm.client import ContextExceeded, Generated, GenerationFailed, VllmClient

__all__ = ["ContextExceeded", "Generated", "GenerationFailed", "VllmClient", "VllmEngine"]
