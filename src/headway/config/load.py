"""Read a TOML file and `--set` values into a `Config`: every mistake found in one reading, each told in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.config.contradictions import ENTRY, contradictions
from headway.config.engines import launch_beside_urls
from headway.config.keys import CONFIG
from headway.config.problems import as_error
from headway.config.reading import OVERRIDE, Layer, Table, check, check_complete, leaves, merged, parse, parse_overrides
from headway.settings import Config


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in `path`, with `key=value` overrides on top.

    Paths of models, prompts and engines are returned absolute: relative ones start at the config file, those of overrides in the working
    directory.
    Raises ConfigError for a file that cannot be read and for everything that can be known to be wrong from the values alone.
    """
    origin = str(path)
    table, override_table = parse(path), parse_overrides(CONFIG, overrides)
    check(CONFIG, [Layer(origin, table), Layer(OVERRIDE, override_table)])
    table = merged(CONFIG, _anchored(table, path.resolve().parent), _anchored(override_table, Path.cwd()))
    check_complete(CONFIG, Layer(origin, table))
    written = msgspec.convert(table, Config)
    config = _settled(written)
    overridden = set(leaves(CONFIG, override_table))
    if problems := [problem.located(OVERRIDE if problem.key in overridden else origin) for problem in launch_beside_urls(written)]:
        raise as_error(problems)
    if problems := [problem.located(OVERRIDE if problem.key in overridden else origin) for problem in contradictions(config)]:
        raise as_error(problems)
    return config


def synchronous(config: Config) -> Config:
    """Return the config with generation and training in turn: max_staleness = steps_ahead = 0, whatever else it says of the bound.

    Each version is served then: the next batch waits for it.
    """
    rollout = msgspec.structs.replace(config.rollout, max_staleness=0, steps_ahead=0.0, enforce="admission")
    trainer = msgspec.structs.replace(config.trainer, publish_every=1)
    debug = msgspec.structs.replace(config.debug, publish_lag=0)
    return msgspec.structs.replace(config, rollout=rollout, trainer=trainer, debug=debug)


def _settled(config: Config) -> Config:
    """Return the config with what keys imply written out: engines named by `urls` or `urls_file` are not launched."""
    if not config.engine.urls and not config.engine.urls_file:
        return config
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, launch="none"))


def _anchored(table: Table, base: Path) -> Table:
    """Return the table with the paths of models, prompts and engines made absolute from `base`."""

    def anchor(text: str) -> str:
        return text if not text or ENTRY.match(text) else str(base / Path(text).expanduser())

    def anchor_program(text: str) -> str:
        return anchor(text) if "/" in text else text  # a bare name is looked for in PATH

    anchored = dict(table)
    for section, name in (("model", "path"), ("prompts", "source"), ("eval", "prompts")):
        if name in anchored.get(section, {}):
            anchored[section] = {**anchored[section], name: anchor(anchored[section][name])}
    engine = anchored.get("engine", {})
    for name, anchored_by in (("urls_file", anchor), ("python", anchor_program)):
        if name in engine:
            anchored["engine"] = engine = {**engine, name: anchored_by(engine[name])}
    return anchored
