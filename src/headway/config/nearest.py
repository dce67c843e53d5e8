"""What a reader most likely meant by a key that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from headway.config.keys import CONFIG, Schema
from headway.config.problems import Problem
from headway.config.toml import toml_value

_LONGEST = 80  # characters of a key that are looked at
_BARE = re.compile(rf"[A-Za-z0-9_-]{{1,{_LONGEST}}}")


def closest(word: str, names: Iterable[str], *, at_least: float) -> list[str]:
    """Return the names most similar to `word` (all that are equally so), if their similarity in 0..1 is high enough."""
    scores = {name: difflib.SequenceMatcher(None, word, name).ratio() for name in names}
    best = max(scores.values(), default=0.0)
    return [name for name, score in scores.items() if score == best >= at_least]


def unknown(section: str, name: str, schema: Schema = CONFIG, *, place: str | None = None) -> Problem:
    """Return the problem of `name` in `section` (empty: at the top of the file), with the nearest valid key.

    `place`: the section as messages name it, where that is another (`faults[0]`).

    Tried in this order: the same name in other letters or with hyphens, the same name in another section, a similar name in this section,
    a similar name anywhere; failing these, the names that there are.
    """
    here = schema.children(section)
    everything = (*schema.keys, *schema.sections)
    normal = name.lower().replace("-", "_")[:_LONGEST]  # likeness takes time with the square of a name's length
    name = name if _BARE.fullmatch(name) else toml_value(name if len(name) <= _LONGEST else name[:_LONGEST] + "...")
    place = section if place is None else place
    path = f"{place}.{name}" if place else name
    elsewhere = [key.path for key in schema.keys.values() if key.name == normal]
    if normal in here:
        meant = [here[normal]]
    elif elsewhere:
        meant = elsewhere
    elif similar := closest(normal, here, at_least=0.6):
        meant = [here[found] for found in similar]
    else:
        similar = closest(normal, [found.rpartition(".")[2] for found in everything], at_least=0.75)
        meant = [found for found in everything if found.rpartition(".")[2] in similar]
    noun = "key" if section else "section"
    if meant:
        named = (schema.heading(found) if found in schema.sections else found for found in meant)
        return Problem(path, f"{path}: no such {noun}; did you mean {' or '.join(named)}?")
    return Problem(path, f"{path}: no such {noun}; there {'is' if len(here) == 1 else 'are'} {', '.join(here)}")
