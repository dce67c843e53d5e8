"""How each kind of engine is started: its command, its environment. The user's own `engine.arguments` come last, and win.

A vLLM or SGLang is started with the Python that it is installed in, behind a guard (`headway.launch.guard`), with the flags that headway
needs of it (docs/how-to/launch-engines.md). No key is ever part of a command line, which all users of a machine can read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headway.adapters.engines.credentials import KEY
from headway.errors import ConfigError
from headway.launch import beside_vllm
from headway.launch.ports import LOOPBACK
from headway.settings import Config, EngineSection, thread_limit
from headway.types import Checkpoint, EngineKind

GRACE_SECONDS = 8.0  # what a server gets to end by itself, within what its guard gets
_HEADWAY = [sys.executable, "-m", "headway"]
_GUARD = [sys.executable, "-m", "headway.launch.guard"]
_NAME = "policy"
_MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
_FIND_SECONDS = 60.0
_LORA = ["--enable-lora", "--max-loras", "2"]  # requests of two versions run side by side around a sync
# As `python -m MODULE` would, with the key read from the environment: an argument can be read by everybody.
_SGLANG = (
    "import os, runpy, sys; module = sys.argv[1]; key = os.environ.get('HEADWAY_ENGINE_KEY'); "
    "sys.argv[:2] = [module, *(['--api-key', key] if key else [])]; "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


class Launch(NamedTuple):
    """One engine to be started: command, what is added to the environment, threads of its math libraries (0: as they choose)."""

    command: list[str]
    environment: dict[str, str]
    threads: int


def is_foreign(engine: EngineSection) -> bool:
    """Whether the launched engines know nothing of headway."""
    return engine.launch in _MODULES


def kind_of(engine: EngineSection) -> EngineKind:
    """Return what launched engines speak."""
    return "sglang" if engine.launch == "sglang" else "vllm"


def launch_of(config: Config, index: int, *, port: int, weights: Checkpoint) -> Launch:
    """Return how engine `index` is started with these weights."""
    engine = config.engine
    added = environment_of(engine, index)
    if not is_foreign(engine):
        return Launch([*_HEADWAY, "engine", *_embedded(engine, weights, port)], added, thread_limit(engine.threads))
    # With LoRA, a version is an adapter: the server holds what all of them adapt.
    model = config.model.path if engine.weight_transfer == "lora" and config.model.path else weights.directory
    python = python_of(engine)
    command = _vllm(engine, python, model, port) if engine.launch == "vllm" else _sglang(engine, python, model, port)
    url = f"http://{LOOPBACK}:{port}"
    path, body = _warm_up(engine)
    guard = ["--url", url, "--warm-up", path, "--body", json.dumps(body), "--grace", f"{GRACE_SECONDS:g}", "--"]
    if engine.launch == "vllm":
        guard.insert(0, "--heed-health")
    variables = _vllm_environment(engine, added) if engine.launch == "vllm" else added
    return Launch([*_GUARD, *guard, *command, *engine.arguments], variables, engine.threads)


def environment_of(engine: EngineSection, index: int) -> dict[str, str]:
    """Return what the config adds to the environment of engine `index`."""
    added = dict(entry.split("=", 1) for entry in engine.environment)
    if engine.visible_devices:
        added["CUDA_VISIBLE_DEVICES"] = engine.visible_devices[index]
    return added


def python_of(engine: EngineSection) -> str:
    """Return the Python that launched servers run with. A link is not resolved: it is what makes a virtual environment."""
    return (shutil.which(engine.python) or engine.python) if engine.python else sys.executable


def check_servers(config: Config) -> None:
    """Raise ConfigError where launched servers cannot be started: no such Python, or what it should have is not installed. Blocks."""
    engine = config.engine
    if not is_foreign(engine):
        return
    python, module = python_of(engine), str(engine.launch)
    code = f"import importlib.util, sys; sys.exit(0 if importlib.util.find_spec({module!r}) else 3)"
    variables = {**os.environ, **environment_of(engine, 0)}
    try:
        asked = subprocess.run(
            [python, "-c", code], env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=_FIND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python: {python} cannot be run ({error}): name the Python that {module} is installed in") from error
    if asked.returncode:
        said = "" if asked.returncode == 3 else f" ({asked.stderr.decode(errors='replace').strip()[-200:]})"
        raise ConfigError(
            f'engine.launch is "{module}", and {python} finds no {module}{said}: install it, or name a Python that has it in engine.python'
        )


def _embedded(engine: EngineSection, weights: Checkpoint, port: int) -> list[str]:
    return _options(
        {
            "model": weights.directory,
            "port": port,
            "device": engine.device,
            "dtype": engine.dtype,
            "max-sequences": engine.max_sequences,
            "max-context-tokens": engine.max_context_tokens,
            "threads": engine.threads,
            "label": weights.label,
            "await-model-seconds": engine.start_timeout_seconds,
        }
    )


def _vllm(engine: EngineSection, python: str, model: str, port: int) -> list[str]:
    options: dict[str, object] = {
        "model": model,
        "served-model-name": _NAME,
        "host": LOOPBACK,
        "port": port,
        "dtype": engine.dtype,
        "max-num-seqs": engine.max_sequences,
        "logprobs-mode": "processed_logprobs",
        "middleware": "headway_access.AskForKey",
    }
    if engine.max_context_tokens:
        options["max-model-len"] = engine.max_context_tokens
    lora = _LORA if engine.weight_transfer == "lora" else []
    return [python, "-m", _MODULES["vllm"], *_options(options), "--enable-scale-out", *lora]


def _vllm_environment(engine: EngineSection, added: dict[str, str]) -> dict[str, str]:
    found = [str(Path(beside_vllm.__file__).parent), added.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": os.environ.get(KEY, "")}
    if engine.weight_transfer == "lora":
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return variables | added | {"PYTHONPATH": os.pathsep.join(part for part in found if part)}


def _sglang(engine: EngineSection, python: str, model: str, port: int) -> list[str]:
    options: dict[str, object] = {
        "model-path": model,
        "served-model-name": _NAME,
        "host": LOOPBACK,
        "port": port,
        "dtype": engine.dtype,
        "max-running-requests": engine.max_sequences,
    }
    if engine.max_context_tokens:
        options["context-length"] = engine.max_context_tokens
    lora = ["--enable-lora", "--max-loras-per-batch", "2"] if engine.weight_transfer == "lora" else []
    return [python, "-c", _SGLANG, _MODULES["sglang"], *_options(options), "--enable-metrics", *lora]


def _warm_up(engine: EngineSection) -> tuple[str, dict[str, object]]:
    """Return path and body of the generation that comes first: two tokens after one that every vocabulary has."""
    if engine.launch == "sglang":
        return "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "temperature": 1.0}}
    sampling = {"max_tokens": 2, "temperature": 1.0, "logprobs": 0}
    return "/inference/v1/generate", {"request_id": "warm-up", "token_ids": [1], "sampling_params": sampling, "stream": False}


def _options(options: Mapping[str, object]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]
