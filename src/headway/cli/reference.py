"""The reference pages of all keys, of configs and of scenarios, written from the structs that define them."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

from headway.config.keys import CONFIG, Key, Schema
from headway.config.kinds import example_of
from headway.config.toml import toml_value

_CONFIG = """\
# Config reference

Every key of a run's TOML file. A key that is not listed here is an error. `headway run CONFIG --set section.key=value` gives any of them
another value for one run. This page is written by `make reference` from the definitions in `src/headway/settings/`.
"""
_SCENARIO = """\
# Scenario reference

Every key of the TOML file that `headway simulate` and `headway plan` read. A key that is not listed here is an error.
`--set section.key=value` gives any of them another value. Required are [training], with a time, and one of `tokens` and `seconds` of
[workload]. This page is written by `make reference` from the definitions in `src/headway/sim/scenario.py`.

A key whose value is a *distribution* takes a number, which is always that number, or a table of one of these kinds. Means are of what is
drawn, in the key's unit.

{kinds}

The values of an empirical one may lie in a file of their own, one number a line: `{{kind = "empirical", file = "latencies.csv"}}`, relative
to the scenario. `--set workload.tokens.sigma=1.5` changes one field of a table.

[rollout] is that of a config. How long rollouts are is said by [workload] alone: the keys of sampling (`temperature`, `top_p`, `top_k`,
`max_tokens`) and `advantage` change nothing of what is simulated, and `filter` is refused.
"""
_KINDS = {
    "fixed": "always `value`",
    "uniform": "anything from `low` to `high`, all alike",
    "lognormal": "what rollouts are mostly like: `sigma` is the standard deviation of the logarithm, 0 to 10",
    "pareto": "a heavy tail: P(L > x) falls as x to the power of -`shape`, above 1 (below 2 the variance is infinite)",
    "empirical": "what was measured: one of `values`, all alike",
    "mixture": "one of `parts`, each a weight above 0 and a table",
}


def reference() -> str:
    """Return the page of configs, in Markdown."""
    return _page(_CONFIG, CONFIG)


def scenario_reference() -> str:
    """Return the page of scenarios, in Markdown."""
    from headway.planning.scenario_file import SCENARIO

    rows = [
        "| kind | is | like |",
        "|---|---|---|",
        *(f"| `{kind}` | {_cell(meaning)} | `{example_of(kind)}` |" for kind, meaning in _KINDS.items()),
    ]
    return _page(_SCENARIO.format(kinds="\n".join(rows)), SCENARIO)


def _page(head: str, schema: Schema) -> str:
    return "\n".join([head, *(_section(schema, path) for path in schema.sections)])


def _section(schema: Schema, path: str) -> str:
    keys = [key for key in schema.keys.values() if key.section == path]
    rows = ["| key | value | default | meaning |", "|---|---|---|---|", *map(_row, keys)]
    return "\n".join([f"## {schema.heading(path)}", "", cleandoc(schema.sections[path].__doc__ or ""), "", *rows, ""])


def _row(key: Key) -> str:
    cells = [f"`{key.name}`", "; ".join(_value(key)), _default(key), key.description]
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _value(key: Key) -> Iterator[str]:
    if key.choices:
        yield ", ".join(f"`{toml_value(choice)}`" for choice in key.choices)
    elif key.tables:
        yield "number or distribution"
    else:
        plain = {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(key.plain, key.kind.partition(" like ")[0])
        yield plain + key.or_words.replace('"', "`")
    if key.range:
        yield key.range
    if key.example is not None:
        yield f"like `{toml_value(key.example)}`"


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "unset" if key.default is None else f"`{toml_value(key.default)}`"
