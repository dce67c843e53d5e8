"""Engines that speak vLLM's token-in, token-out API: a real vLLM and headway's embedded engine alike.

`wire` and `completions` are its two ways to generate; `VllmEngine` administers one server: label, weight sync (in the orchestrator).
"""

from headway.adapters.engines.vllm.admin import VllmEngine

__all__ = ["VllmEngine"]
