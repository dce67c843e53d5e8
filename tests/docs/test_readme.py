"""What the README shows is run here, as it stands there."""

import re
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from scripted_engine import Reply, ScriptedEngine, Tokens, replies
from small_models import EOS, ids_of, write_tokenizer

from headway.cli import command_line
from headway.config import load_config
from headway.settings import EnvironmentSection
from headway.types import AttemptRequest, Prompt, Rollout, SamplingParams
from headway.worker.inline import InlineWorker

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def write_module(directory: Path, name: str) -> None:
    """Write the README's module `name` into a directory."""
    (text,) = (block for block in blocks("python") if block.startswith(f"# {name}.py"))
    (directory / f"{name}.py").write_text(text, encoding="utf-8")


async def attempt(directory: Path, entry: str, prompt: Prompt, script: Sequence[Reply]) -> tuple[Rollout, list[list[int]]]:
    """Attempt a prompt once through an inline worker; returns the rollout and the ids that each turn sent."""
    model = write_tokenizer(directory / "model")
    async with (
        ScriptedEngine(replies(*script), label="abc-3") as engine,
        opened(EnvironmentSection(entry=entry), directory, model) as worker,
    ):
        request = AttemptRequest(0, 0, 0, prompt, "train", engine.url, 17, SamplingParams(max_tokens=64), 0)
        rollout = await worker.attempt(request)
        assert isinstance(rollout, Rollout), rollout
        return rollout, [sent["token_ids"] for sent in engine.requests]


@asynccontextmanager
async def opened(section: EnvironmentSection, base: Path, model: Path):
    worker = InlineWorker.open(section, base=base, model=model, lineage="abc")
    yield worker
    await worker.close()


async def test_the_environment_of_ones_own_plays_a_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_module(tmp_path, "my_environment")
    turns = [Tokens(ids_of(guess), finish="length") for guess in "274"]
    rollout, sent = await attempt(tmp_path, "my_environment:attempt", Prompt("digit-4", 0, {"hidden": "4"}), turns)
    assert (rollout.reward, rollout.finish, rollout.turns, rollout.metadata) == (1.0, "stop", 3, {"guesses": 3})
    assert sent[-1][-4:] == ids_of("2>7<")


async def test_the_reward_of_ones_own_sums_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_module(tmp_path, "my_reward")
    prompt = Prompt("a", 0, {"prompt": "2+3=", "answer": "5"})
    rollout, _ = await attempt(tmp_path, "my_reward:attempt", prompt, [Tokens([*ids_of("5"), EOS])])
    assert rollout.rewards == {"right": 1.0, "brief": 1 - 2 / 64}
    assert rollout.reward == pytest.approx(1 + 0.1 * (1 - 2 / 64))


def test_every_config_of_the_readme_loads(tmp_path: Path):
    whole, *fragments = blocks("toml")
    for number, text in enumerate([whole, *fragments]):
        path = tmp_path / f"{number}.toml"
        missing = [] if "[model" in text else ['model.init={architecture="qwen3"}']
        missing += [] if "[prompts]" in text else ["prompts.source=p.jsonl"]
        missing += [] if "[environment]" in text else ["environment.entry=m:attempt"]
        path.write_text(text, encoding="utf-8")
        load_config(path, missing)


@pytest.mark.torch
@pytest.mark.e2e
def test_the_config_of_the_readme_is_ready_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_module(tmp_path, "my_environment")
    path = tmp_path / "run.toml"
    path.write_text(blocks("toml")[0], encoding="utf-8")
    assert command_line(["check", str(path), "--set", f"run.directory={tmp_path}/run"]) == 0
    assert "ready to run" in capsys.readouterr().out


def test_every_link_between_pages_leads_somewhere():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    broken = []
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
        for target in targets:
            if "://" not in target and not (page.parent / target.partition("#")[0]).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
