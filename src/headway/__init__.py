"""headway: the orchestrator of asynchronous RL post-training.

What an environment needs is exported here, and imported when first used: `import headway` alone costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.errors import RolloutTruncated
    from headway.protocols import Conversation, Generation, Outcome, Policy
    from headway.types import Prompt
    from headway.worker.single_turn import single_turn

__version__ = "0.1.0"
__all__ = ["Conversation", "Generation", "Outcome", "Policy", "Prompt", "RolloutTruncated", "__version__", "single_turn"]

_HOMES = {
    "Conversation": "headway.protocols",
    "Generation": "headway.protocols",
    "Outcome": "headway.protocols",
    "Policy": "headway.protocols",
    "Prompt": "headway.types",
    "RolloutTruncated": "headway.errors",
    "single_turn": "headway.worker.single_turn",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
