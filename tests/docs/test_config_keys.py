"""Every key of a config or a scenario that a page names by its section exists, and so do the values that keys have a fixed set of."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from headway.settings import Config
from headway.sim.scenario import Scenario
from headway.types import Enforce, OnStale

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md"))]
SECTIONS = {field.name: field.type for field in msgspec.structs.fields(Config)}
SCENARIO = {field.name: field.type for field in msgspec.structs.fields(Scenario)}
FILES = {"json", "jsonl", "log", "toml", "py"}  # metrics.jsonl is no key


def keys_of(section: str) -> set[str]:
    """Return the keys of a section, which may be absent from a config, or be one of a scenario's."""
    declared = [sections[section] for sections in (SECTIONS, SCENARIO) if section in sections]
    kinds = [kind for each in declared for kind in (each, *get_args(each))]
    structs = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return {field.name for kind in structs for field in msgspec.structs.fields(kind)}


def text_of(page: Path) -> str:
    """Return a page but for what it says of other systems' keys."""
    return page.read_text(encoding="utf-8").partition("\n## Other systems' words\n")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_key_that_is_named_exists(page):
    named = re.findall(rf"`(?:\[)?({'|'.join({**SECTIONS, **SCENARIO})})\.([a-z_]+)[` =]", text_of(page))
    assert not [f"{section}.{key}" for section, key in named if key not in keys_of(section) | FILES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_mode_that_is_named_exists(page):
    text = text_of(page)
    assert set(re.findall(r'on_stale = "(\w+)"', text)) <= set(get_args(OnStale))
    assert set(re.findall(r'enforce = "(\w+)"', text)) <= set(get_args(Enforce))


def test_the_pages_name_some():
    named = re.findall(r"`(?:rollout|run|trainer)\.[a-z_]+`", "".join(map(text_of, PAGES)))
    assert len(named) > 30


def test_the_example_that_is_explained_is_the_example():
    page = (ROOT / "docs/how-to/simulate.md").read_text(encoding="utf-8")
    assert f"```toml\n{(ROOT / 'examples/scenarios/math.toml').read_text(encoding='utf-8')}```" in page
