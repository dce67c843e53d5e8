"""How many threads torch uses, and on which device: one answer for engine and trainer.

Engine, trainer, workers and orchestrator share a small machine, so there each of them takes one torch thread: more would fight over
the cores, and matrices of a tiny model gain nothing from a second one.
"""

from __future__ import annotations

import os

import torch

from headway.errors import ConfigError

SMALL_MACHINE_CORES = 4


def configure_torch(threads: int, device: str) -> torch.device:
    """Set torch's thread count for this process and return the device that `device` names.

    `threads` 0: one on machines with at most four cores (of those this process may use), torch's own choice elsewhere. `device`: `auto`
    takes the accelerator if there is one. Raises ConfigError for a device that this machine or this build of torch does not have.
    """
    if threads == 0 and _usable_cores() <= SMALL_MACHINE_CORES:
        threads = 1
    if threads > 0:
        torch.set_num_threads(threads)
    if device == "auto":
        return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA fails with an assertion
        reason = str(error).splitlines()[0]
        raise ConfigError(f'device = "{device}" cannot be used here ({reason}): choose "cpu", or "auto" for what is there') from error
    return chosen


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
