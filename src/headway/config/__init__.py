"""From a TOML file to a typed, frozen `Config`, or to one line that says what is wrong, where, and what to do.

`load_config` reads, checks every key by itself and all of them together, and touches nothing but the file. `check_world` looks at what the
config names: files, imports, ports, directories. `resolved` writes a config out whole; `load_config` reads that back to an equal one.
"""

from __future__ import annotations

from headway.config.contradictions import contradictions
from headway.config.load import load_config, synchronous
from headway.config.paths import run_path, state_path
from headway.config.problems import Problem
from headway.config.toml import resolved
from headway.config.world import check_world

__all__ = ["Problem", "check_world", "contradictions", "load_config", "resolved", "run_path", "state_path", "synchronous"]
