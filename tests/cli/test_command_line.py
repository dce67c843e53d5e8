"""The commands as a person meets them: what is printed where, and the exit code."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from headway import __version__
from headway.cli import command_line
from headway.cli.reference import reference
from headway.config.keys import KEYS

ROOT = Path(__file__).parents[2]

CONFIG = """
[model]
path = "checkpoint"
[prompts]
source = "prompts.jsonl"
[environment]
entry = "{entry}:attempt"
[engine]
urls = ["http://127.0.0.1:1"]
[trainer]
kind = "external"
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG.format(entry="fine"))
    (tmp_path / "prompts.jsonl").write_text('{"id": "a"}\n')
    (tmp_path / "fine.py").write_text("async def attempt(prompt, policy): ...\n")
    (tmp_path / "broken.py").write_text("raise ValueError('the cause')\n")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "qwen3"}')
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (checkpoint / "tokenizer.json").write_text("{}")
    return tmp_path


COMMANDS = [
    "run",
    "check",
    "engine",
    "trainer",
    "inspect",
    "chaos",
    "plan",
    "simulate",
    "retrace",
    "config-reference",
    "scenario-reference",
]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {command}  " in output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([command, "--help"]) == 0
    assert f"Usage: headway {command}" in capsys.readouterr().out


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"headway {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["rnu"], ["run"], ["run", "--sett", "a=b", "x.toml"], ["trainer"], ["engine", "--model", "x", "--port", "70000"]],
    ids=" ".join,
)
def test_a_command_line_that_is_wrong_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(arguments) == 2
    assert "Error: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_mistake_in_a_config_is_one_line_on_stderr_and_ends_with_2(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([command, "run.toml", "--set", "rollout.max_stalenes=4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "headway: --set: rollout.max_stalenes: no such key; did you mean rollout.max_staleness?\n"
    assert not (root / "runs").exists()


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_file_that_is_missing_is_one_line_on_stderr_and_ends_with_2(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([command, "none.toml"]) == 2
    assert capsys.readouterr().err == "headway: none.toml: no such file\n"


def test_a_name_that_is_none_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["run", "run.toml", "--name", "../up"]) == 2
    assert 'run.name is "../up": it must be text like "guess-2"' in capsys.readouterr().err


@pytest.mark.e2e
def test_check_of_a_config_that_is_in_order_says_what_would_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["check", "run.toml", "--set", "run.name=a"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("run.toml: ready to run in runs/a: at most 1000 batches of 32 groups x 8 rollouts, max_staleness 8")
    assert captured.err == ""
    assert not (root / "runs").exists()


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["run", "check"])
def test_an_environment_that_does_not_import_shows_its_traceback_below_the_line(
    command: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "run.toml").write_text(CONFIG.format(entry="broken"))
    assert command_line([command, "run.toml"]) == 2
    first, *below = capsys.readouterr().err.splitlines()
    assert first.startswith('headway: run.toml: environment.entry: module "broken" does not import: ValueError: the cause')
    assert "Traceback (most recent call last):" in below
    assert below[-1] == "ValueError: the cause"
    assert not (root / "runs").exists()


@pytest.mark.e2e
def test_the_program_starts_without_torch_numpy_or_rich() -> None:
    program = (
        "import sys; from headway.cli import command_line; code = command_line(['--help']); "
        "print([name for name in ('torch', 'transformers', 'numpy', 'aiohttp', 'rich.console', 'asyncio') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.endswith("\n[]\n")


@pytest.mark.e2e
def test_python_dash_m_headway_is_the_command_line(root: Path) -> None:
    ended = subprocess.run([sys.executable, "-m", "headway", "check", "none.toml"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "headway: none.toml: no such file\n")


def test_the_reference_in_docs_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["config-reference"]) == 0
    printed = capsys.readouterr().out
    assert printed == reference()
    assert (ROOT / "docs/reference/config.md").read_text(encoding="utf-8") == printed, "run `make reference`"


def test_the_reference_has_a_row_for_every_key_with_its_meaning() -> None:
    rows = reference().splitlines()
    for key in KEYS.values():
        row = next(row for row in rows if row.startswith(f"| `{key.name}` |") and key.description.replace("|", "\\|") in row)
        assert row.replace("\\|", "").count("|") == 5


def test_ctrl_c_while_a_command_is_imported_ends_with_130_and_no_traceback():
    program = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "headway.cli.commands":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from headway.cli import main
main(["run", "run.toml"])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
