"""The embedded trainer: batches of a run directory in, versions of a Hugging Face checkpoint out (the trainer contract of FORMATS).

For laptops, tests and models that fit one device. Importing this package does not import torch; `serve` does.
"""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError

__all__ = ["serve"]


def serve(directory: Path) -> None:
    """Train the run in `directory` until it has its steps, SIGTERM comes, or the process that started this one is gone. Blocks.

    Call from the main thread. Raises a HeadwayError, by name, for whatever ends training badly.
    """
    try:
        from headway.embedded.trainer import loop
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"torch", "transformers"}:
            raise
        raise ConfigError(f"the embedded trainer needs {error.name}, which is not installed: pip install 'headway[torch]'") from error
    loop.serve(directory)
