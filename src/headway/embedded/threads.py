"""Threads of engine and trainer: how many torch uses, on which device, and what only one of them may do at a time."""

from __future__ import annotations

import threading

import torch

from headway.errors import ConfigError
from headway.settings import thread_limit

LOADING = threading.Lock()
"""Held while transformers loads a model: it patches its own classes meanwhile (no initialisation, no tied weights), and two loads at once
may leave them patched for good."""


def configure_torch(threads: int, device: str) -> torch.device:
    """Set torch's thread count for this process and return the device that `device` names.

    `threads` 0: one on small CPUs (`settings.thread_limit`), torch's own choice elsewhere. `device`: `auto` takes the accelerator if there
    is one. Raises ConfigError for a device that this machine or this build of torch does not have.
    """
    if limit := thread_limit(threads):
        torch.set_num_threads(limit)
    if device == "auto":
        return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA fails with an assertion
        reason = str(error).splitlines()[0]
        raise ConfigError(f'device = "{device}" cannot be used here ({reason}): choose "cpu", or "auto" for what is there') from error
    return chosen
