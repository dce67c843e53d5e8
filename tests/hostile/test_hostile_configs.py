"""Configs by people in a hurry, and by nobody: a config, or one line that says what is wrong, and exit code 2. Never a traceback."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import damaged, ended, is_one_short_line, mutated

from headway.cli import command_line
from headway.config import load_config, resolved
from headway.config.keys import KEYS, SECTIONS
from headway.config.nearest import unknown
from headway.config.toml import toml_value
from headway.errors import ConfigError
from headway.settings import Config

VALID = {
    "run": {"name": "a", "steps": 3, "finish_when": {"reward_above": 0.5}},
    "model": {"init": {"architecture": "qwen3", "head_dim": 32}},
    "rollout": {"groups_per_batch": 4, "group_size": 2, "max_staleness": 2, "steps_ahead": "auto", "on_stale": "mask"},
    "prompts": {"source": "prompts.jsonl", "shuffle": False},
    "environment": {"entry": "guess:attempt", "workers": 1},
    "engine": {"urls": ["http://127.0.0.1:8000"], "api_key_variable": "MY_KEY"},
    "trainer": {"betas": [0.9, 0.95], "learning_rate": 1e-5},
    "eval": {"prompts": "held_out.jsonl"},
    "ingest": {"port": 0},
}


SOME = ["=", "a.b=1", "run=3", "run.a.b=1", "run.name.x=1", "engine.urls=[" + "[" * 5000, *(f"{path}=x" for path in sorted(KEYS))]


def as_toml(value):
    return "\n".join(f"{toml_value(name)} = {toml_value(_keyed(keys))}" for name, keys in value.items()) if isinstance(value, dict) else ""


def _keyed(value):
    """Keys that are no bare words stand in quotes; TOML has no null."""
    if isinstance(value, dict):
        return {toml_value(name): _keyed(inner) for name, inner in value.items() if inner is not None}
    return [_keyed(inner) for inner in value if inner is not None] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("config") / "run.toml"


def test_the_config_that_is_mutated_is_one(file):
    file.write_text(as_toml(VALID))
    assert isinstance(load_config(file), Config)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # some mutations are long on purpose
@settings(max_examples=150, deadline=None)
@given(data=st.one_of(mutated(VALID).map(lambda wrong: as_toml(wrong).encode(errors="replace")), damaged(as_toml(VALID).encode())))
def test_any_config_loads_and_reads_back_or_is_refused_in_one_line(file, data):
    file.write_bytes(data)
    config = ended(load_config, file)
    if isinstance(config, ConfigError):
        assert is_one_short_line(config)
        assert str(config).startswith(str(file))
    else:
        tomllib.loads(resolved(config))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.text(max_size=30)
        | st.sampled_from(sorted(KEYS)).map(lambda path: f"{path}=x")
        | st.sampled_from(["=", "a.b=1", "run=3", "run.a.b=1"])
    )
)
def test_any_override_is_taken_or_refused_in_one_line(file, overrides):
    file.write_text(as_toml(VALID))
    config = ended(load_config, file, overrides)
    assert isinstance(config, Config) or is_one_short_line(config)


@given(st.sampled_from(["", *SECTIONS]), st.text(max_size=30))
def test_a_key_that_nobody_knows_is_answered_in_one_line(section, name):
    assert "no such" in unknown(section, name.replace("\n", "")).message


NEW = ["run.shutdown_seconds", "run.stop_before_seconds", "run.stall_seconds", "run.on_stall", "run.keep_payloads", "run.keep_batches"]
NEW += ["run.min_free_bytes", "engine.max_restarts", "engine.lost_timeout_seconds", "trainer.max_restarts", "rollout.max_prompt_failures"]
NEW += ["rollout.max_held_bytes", "engine.api_key_variable"]


@pytest.mark.parametrize("path", NEW)
def test_M01_a_mistaken_key_ends_the_command_with_exit_code_2_and_names_section_and_nearest(file, path, capsys):
    section, name = path.split(".")
    wrong_section = "metrics" if section != "metrics" else "run"
    file.write_text(as_toml(VALID))
    for mistaken in (
        f"{section}.{name[:-1]}",
        f"{section}.{name.upper()}",
        f"{section}.{name.replace('_', '-')}",
        f"{wrong_section}.{name}",
    ):
        for command in ("check", "run"):
            assert command_line([command, str(file), "--set", f"{mistaken}=1"]) == 2
            told = capsys.readouterr().err
            assert told.startswith(f"headway: --set: {mistaken}: no such key; did you mean ")
            assert path in told
            assert "Traceback" not in told


def outside(key):
    if key.choices:
        return [*(f'"{choice}x"' for choice in key.choices), "1", "true"]
    if key.plain is str:
        return ["1a", '"a b"', '"$KEY"']
    return [f"{(key.limit('ge') or 0) - 1}", "nan", "-inf", '"x"', "true"]


@pytest.mark.parametrize("path", NEW)
def test_M03_a_value_out_of_range_ends_the_command_with_exit_code_2_and_says_what_is_allowed(file, path, capsys):
    file.write_text(as_toml(VALID))
    key = KEYS[path]
    for value in outside(key):
        assert command_line(["check", str(file), "--set", f"{path}={value}"]) == 2
        told = capsys.readouterr().err
        assert f"{path} is " in told
        assert "it must be " in told
        assert "Traceback" not in told
        assert all(choice in told for choice in key.choices)
