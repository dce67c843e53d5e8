"""What the keys of engines say about each other: where they are, what is launched, how weights reach them and how often.

Pure: a config in, problems out. Each problem names the key to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from headway.adapters.engines.addresses import read_address
from headway.config.problems import Problem, is_wrong
from headway.config.toml import shown
from headway.secrecy import without_login
from headway.settings import Config, steps_ahead

DEVICE = re.compile(r"^(auto|cpu|(cuda|xpu|mps)(:\d+)?)$")
_LAST_PORT = 65535
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\0]*", re.DOTALL)
_SERVERS = ("vllm", "sglang")
_KEYS = ("HEADWAY_ENGINE_KEY", "VLLM_API_KEY")  # of the run's engines: set for them by the run
_OURS = {  # what headway finds a launched server by, to what is to be set instead
    "--port": "set engine.port",
    "--host": "it listens for this run alone, on 127.0.0.1",
    "--uds": "it is spoken to by a port",
    "--api-key": "name its variable in engine.api_key_variable",
    "--ssl-keyfile": "it is spoken to on this machine, without TLS",
    "--ssl-certfile": "it is spoken to on this machine, without TLS",
}


def engine_contradictions(config: Config) -> list[Problem]:
    """Return what is wrong with the keys that say which engines there are, and how they are given weights."""
    return [*_addresses(config), *_launch(config), *_for_servers(config), *_weights(config), *_every(config)]


def launch_beside_urls(config: Config) -> Iterator[Problem]:
    """Yield the problem of a config, as it was written, that names engines and launches others too ("embedded" is the default)."""
    engine = config.engine
    if engine.launch in _SERVERS and (engine.urls or engine.urls_file):
        key = "urls" if engine.urls else "urls_file"
        yield is_wrong("engine.launch", engine.launch, f"engine.{key} names engines that run already: remove one of the two")


def _addresses(config: Config) -> Iterator[Problem]:
    engine = config.engine
    if engine.launch == "none" and not engine.urls and not engine.urls_file:
        yield Problem(
            "engine.urls", 'engine.urls is missing: with launch = "none", name the engines, like urls = ["http://127.0.0.1:8000"]'
        )
    places = []
    for url in engine.urls:
        try:
            places.append(without_login(read_address(url, engine.kind).url))
        except ValueError as error:
            yield is_wrong("engine.urls", engine.urls, f"{shown(url)} {error}")
    if len(set(places)) < len(places):
        yield is_wrong("engine.urls", engine.urls, "an engine is named twice")


def _launch(config: Config) -> Iterator[Problem]:
    engine = config.engine
    if engine.launch == "none":
        for key, value in (("count", engine.count if engine.count > 1 else 0), ("visible_devices", engine.visible_devices)):
            if value:
                yield is_wrong(
                    f"engine.{key}", value, "engine.urls or engine.urls_file names engines, so none is launched: remove one of the two"
                )
        return
    if engine.visible_devices and len(engine.visible_devices) != engine.count:
        yield is_wrong(
            "engine.visible_devices",
            engine.visible_devices,
            f"one text for each of the {engine.count} engines of engine.count, and there are {len(engine.visible_devices)}",
        )
    if engine.port and engine.port + engine.count - 1 > _LAST_PORT:
        yield is_wrong(
            "engine.port",
            engine.port,
            f"{engine.count} engines (engine.count) take ports from there on: at most {_LAST_PORT + 1 - engine.count}",
        )
    if engine.launch == "embedded" and not DEVICE.match(engine.device):
        yield is_wrong("engine.device", engine.device, 'it must be "auto", "cpu", "cuda" or "cuda:0" (or xpu, mps)')
    if engine.launch in {"embedded", "vllm"} and engine.kind != "vllm":
        yield is_wrong(
            "engine.kind",
            engine.kind,
            f'engine.launch = "{engine.launch}" starts engines that speak vLLM\'s protocol: remove one of the two',
        )


def _for_servers(config: Config) -> Iterator[Problem]:
    engine = config.engine
    if engine.launch not in _SERVERS:
        for key, value in (("arguments", engine.arguments), ("environment", engine.environment), ("python", engine.python)):
            if value:
                yield is_wrong(
                    f"engine.{key}",
                    value,
                    f'only a launched server has it (engine.launch = "vllm" or "sglang"), and launch is "{engine.launch}"',
                )
        return
    for argument in engine.arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _OURS:
            yield Problem("engine.arguments", f"engine.arguments is no place for {name}, the run would not find the server: {_OURS[name]}")
    for number, variable in enumerate(engine.environment, 1):  # not quoted: it may be a secret
        if not _VARIABLE.fullmatch(variable):
            yield Problem("engine.environment", f'engine.environment is a list of "NAME=value": entry {number} is none')
        elif (name := variable.partition("=")[0]) in _KEYS:
            yield Problem("engine.environment", f"engine.environment is no place for {name}: export the key, and {_OURS['--api-key']}")


def _weights(config: Config) -> Iterator[Problem]:
    engine, trainer = config.engine, config.trainer
    if engine.weight_transfer == "memory" and not (engine.launch == trainer.kind == "embedded"):
        other = 'engine.launch = "embedded"' if trainer.kind == "embedded" else 'trainer.kind = "embedded" and engine.launch = "embedded"'
        yield is_wrong("engine.weight_transfer", "memory", f'it needs {other}: use "directory" or "delta" between others')
    if engine.weight_transfer == "lora" and "embedded" in {engine.launch, trainer.kind}:
        whose = "engine loads" if engine.launch == "embedded" else "trainer makes"
        yield is_wrong("engine.weight_transfer", "lora", f'the embedded {whose} whole models only: use "directory" or "delta"')
    if not engine.recompute_kv and engine.weight_sync != "in_flight":
        yield is_wrong(
            "engine.recompute_kv",
            engine.recompute_kv,
            f'with weight_sync = "{engine.weight_sync}" no cache outlives a sync: remove it, or set weight_sync = "in_flight"',
        )


def _every(config: Config) -> Iterator[Problem]:
    """A batch can be filled only while it is at most steps_ahead beyond the version that is served: otherwise the next never comes."""
    rollout, every, lag = config.rollout, config.trainer.publish_every, config.debug.publish_lag
    if every == 1:
        return
    if rollout.steps_ahead == "auto":
        yield is_wrong(
            "rollout.steps_ahead", "auto", f"trainer.publish_every = {every} needs a fixed one: set it to {every - 1 + lag} or more"
        )
        return
    at_ship = rollout.enforce == "ship"
    if at_ship and rollout.on_stale == "train":
        return
    key, ahead = ("rollout.max_staleness", rollout.max_staleness) if at_ship else ("rollout.steps_ahead", math.floor(steps_ahead(rollout)))
    if every - 1 + lag > ahead:
        most = max(1, ahead + 1 - lag)
        beside = f" and debug.publish_lag ({lag})" if lag else ""
        yield is_wrong(
            "trainer.publish_every",
            every,
            f"at most {most} with {key} ({ahead:g}){beside}: the batches before the next version that is served could never start: "
            f"lower it, or raise {key} to {every - 1 + lag}",
        )
