"""The examples' environments, and that what they import costs nothing before it is used."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_engine import Tokens, replies
from small_models import BOS, EOS, ids_of

from headway.formats.rollout import decode_samples


def example(name: str):
    file = Path(__file__).parents[2] / "examples" / name / "environment.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("guesses", "history", "reward"),
    [("53", "?5<3", 1.0), ("3", "?3", 1.0), ("0129", "?0>1>2>9", 0.0), ("x9 1", "?x!9< !1", 0.0)],
)
async def test_guess_answers_each_guess_and_rewards_finding_the_digit(bench, guesses, history, reward):
    async with bench(example("guess").attempt, replies(*(Tokens(ids_of(guess), finish="length") for guess in guesses))) as b:
        rollout = await b.attempt(fields={"hidden": "3"})
    (sample,) = decode_samples(rollout.payload)
    assert sample.token_ids.tolist() == [BOS, *ids_of(history)]
    assert (rollout.reward, rollout.finish, rollout.turns) == (reward, "stop", len(guesses))


async def test_an_end_token_is_no_digit(bench):
    script = replies(Tokens([EOS]), Tokens(ids_of("3"), finish="length"))
    async with bench(example("guess").attempt, script) as b:
        rollout = await b.attempt(fields={"hidden": "3"})
    assert decode_samples(rollout.payload)[0].token_ids.tolist() == [BOS, *ids_of("?"), EOS, *ids_of("!3")]


@pytest.mark.parametrize(
    ("written", "reward"),
    [("407.", 1.0), ("407", 0.75), ("4071", 0.75), ("40.", 0.5), ("417.", 0.25), (".", 0.0), ("740.", 0.0)],
)
async def test_copy_rewards_the_right_prefix_and_the_end(bench, written, reward):
    ids = [*ids_of(written.rstrip(".")), *([EOS] if written.endswith(".") else [])]
    async with bench(example("copy").attempt, Tokens(ids, finish="stop" if written.endswith(".") else "length")) as b:
        rollout = await b.attempt(fields={"prompt": "<bos>407=", "answer": "407"})
    assert rollout.reward == reward
    assert b.engine.requests[0]["token_ids"] == [BOS, *ids_of("407=")]


def test_importing_headway_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import headway; print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {"aiohttp", "jinja2", "msgspec", "numpy", "pyarrow", "tokenizers", "torch", "transformers"}


def test_every_export_is_there():
    import headway

    assert all(getattr(headway, name) is not None for name in headway.__all__)
    assert set(headway.__all__) <= set(dir(headway))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = headway.nothing
