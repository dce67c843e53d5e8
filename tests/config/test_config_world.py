"""What a config names is looked at before anything starts: files, imports, directories, a port."""

import json
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.config import check_world, load_config
from headway.config.world import checkpoint_lacks
from headway.errors import ConfigError

pytestmark = pytest.mark.e2e  # user code is imported by a process of its own

Refused = Callable[..., ConfigError]

CONFIG = """
[run]
directory = "{root}/runs/{{name}}"
[model]
path = "checkpoint"
[prompts]
source = "prompts.jsonl"
[environment]
entry = "game:attempt"
"""

GAME = """
import sys
print("user code may print")

async def attempt(prompt, policy):
    pass

async def judge(request):
    pass

def advantages(rewards):
    return rewards

def prompts():
    return [{"id": "1"}]

def no_prompts():
    return []

def stream():
    yield {"id": "1"}

def reward(prompts, completions):
    return [0.0] * len(completions)

number = 3
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A config beside everything that it names."""
    (tmp_path / "run.toml").write_text(CONFIG.format(root=tmp_path))
    (tmp_path / "prompts.jsonl").write_text('{"id": "a"}\n')
    (tmp_path / "game.py").write_text(GAME)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "qwen3"}')
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (checkpoint / "tokenizer.json").write_text("{}")
    return tmp_path


def check(root: Path, *overrides: str) -> None:
    file = root / "run.toml"
    check_world(load_config(file, ["engine.launch=none", 'engine.urls=["http://127.0.0.1:1"]', "trainer.kind=external", *overrides]), file)


@pytest.fixture
def refused(root: Path) -> Refused:
    def fails(*overrides: str) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            check(root, *overrides)
        assert str(caught.value).startswith(f"{root / 'run.toml'}: ")
        assert "\n" not in str(caught.value)
        return caught.value

    return fails


def test_a_config_whose_world_is_in_order_passes_and_leaves_no_trace(root: Path) -> None:
    before = sorted(root.iterdir())
    check(
        root,
        "environment.score=game:judge",
        "rollout.advantage=game:advantages",
        "rollout.filter=game:advantages",
        f"eval.prompts={root}/prompts.jsonl",
    )
    assert [path for path in sorted(root.iterdir()) if path.name != "__pycache__"] == before


def test_an_environment_that_does_not_import_is_told_with_its_traceback(root: Path, refused: Refused) -> None:
    (root / "broken.py").write_text("import json\n\nraise ValueError('the cause')\n")
    error = refused("environment.entry=broken:attempt")
    assert "environment.entry: " in str(error)
    assert "ValueError: the cause" in str(error)
    assert "broken.py" in error.detail
    assert "line 3" in error.detail


def test_code_and_prompts_that_cannot_be_used_are_told_together(refused: Refused) -> None:
    named = {
        "environment.entry": ("absent:attempt", 'module "absent" does not import: ModuleNotFoundError'),
        "environment.score": ("game:absent", 'module "game" has no "absent"'),
        "rollout.filter": ("game:absent", 'module "game" has no "absent"'),
        "rollout.advantage": ("game:number", '"game:number" is int, which cannot be called'),
        "prompts.source": ("game:no_prompts", "game:no_prompts is empty"),
        "eval.prompts": ("absent.jsonl", "absent.jsonl"),
    }
    error = refused(*(f"{key}={value}" for key, (value, _) in named.items()))
    lines = f"{error}\n{error.detail}".splitlines()
    for key, (_, words) in named.items():
        assert any(f": {key}: " in line and words in line for line in lines), key


def test_a_reward_function_is_sent_to_single_turn_and_a_stream_is_not_shuffled(refused: Refused) -> None:
    error = refused("environment.entry=game:reward", "prompts.source=game:stream")
    assert "headway.single_turn" in str(error)
    assert "prompts.source: game:stream gives an iterator, which cannot be shuffled" in error.detail


def test_code_that_ends_python_is_told_with_its_output(root: Path, refused: Refused) -> None:
    (root / "crash.py").write_text("import os, sys\nprint('last words')\nsys.stdout.flush()\nos._exit(7)\n")
    error = refused("environment.entry=crash:attempt")
    assert "exit code 7" in str(error)
    assert "last words" in error.detail


BROKEN_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "it has no config.json"),
    "a config that is no JSON": (lambda path: (path / "config.json").write_text("{"), "cannot be read"),
    "a config of something else": (lambda path: (path / "config.json").write_text("{}"), "names no model_type"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "it has no *.safetensors"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "it has no tokenizer.json"),
    "weights cut short": (lambda path: (path / "model.safetensors").write_bytes(b"half"), "model.safetensors is damaged or incomplete"),
    "pickled weights": (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "only *.bin"),
    "a missing shard": (
        lambda path: (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}})),
        "model-00001.safetensors is missing",
    ),
}


@pytest.mark.parametrize(("break_it", "words"), BROKEN_CHECKPOINTS.values(), ids=BROKEN_CHECKPOINTS.keys())
def test_a_directory_lacks_what_makes_a_checkpoint(break_it: Callable[[Path], object], words: str, root: Path) -> None:
    assert checkpoint_lacks(root / "checkpoint") == ""
    break_it(root / "checkpoint")
    assert words in checkpoint_lacks(root / "checkpoint")


def test_a_directory_that_is_no_checkpoint_is_refused(root: Path, refused: Refused) -> None:
    assert "model.path is " in (line := str(refused(f"model.path={root}")))
    assert line.endswith("not a Hugging Face checkpoint: it has no config.json")


def test_a_model_that_is_not_there_or_is_a_file_is_refused(root: Path, refused: Refused) -> None:
    assert "no such directory" in str(refused("model.path=absent"))
    assert "a file, not a directory" in str(refused(f"model.path={root}/run.toml"))


def test_a_used_run_directory_is_refused_and_left_as_it_is(root: Path, refused: Refused) -> None:
    used = root / "runs" / "guess"
    used.mkdir(parents=True)
    (used / "run.json").write_text("{}")
    assert "holds another run" in str(refused("run.name=guess"))
    assert [path.name for path in used.iterdir()] == ["run.json"]
    check(root, "run.name=guess-2")


def test_a_used_state_directory_is_refused(root: Path, refused: Refused) -> None:
    (root / "state").mkdir()
    (root / "state" / "events.sqlite").touch()
    assert "run.state_directory: " in str(refused(f"run.state_directory={root}/state"))


def test_directories_that_cannot_be_made_are_refused(root: Path, refused: Refused) -> None:
    (root / "file").touch()
    assert f"run.directory: {root}/file/run cannot be made: {root}/file is not a directory" in str(
        refused(f"run.directory={root}/file/run")
    )
    assert "is not a directory" in str(refused(f"run.directory={root}/file"))
    assert "run.state_directory: " in str(refused(f"run.state_directory={root}/file"))


def test_a_missing_torch_is_told_with_the_extra_to_install(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as Python itself marks a module that cannot be found
    line = str(refused("trainer.kind=embedded"))
    assert line.endswith('trainer.kind is "embedded", which needs torch: pip install "headway[torch]"')


def test_a_resume_waits_for_the_port_of_the_engine_that_the_last_process_has_left(root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        loaded = load_config(root / "run.toml", [f"engine.port={taken.getsockname()[1]}"])
        threading.Timer(0.3, taken.close).start()
        check_world(loaded, root / "run.toml", resume=True)
    assert taken.fileno() == -1


def test_a_port_in_use_is_refused(root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = root / "run.toml"
        with pytest.raises(ConfigError, match=rf"engine\.port is {port}: Address already in use: choose another"):
            check_world(load_config(file, [f"engine.port={port}"]), file)


def test_replay_files_that_are_not_there_are_refused_one_by_one(root: Path, refused: Refused) -> None:
    (root / "old").mkdir()
    (root / "old" / "a.jsonl").touch()
    (root / "notes.txt").touch()
    check(root, 'replay.files=["old/*.jsonl"]')
    error = refused('replay.files=["old/*.parquet", "old/a.jsonl", "notes.txt"]')
    assert 'replay.files: "old/*.parquet" matches no file (a relative path starts at the config file)' in str(error)
    assert 'replay.files: "notes.txt": ' in error.detail
    assert "a.jsonl" not in f"{error}{error.detail}".replace(".jsonl file", "")


def test_an_address_that_ingest_cannot_listen_on_is_refused(root: Path, refused: Refused) -> None:
    check(root, "ingest.port=0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refused(f"ingest.port={port}")
    assert f"ingest.host, ingest.port are 127.0.0.1, {port}: Address already in use: choose an address of this machine" in str(error)
    assert "ingest.host, ingest.port are 192.0.2.1, 0: " in str(refused("ingest.host=192.0.2.1"))  # reserved for documentation
    file = root / "run.toml"
    with pytest.raises(ConfigError, match=rf"ingest\.port is {port}, and so is engine\.port"):
        check_world(load_config(file, [f"engine.port={port}", f"ingest.port={port}"]), file)


def test_a_file_of_engines_is_there_and_names_engines(root: Path, refused: Refused) -> None:
    (root / "engines.txt").write_text("# none yet\n")
    check(root, f"engine.urls_file={root}/engines.txt")
    (root / "engines.txt").write_text("http://a:1\n\nb:2\n")
    assert "line 3 is no engine's URL" in str(refused(f"engine.urls_file={root}/engines.txt"))
    assert "cannot be read: No such file" in str(refused(f"engine.urls_file={root}/absent.txt"))


def test_a_python_that_is_not_there_is_refused(root: Path) -> None:
    file = root / "run.toml"
    with pytest.raises(ConfigError, match=r"engine\.python is \".*absent/python\": no such program"):
        check_world(load_config(file, ["engine.launch=vllm", f"engine.python={root}/absent/python", "trainer.kind=external"]), file)


def test_the_ports_of_all_launched_engines_are_looked_at(root: Path) -> None:
    file = root / "run.toml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched = ["engine.count=2", f"engine.port={port - 1}", f"ingest.port={port}"]
        with pytest.raises(ConfigError, match=rf"engine\.port is {port - 1}.*: choose another") as caught:
            check_world(load_config(file, launched), file)
    assert "a launched engine takes it" in f"{caught.value}\n{caught.value.detail}"
