"""Every config key that a page names by its section exists, and so do the values of the keys that have a fixed set of them."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from headway.settings import Config
from headway.types import Enforce, OnStale

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md"))]
SECTIONS = {field.name: field.type for field in msgspec.structs.fields(Config)}
FILES = {"json", "jsonl", "log", "toml", "py"}  # metrics.jsonl is no key


def keys_of(section: str) -> set[str]:
    """Return the keys of a section, which may be absent from a config."""
    structs = [
        kind for kind in (SECTIONS[section], *get_args(SECTIONS[section])) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    return {field.name for kind in structs for field in msgspec.structs.fields(kind)}


def text_of(page: Path) -> str:
    """Return a page but for what it says of other systems' keys."""
    return page.read_text(encoding="utf-8").partition("\n## Other systems' words\n")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_key_that_is_named_exists(page):
    named = re.findall(rf"`(?:\[)?({'|'.join(SECTIONS)})\.([a-z_]+)[` =]", text_of(page))
    assert not [f"{section}.{key}" for section, key in named if key not in keys_of(section) | FILES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_mode_that_is_named_exists(page):
    text = text_of(page)
    assert set(re.findall(r'on_stale = "(\w+)"', text)) <= set(get_args(OnStale))
    assert set(re.findall(r'enforce = "(\w+)"', text)) <= set(get_args(Enforce))


def test_the_pages_name_some():
    named = re.findall(r"`(?:rollout|run|trainer)\.[a-z_]+`", "".join(map(text_of, PAGES)))
    assert len(named) > 30
