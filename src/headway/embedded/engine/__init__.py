"""headway's own inference server: continuous batching of a Hugging Face model behind the vLLM subset that the vLLM adapter speaks.

For laptops, tests and small models; a large model wants a real vLLM, and the adapter does not see the difference. Importing this package
does not import torch; `serve` does.
"""

from __future__ import annotations

from headway.embedded.engine.settings import EngineServerSettings
from headway.errors import ConfigError

__all__ = ["EngineServerSettings", "serve"]


def serve(settings: EngineServerSettings) -> None:
    """Serve a model until SIGTERM, SIGINT, or the end of the process that started this one. Blocks.

    Raises ConfigError (no usable model, port in use, torch missing) or RuntimeError (the model stopped working).
    """
    try:
        from headway.embedded.engine.process import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"torch", "transformers"}:
            raise
        raise ConfigError(f"the embedded engine needs {error.name}, which is not installed: pip install 'headway[torch]'") from error
    run(settings)
