"""What an engine process is told when it starts. Free of torch, so that a command line can build it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServerSettings:
    """One embedded engine: a checkpoint, where to serve it, and its limits.

    `label` names the weights in `model` as clients will see them in version spans (`<lineage>-<n>`). `await_model_seconds`: how long to
    wait for the model directory to be complete; 0: it must be there. `max_context_tokens` 0: what the model's config allows.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_sequences: int = 256
    max_context_tokens: int = 0
    threads: int = 0
    label: str = "default"
    await_model_seconds: float = 0.0
