"""Reading: files, overrides, paths, what is missing, and the resolved config that reads back to itself."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import load_config, resolved, run_path, state_path, synchronous
from headway.config.keys import KEYS
from headway.config.toml import toml_value
from headway.errors import ConfigError
from headway.settings import Config, EnvironmentSection, ModelSection, PromptsSection, steps_ahead

MINIMAL = """
[model]
path = "weights"
[prompts]
source = "prompts.jsonl"
[environment]
entry = "guess:attempt"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value


def test_a_minimal_config_takes_every_default(file: Path) -> None:
    config = load_config(file)
    assert config.rollout.max_staleness == 8
    assert steps_ahead(config.rollout) == 2
    assert config.eval is None


def test_paths_start_at_the_config_file_and_those_of_overrides_where_headway_was_started(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(file, ["model.path=other"])
    assert config.prompts.source == str(tmp_path / "prompts.jsonl")
    assert config.model.path == str(elsewhere / "other")


def test_a_prompt_function_is_not_taken_for_a_path(file: Path) -> None:
    assert load_config(file, ["prompts.source=guess:prompts"]).prompts.source == "guess:prompts"


def test_a_resolved_config_reads_back_to_an_equal_one(file: Path, tmp_path: Path) -> None:
    config = load_config(
        file, ["run.finish_when.reward_above=0.97", 'engine.urls=["http://127.0.0.1:1"]', "eval.prompts=x", "trainer.learning_rate=1e-6"]
    )
    written = tmp_path / "config.toml"
    written.write_text(resolved(config), encoding="utf-8")
    assert load_config(written) == config


@given(st.text())
def test_any_text_survives_the_resolved_config(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    config = Config(
        model=ModelSection(path="/weights"),
        prompts=PromptsSection(source="a:b", id_field=text),
        environment=EnvironmentSection(entry="a:b", name=text),
    )
    written = tmp_path_factory.mktemp("resolved") / "config.toml"
    written.write_bytes(resolved(config).encode())
    assert load_config(written) == config


@given(st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False))
def test_any_number_survives_as_toml(number: float) -> None:
    assert float(toml_value(number)) == number


def test_engines_named_by_url_are_not_launched(file: Path) -> None:
    assert load_config(file, ['engine.urls=["http://127.0.0.1:8000"]']).engine.launch == "none"


def test_synchronous_sets_both_staleness_and_steps_ahead_to_zero(file: Path) -> None:
    config = synchronous(load_config(file, ["rollout.steps_ahead=1.5"]))
    assert config.rollout.max_staleness == 0
    assert steps_ahead(config.rollout) == 0


def test_directories_carry_the_name_of_the_run(file: Path) -> None:
    config = load_config(file, ["run.name=guess-2"])
    assert run_path(config) == Path("runs/guess-2")
    assert state_path(config) == Path("runs/guess-2/state")
    assert state_path(load_config(file, ["run.name=x", "run.state_directory=/scratch/{name}"])) == Path("/scratch/x")


# ---- overrides


def test_the_last_override_of_a_key_counts(file: Path) -> None:
    assert load_config(file, ["run.steps=5", "run.steps=7"]).run.steps == 7


@pytest.mark.parametrize("text", ["12", "true", "guess", '"guess"', "1e3"])
def test_text_needs_no_quotes_in_an_override(file: Path, text: str) -> None:
    assert load_config(file, [f"run.name={text}"]).run.name == text.strip('"')


def test_an_override_can_give_a_whole_table(file: Path) -> None:
    config = load_config(file, ['model={path = "", init = {hidden_size = 32}}'])
    assert config.model.init is not None
    assert config.model.init.hidden_size == 32


def test_an_override_without_an_equals_sign_is_refused(file: Path) -> None:
    assert str(refusal(file, "run.steps")) == "--set: 'run.steps' is not key=value: write it like --set rollout.max_staleness=4"


def test_an_override_of_the_wrong_type_is_refused_as_in_a_file(file: Path) -> None:
    assert str(refusal(file, "run.steps=many")) == '--set: run.steps is "many": it must be a whole number, 1 or more'


def test_an_override_that_is_no_toml_is_told_from_where_on(file: Path) -> None:
    """Not that it must be what it looks like."""
    said = '--set: model.init: "{layers=2 width=.5}" is not valid TOML: Unclosed inline table at "width=.5}"'
    assert str(refusal(file, "model.init={layers=2 width=.5}")) == said
    assert str(refusal(file, "engine.urls=[http://a]")).endswith('is not valid TOML: Invalid value at "http://a]"')
    assert str(refusal(file, "engine.urls=['a'")).endswith("is not valid TOML: Unclosed array")
    assert str(refusal(file, f"engine.urls={'[' * 5000}")).endswith("is not valid TOML: it is nested too deep")


def test_text_may_begin_like_a_table(file: Path) -> None:
    assert load_config(file, ["prompts.source={guess}.jsonl"]).prompts.source.endswith("/{guess}.jsonl")


def test_an_override_cannot_smuggle_in_a_second_key(file: Path) -> None:
    assert "run.steps is" in str(refusal(file, "run.steps=1\nseed = 2"))


def test_an_override_below_another_overrides_value_is_refused(file: Path) -> None:
    assert "lies inside a key" in str(refusal(file, "run.steps=1", "run.steps.more=2"))


def test_a_contradiction_names_the_place_that_set_the_key(file: Path) -> None:
    assert str(refusal(file, "rollout.steps_ahead=9")).startswith("--set: rollout.steps_ahead is 9.0: at most rollout.max_staleness (8)")
    assert str(refusal(file, "rollout.max_staleness=1", "rollout.group_size=1")).startswith("--set: rollout.group_size is 1: ")


# ---- files


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    assert str(refusal(tmp_path / "none.toml")) == f"{tmp_path / 'none.toml'}: no such file"


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in str(refusal(tmp_path))


def test_bytes_that_are_no_text_are_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    assert "not a text file in UTF-8" in str(refusal(file))


def test_a_syntax_error_is_told_with_its_line(file: Path) -> None:
    file.write_text(MINIMAL + "[rollout]\ngroup_size = eight\n")
    error = refusal(file)
    assert str(error) == f"{file}: line 9 is not valid TOML: Invalid value"
    assert error.detail == "    group_size = eight"


def test_a_file_that_breaks_off_is_told_with_its_last_line(file: Path) -> None:
    file.write_text(MINIMAL + '[run]\nname = "gue')
    assert f"{file}: line 9 is not valid TOML" in str(refusal(file))


def test_a_byte_order_mark_and_windows_line_ends_are_read(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(file).environment.entry == "guess:attempt"


# ---- what is missing


def test_all_mistakes_are_told_at_once(file: Path) -> None:
    file.write_text(MINIMAL + "[rollout]\ngroup_sise = 8\nmax_staleness = -1\n")
    error = refusal(file, "run.steps=0")
    assert "group_sise" in str(error)
    assert "max_staleness is -1" in error.detail
    assert "--set: run.steps is 0" in error.detail


def test_a_missing_key_is_told_with_an_example(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[prompts]\nsource = "prompts.jsonl"\n[eval]\nn = 2\n')
    error = refusal(path)
    assert str(error).startswith(f"{path}: environment.entry is missing (")
    assert str(error).endswith('add under [environment]: entry = "my_environment:attempt"')
    assert "eval.prompts is missing" in error.detail


def test_every_required_key_has_an_example_that_is_valid() -> None:
    for key in KEYS.values():
        assert key.description, key.path
        if key.required:
            assert key.example is not None, key.path
        if key.example is not None:
            msgspec.convert(key.example, key.declared)
