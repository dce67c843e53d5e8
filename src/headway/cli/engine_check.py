"""`headway engine check`: runs the conformance suite against a server and prints a line per check."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.adapters.engines.addresses import read_address
from headway.adapters.engines.credentials import KEY, handed_down
from headway.adapters.engines.held import ADAPTER_CONFIG, is_adapter
from headway.adapters.engines.lora import adapter_or_base
from headway.cli.streams import say
from headway.errors import ConfigError, StorageError
from headway.formats.files import strict_json
from headway.formats.tensor_headers import read_tensors
from headway.secrecy import without_login
from headway.testing.conformance import Verdict, run_conformance
from headway.types import EngineKind


def check_engine(
    url: str, *, kind: EngineKind, model: Path | None = None, other: Path | None = None, adapter: Path | None = None, as_json: bool = False
) -> int:
    """Check and print; returns 1 when a check failed, otherwise 0. Raises ConfigError for what cannot be used."""
    try:
        address = read_address(url, kind)
    except ValueError as error:
        raise ConfigError(f"URL: {error}") from None
    _see(model, other)
    if adapter is not None:
        _see_adapter(adapter, model)
    if not as_json:
        say(f"{without_login(address.url)}, {address.kind}")

    def tell(verdict: Verdict) -> None:
        if not as_json:
            say(str(verdict))

    with handed_down(key=os.environ.get(KEY, ""), urls=[address.url]):
        model, other, adapter = (path and path.absolute() for path in (model, other, adapter))  # the server's directory is another one
        verdicts = _run(run_conformance(address, model=model, other=other, adapter=adapter, told=tell, noted=_note))
    counts = Counter(verdict.outcome for verdict in verdicts)
    if as_json:
        say(strict_json(verdicts).decode().rstrip())
    else:
        say(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] else 0


def _run(checks: Coroutine[Any, Any, list[Verdict]]) -> list[Verdict]:
    """Run the checks. SIGINT cancels them, a second one cancels what they still give back; KeyboardInterrupt once they have ended by it.

    asyncio's own handler would raise the second one wherever the loop is, amid somebody's task.
    """

    async def interruptible() -> list[Verdict]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        seen = 0

        def interrupt() -> None:
            nonlocal seen
            seen += 1
            if task is not None:
                task.cancel()
            if seen > 1:
                loop.set_exception_handler(lambda *_: None)  # what is dropped amid its work fails, and nobody need know
                loop.remove_signal_handler(signal.SIGINT)

        loop.add_signal_handler(signal.SIGINT, interrupt)
        return await checks

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _note(text: str) -> None:
    with suppress(OSError):
        print(f"headway: {text}", file=sys.stderr, flush=True)


def _see(model: Path | None, other: Path | None) -> None:
    """Raise ConfigError unless both are checkpoints of the same shapes, or neither is given."""
    if (model is None) != (other is None):
        raise ConfigError("--model and --other are given together: the weights of one are replaced by the other's, and put back")
    shapes = []
    for option, path in (("--model", model), ("--other", other)):
        if path is not None:
            try:
                shapes.append({name: (entry.dtype, entry.shape) for name, entry in read_tensors(path).items()})
            except StorageError as error:
                raise ConfigError(f"{option}: {error}") from None
    if shapes and shapes[0] != shapes[1]:
        raise ConfigError("--other must have the tensors of --model, in the same types and shapes")


def _see_adapter(adapter: Path, model: Path | None) -> None:
    """Raise ConfigError unless this is a LoRA adapter, of the model where that is given."""
    if not is_adapter(adapter):
        raise ConfigError(f"--adapter: {adapter} holds no {ADAPTER_CONFIG}, and so no LoRA adapter as PEFT writes it")
    try:
        adapter_or_base(adapter, model)
    except StorageError as error:
        raise ConfigError(f"--adapter: {error}") from None
