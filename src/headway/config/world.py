"""What a config names, looked at before anything starts: model files, packages, directories, a port, the user's code and prompts.

The user's code is imported by a process of its own (`headway.config.probe`): its side effects, its import time and its crashes stay there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headway.adapters.engines.roster import read_addresses
from headway.adapters.replay import find_files
from headway.config.paths import run_path, state_path
from headway.config.problems import Problem, as_error
from headway.config.toml import shown
from headway.errors import ConfigError, StorageError
from headway.formats import shared_memory
from headway.formats.bounded import read_bounded, refuse_irregular_in
from headway.formats.run_directory import RunDirectory
from headway.lifeline import VARIABLE
from headway.rules.advantages import ADVANTAGES
from headway.settings import Config, PromptsSection, eval_source

PROBE_SECONDS = 120.0
LOOPBACK = "127.0.0.1"
PREDECESSOR_SECONDS = 15.0  # more than an engine outlives its orchestrator by
_LOOK_SECONDS = 0.05
_MOST_JSON_BYTES = 256 * 1024**2  # of a model's config, or of the index of its shards


class Request(msgspec.Struct, frozen=True):
    """What to load: `entries` are (config key, `module:name`), `sources` prompts by config key; `base` is the config's directory."""

    base: str
    entries: list[tuple[str, str]]
    sources: dict[str, PromptsSection]


def check_world(config: Config, config_path: Path, *, open_prompts: bool = True, resume: bool = False) -> None:
    """Raise ConfigError, with a line for each problem, when files, packages, directories or user code would keep this run from starting.

    `open_prompts` reads the prompt sources too; a run, which is about to do that itself, leaves it out. `resume`: a run may lie there.
    """
    code = _user_code(config, config_path, open_prompts=open_prompts)
    problems = [
        *_packages(config),
        *_model(config),
        *_directories(config, resume=resume),
        *_ports(config, resume=resume),
        *_engines(config),
        *_credentials(config),
        *_replay(config, config_path),
        *code,
    ]
    if problems:
        raise as_error([problem.located(str(config_path)) for problem in problems])


def _packages(config: Config) -> Iterator[Problem]:
    users = {"engine.launch": config.engine.launch, "trainer.kind": config.trainer.kind}
    for key, value in users.items():
        missing = [name for name in ("torch", "transformers") if value == "embedded" and importlib.util.find_spec(name) is None]
        if missing:
            yield Problem(key, f'{key} is "embedded", which needs {" and ".join(missing)}: pip install "headway[torch]"')
            return


def _model(config: Config) -> Iterator[Problem]:
    if not config.model.path:
        return
    directory = Path(config.model.path)
    model_path = f"model.path is {shown(config.model.path)}"
    if not directory.is_dir():
        what = (
            "a file, not a directory"
            if directory.exists()
            else "no such directory: download the checkpoint and name the directory it is in"
        )
        yield Problem("model.path", f"{model_path}: {what}")
        return
    if lacking := checkpoint_lacks(directory):
        yield Problem("model.path", f"{model_path}: not a Hugging Face checkpoint: {lacking}")


def checkpoint_lacks(directory: Path) -> str:
    """Return what keeps a directory from being a checkpoint; empty: nothing."""
    try:
        refuse_irregular_in(directory)
        found = json.loads(read_bounded(directory / "config.json", _MOST_JSON_BYTES))
        index_file = directory / "model.safetensors.index.json"
        index = json.loads(read_bounded(index_file, _MOST_JSON_BYTES)) if index_file.exists() else {}
    except FileNotFoundError:
        return "it has no config.json"
    except StorageError as error:
        return str(error)
    except (OSError, ValueError, RecursionError) as error:
        return f"its config.json or its index cannot be read: {error}"
    if not isinstance(found, dict) or "model_type" not in found:
        return "its config.json names no model_type"
    shards = {str(name) for name in index.get("weight_map", {}).values()}
    if absent := sorted(name for name in shards if not (directory / name).exists()):
        return f"{absent[0]} is missing, which its index names"
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        remedy = " (only *.bin: save it again with save_pretrained)" if any(directory.glob("*.bin")) else ""
        return f"it has no *.safetensors{remedy}"
    if not (directory / "tokenizer.json").exists():
        return "it has no tokenizer.json: save its fast tokenizer there with save_pretrained"
    return next((damage for file in files if (damage := _damage(file))), "")


def _damage(file: Path) -> str:
    """Return what the header of a safetensors file says against it: sizes that do not fit, a download that was cut short."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            return ""
    except (SafetensorError, OSError) as error:
        return f"{file.name} is damaged or incomplete ({error}): fetch it again"


def _directories(config: Config, *, resume: bool) -> Iterator[Problem]:
    run = RunDirectory(run_path(config))
    if resume and run.run_json.exists():
        return
    try:
        if not resume:  # what a failed start has left is cleared by who takes it up
            run.refuse_used()
    except ConfigError as error:
        yield Problem("run.directory", str(error))
    if obstacle := _cannot_be_made(run.path):
        yield Problem("run.directory", f"run.directory: {run.path} cannot be made: {obstacle}: choose another run.directory")
    if not config.run.state_directory:
        return
    state = state_path(config)
    if obstacle := _cannot_be_made(state):
        yield Problem("run.state_directory", f"run.state_directory: {state} cannot be made: {obstacle}: choose another")
    elif state.is_dir() and any(state.iterdir()):
        yield Problem(
            "run.state_directory", f"run.state_directory: {state} is not empty: it may hold another run's journal; choose another"
        )


def _cannot_be_made(directory: Path) -> str:
    """Return what stands in the way of a directory that is to be made, or written to; empty: nothing that can be seen."""
    place = directory.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a directory"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} is not writable"
    return ""


def _ports(config: Config, *, resume: bool) -> Iterator[Problem]:
    engine, ingest = config.engine, config.ingest
    launched = range(engine.port, engine.port + engine.count) if engine.launch != "none" and engine.port else range(0)
    for port in launched:
        # The engine of a run that was killed a moment ago still has its port.
        if obstacle := _cannot_listen(LOOPBACK, port, patience_seconds=PREDECESSOR_SECONDS if resume else 0.0):
            which = "" if port == engine.port else f" and engine.count {engine.count}: port {port}"
            yield Problem("engine.port", f"engine.port is {engine.port}{which}: {obstacle}: choose another, or 0 for a free one")
            break
    if ingest is None:
        return
    if ingest.port in launched:
        whose = "so is engine.port" if ingest.port == engine.port else "a launched engine takes it (engine.port + engine.count)"
        yield Problem("ingest.port", f"ingest.port is {ingest.port}, and {whose}: choose another, or 0 for a free one")
    elif obstacle := _cannot_listen(ingest.host, ingest.port):
        address = f"ingest.host, ingest.port are {ingest.host}, {ingest.port}"
        yield Problem("ingest.host", f"{address}: {obstacle}: choose an address of this machine, and port 0 for a free one")


def _engines(config: Config) -> Iterator[Problem]:
    engine = config.engine
    if engine.urls_file:
        try:
            read_addresses(Path(engine.urls_file), engine.kind)
        except ValueError as error:
            yield Problem("engine.urls_file", f"engine.urls_file: {error}")
    if engine.python and shutil.which(engine.python) is None:
        yield Problem(
            "engine.python",
            f"engine.python is {shown(engine.python)}: no such program, or it may not be run: name the Python of an environment",
        )
    if engine.weight_transfer == "memory" and not shared_memory.is_available():
        yield Problem(
            "engine.weight_transfer",
            f'engine.weight_transfer is "memory": {shared_memory.SHARED_MEMORY} cannot be written to here: use "directory"',
        )


def _credentials(config: Config) -> Iterator[Problem]:
    if not (name := config.engine.api_key_variable):
        return
    key = os.environ.get(name, "")
    if not key:
        yield Problem("engine.api_key_variable", f'engine.api_key_variable is "{name}", which is not set: export the key in it')
    elif not (key.isascii() and key.isprintable() and " " not in key):
        yield Problem(
            "engine.api_key_variable", f'engine.api_key_variable is "{name}", which holds blanks or control characters: correct it'
        )


def _cannot_listen(host: str, port: int, *, patience_seconds: float = 0.0) -> str:
    """Return what stands in the way of listening there, for so long; empty: nothing."""
    due = time.monotonic() + patience_seconds
    while (obstacle := _obstacle(host, port)) and time.monotonic() < due:
        time.sleep(_LOOK_SECONDS)
    return obstacle


def _obstacle(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _replay(config: Config, config_path: Path) -> Iterator[Problem]:
    for pattern in config.replay.files if config.replay is not None else ():
        try:
            find_files(pattern, config_path.resolve().parent)
        except ConfigError as error:
            yield Problem("replay.files", str(error))


def _user_code(config: Config, config_path: Path, *, open_prompts: bool) -> list[Problem]:
    environment, rollout = config.environment, config.rollout
    named = {"environment.entry": environment.entry, "environment.score": environment.score, "rollout.filter": rollout.filter}
    if rollout.advantage not in ADVANTAGES:
        named["rollout.advantage"] = rollout.advantage
    sources = {"prompts.source": config.prompts} if open_prompts else {}
    if open_prompts and config.eval is not None:
        sources["eval.prompts"] = eval_source(config.eval, config.prompts)
    entries = [(key, entry) for key, entry in named.items() if entry]
    entries += [("metrics.exporters", entry) for entry in config.metrics.exporters]
    request = Request(str(config_path.resolve().parent), entries, sources)
    ours, theirs = socket.socketpair()  # the probe's lifeline: it ends when this process does
    try:
        with ours, theirs:
            answer = subprocess.run(
                [sys.executable, "-m", "headway.config.probe"],
                input=msgspec.json.encode(request),
                capture_output=True,
                timeout=PROBE_SECONDS,
                check=False,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, VARIABLE: str(theirs.fileno())},
            )
    except subprocess.TimeoutExpired:
        limit = f"environment.entry: user code and prompts did not load within {PROBE_SECONDS:g} s: import less, or load on first use"
        return [Problem("environment.entry", limit)]
    if answer.returncode:
        ended = f"environment.entry: loading the user's code ended Python (exit code {answer.returncode})"
        return [Problem("environment.entry", ended, answer.stderr.decode(errors="replace").strip())]
    return msgspec.json.decode(answer.stdout, type=list[Problem])
