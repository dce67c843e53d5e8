"""Configs whose every value is valid and which could still not run: each is refused, with the key to change."""

from pathlib import Path

import pytest

from headway.config import load_config, synchronous
from headway.errors import ConfigError
from headway.secrecy import concealed

VALID = """
[model]
init = {}
[prompts]
source = "prompts.jsonl"
[environment]
entry = "guess:attempt"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(VALID)
    return path


CASES = {
    "admission further ahead than a token may be old": ("rollout.steps_ahead", ["rollout.steps_ahead=2.5", "rollout.max_staleness=2"]),
    "ahead of a synchronous trainer": ("rollout.steps_ahead", ["rollout.max_staleness=0", "rollout.steps_ahead=0.5"]),
    "fewer rollouts in flight than a group has": ("rollout.max_concurrent", ["rollout.max_concurrent=7", "rollout.group_size=8"]),
    "a group of one compared with itself": ("rollout.group_size", ["rollout.group_size=1", "rollout.advantage=rloo"]),
    "an advantage that does not exist": ("rollout.advantage", ["rollout.advantage=gae"]),
    "a filter that is no entry": ("rollout.filter", ["rollout.filter=keep"]),
    "greedy training rollouts": ("rollout.temperature", ["rollout.temperature=0"]),
    "the likeliest token only": ("rollout.top_k", ["rollout.top_k=1"]),
    "no room for a sampled token": ("rollout.max_rollout_tokens", ["rollout.max_rollout_tokens=1"]),
    "rollouts longer than the model": ("rollout.max_rollout_tokens", ["rollout.max_rollout_tokens=513"]),
    "rollouts longer than the engine": (
        "rollout.max_rollout_tokens",
        ["rollout.max_rollout_tokens=65", "engine.max_context_tokens=64"],
    ),
    "an engine longer than the model": ("engine.max_context_tokens", ["engine.max_context_tokens=1024"]),
    "samples that do not fit a microbatch": ("trainer.max_tokens_per_microbatch", ["trainer.max_tokens_per_microbatch=511"]),
    "waiting without end": ("rollout.timeout_seconds", ["rollout.on_stale=wait", "rollout.timeout_seconds=0"]),
    "waiting for a score without end": (
        "environment.score_timeout_seconds",
        ["rollout.on_stale=wait", "environment.score=judge:score", "environment.score_timeout_seconds=0"],
    ),
    "waiting at the ship side": ("rollout.enforce", ["rollout.on_stale=wait", "rollout.enforce=ship"]),
    "training on the stale without a correction": ("trainer.loss", ["rollout.on_stale=train", "trainer.loss=reinforce"]),
    "pacing what is not paced": ("rollout.steps_ahead", ["rollout.steps_ahead=auto", "rollout.enforce=ship"]),
    "less than a batch may wait": ("rollout.max_ready_groups", ["rollout.max_ready_groups=31", "rollout.enforce=ship"]),
    "batches by tokens of rollouts without end": ("rollout.max_rollout_tokens", ["rollout.batch_tokens=1000"]),
    "a token budget under one group": ("rollout.batch_tokens", ["rollout.batch_tokens=799", "rollout.max_rollout_tokens=100"]),
    "more minibatches than the budget surely holds groups": (
        "trainer.minibatches",
        ["rollout.batch_tokens=1600", "rollout.max_rollout_tokens=100", "trainer.minibatches=3"],
    ),
    "a batch of replayed groups alone": ("rollout.replayed_groups", ["rollout.replayed_groups=32"]),
    "replay without a place": ("rollout.replayed_groups", ["rollout.replayed_groups=0", 'replay.files=["old.jsonl"]']),
    "replay into batches of one group": ("rollout.groups_per_batch", ["rollout.groups_per_batch=1", "ingest.port=0"]),
    "a lag that admission does not cover": ("debug.publish_lag", ["debug.publish_lag=3", "rollout.steps_ahead=2"]),
    "a lag behind an automatic pace": ("rollout.steps_ahead", ["debug.publish_lag=1", "rollout.steps_ahead=auto"]),
    "a lag past what is kept": ("trainer.keep_checkpoints", ["debug.publish_lag=4", "rollout.steps_ahead=4"]),
    "heads that do not divide": ("model.init.num_key_value_heads", ["model.init.num_key_value_heads=3"]),
    "more key heads than query heads": ("model.init.num_key_value_heads", ["model.init.num_key_value_heads=8"]),
    "an odd head": ("model.init.head_dim", ["model.init.head_dim=31"]),
    "a character twice": ("model.init.alphabet", ["model.init.alphabet=abca"]),
    "no character": ("model.init.alphabet", ['model.init.alphabet=""']),
    "two models": ("model.path", ["model.path=weights"]),
    "an engine nowhere": ("engine.urls", ["engine.launch=none"]),
    "an engine at no URL": ("engine.urls", ['engine.urls=["localhost:8000"]']),
    "an engine at a broken URL": ("engine.urls", ['engine.urls=["http://[::1"]']),
    "an engine named twice": ("engine.urls", ['engine.urls=["http://a:1", "http://a:1/"]']),
    "an engine of an unknown protocol": ("engine.urls", ['engine.urls=["tgi+http://a:1"]']),
    "an engine named twice, as two kinds": ("engine.urls", ['engine.urls=["http://a:1", "sglang+http://ann:pass@A:1/"]']),
    "engines launched and named": ("engine.count", ["engine.count=2", 'engine.urls=["http://a:1"]']),
    "servers launched and named": ("engine.launch", ["engine.launch=vllm", 'engine.urls=["http://a:1"]']),
    "servers launched and in a file": ("engine.launch", ["engine.launch=sglang", "engine.urls_file=engines.txt"]),
    "devices of engines elsewhere": ("engine.visible_devices", ['engine.visible_devices=["0"]', "engine.urls_file=engines.txt"]),
    "devices for some engines": ("engine.visible_devices", ['engine.visible_devices=["0", "1"]', "engine.count=3"]),
    "more ports than there are": ("engine.port", ["engine.port=65535", "engine.count=2"]),
    "headway's own engine in another's protocol": ("engine.kind", ["engine.kind=sglang"]),
    "vLLM in another's protocol": ("engine.kind", ["engine.kind=sglang", "engine.launch=vllm"]),
    "arguments of an engine that takes none": ("engine.arguments", ['engine.arguments=["--x"]']),
    "a port that nobody looks at": ("engine.arguments", ['engine.arguments=["--seed", "1", "--port", "8000"]', "engine.launch=vllm"]),
    "a key that nobody knows": ("engine.arguments", ['engine.arguments=["--api_key=x"]', "engine.launch=sglang"]),
    "a key in the environment": ("engine.environment", ['engine.environment=["VLLM_API_KEY=x"]', "engine.launch=vllm"]),
    "variables of engines elsewhere": ("engine.environment", ['engine.environment=["A=1"]', 'engine.urls=["http://a:1"]']),
    "a Python for headway's own engine": ("engine.python", ["engine.python=.venv/bin/python"]),
    "a variable without a value": ("engine.environment", ['engine.environment=["A"]', "engine.launch=vllm"]),
    "a variable without a name": ("engine.environment", ['engine.environment=["=1"]', "engine.launch=sglang"]),
    "memory shared with a server": ("engine.weight_transfer", ["engine.weight_transfer=memory", "engine.launch=vllm"]),
    "memory shared with a trainer elsewhere": ("engine.weight_transfer", ["engine.weight_transfer=memory", "trainer.kind=external"]),
    "adapters for headway's own engine": ("engine.weight_transfer", ["engine.weight_transfer=lora", "trainer.kind=external"]),
    "adapters of headway's own trainer": ("engine.weight_transfer", ["engine.weight_transfer=lora", "engine.launch=vllm"]),
    "a cache that no sync leaves": ("engine.recompute_kv", ["engine.recompute_kv=false", "engine.weight_sync=wait"]),
    "versions served too rarely": ("trainer.publish_every", ["trainer.publish_every=4", "rollout.steps_ahead=2"]),
    "versions served too rarely for part of a batch": ("trainer.publish_every", ["trainer.publish_every=4", "rollout.steps_ahead=2.5"]),
    "versions served too rarely for the default": ("trainer.publish_every", ["trainer.publish_every=4"]),
    "versions served too rarely in turn": ("trainer.publish_every", ["trainer.publish_every=2", "rollout.max_staleness=0"]),
    "versions served too rarely, and late": (
        "trainer.publish_every",
        ["trainer.publish_every=3", "debug.publish_lag=1", "rollout.steps_ahead=2"],
    ),
    "versions served too rarely for what is shipped": (
        "trainer.publish_every",
        ["trainer.publish_every=4", "rollout.enforce=ship", "rollout.max_staleness=2"],
    ),
    "versions served rarely at an automatic pace": ("rollout.steps_ahead", ["trainer.publish_every=2", "rollout.steps_ahead=auto"]),
    "a device that is none": ("engine.device", ["engine.device=cuda0"]),
    "a trainer device that is none": ("trainer.device", ["trainer.device=gpu"]),
    "more minibatches than groups": ("trainer.minibatches", ["trainer.minibatches=33"]),
    "betas that do not decay": ("trainer.betas", ["trainer.betas=[0.9, 1.0]"]),
    "a constant that nobody reads": ("trainer.constant_denominator_tokens", ["trainer.constant_denominator_tokens=512"]),
    "a cosine that ends in the warm-up": ("trainer.schedule_steps", ["trainer.schedule_steps=10", "trainer.warmup_steps=10"]),
    "a scorer that is no entry": ("environment.score", ["environment.score=judge"]),
    "group scoring without a scorer": ("environment.score_scope", ["environment.score_scope=group"]),
    "braces that mean nothing": ("run.directory", ["run.directory=runs/{nme}"]),
    "a directory of nothing": ("run.directory", ['run.directory=""']),
    "a wall-time limit that its own drain takes up": ("run.stop_before_seconds", ["run.stop_before_seconds=60"]),
    "braces in the state directory": ("run.state_directory", ["run.state_directory=/scratch/{run}"]),
}


@pytest.mark.parametrize(("key", "overrides"), CASES.values(), ids=CASES.keys())
def test_is_refused(key: str, overrides: list[str], file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    line = str(caught.value).partition(": ")[2]
    assert line.startswith((f"{key} is ", f"{key} and "))
    assert caught.value.detail == ""


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.max_staleness=0"],
        ["rollout.max_staleness=2", "rollout.steps_ahead=2"],
        ["rollout.group_size=8", "rollout.max_concurrent=8"],
        ["rollout.group_size=1", "rollout.advantage=mine:advantages"],
        ["rollout.max_rollout_tokens=512"],
        ["trainer.max_tokens_per_microbatch=64", "rollout.max_rollout_tokens=64"],
        ["trainer.kind=external", "trainer.minibatches=64", "trainer.device=tpu"],
        ["trainer.aggregation=constant", "trainer.constant_denominator_tokens=512"],
        ['engine.urls=["http://[::1]:8000", "https://engines.example/a"]', "engine.device=tpu"],
        ["engine.device=cuda:1", "trainer.device=cuda"],
        ["engine.urls_file=engines.txt"],
        ["engine.urls_file=engines.txt", 'engine.urls=["sglang+http://[::1]:30000"]', "engine.kind=sglang"],
        ["engine.count=2", 'engine.visible_devices=["0,1", "2,3"]', "engine.port=65534"],
        ["engine.launch=vllm", 'engine.arguments=["--x"]', 'engine.environment=["A=", "B=1=2"]', "engine.python=python3"],
        ["engine.launch=sglang", "engine.kind=sglang"],
        ["engine.weight_transfer=memory"],
        ["engine.weight_transfer=lora", "engine.launch=vllm", "trainer.kind=external"],
        ["engine.recompute_kv=false"],
        ["trainer.publish_every=3", "rollout.steps_ahead=2"],
        ["trainer.publish_every=2", "rollout.steps_ahead=2", "debug.publish_lag=1"],
        ["trainer.publish_every=9", "rollout.enforce=ship", "rollout.max_staleness=8"],
        ["trainer.publish_every=99", "rollout.enforce=ship", "rollout.on_stale=train"],
        ["run.steps=1", "run.finish_when.reward_above=0.9"],
        ["prompts.epochs=0", "run.drain_timeout_seconds=0"],
        ["rollout.on_stale=train", "trainer.loss=tis"],
        ["rollout.on_stale=train", "trainer.loss=reinforce", "trainer.allow_uncorrected=true"],
        ["rollout.on_stale=train", "trainer.loss=reinforce", "trainer.kind=external"],
        ["rollout.on_stale=wait", "rollout.timeout_seconds=60"],
        ["rollout.on_stale=drop", "rollout.enforce=ship", "rollout.max_ready_groups=32"],
        ["rollout.steps_ahead=auto", "rollout.max_staleness=0"],
        ["rollout.batch_tokens=800", "rollout.max_rollout_tokens=100"],
        ["debug.publish_lag=2", "rollout.steps_ahead=2", "rollout.max_staleness=2", "trainer.keep_checkpoints=3"],
    ],
)
def test_is_accepted(overrides: list[str], file: Path) -> None:
    load_config(file, overrides)


def test_a_model_is_asked_for_with_both_ways_of_naming_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(VALID.replace("init = {}", ""))
    with pytest.raises(ConfigError, match=r"model\.path is missing: .*path = .*init = "):
        load_config(path)


def test_a_value_as_long_as_its_file_is_shown_in_part(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(VALID)
    with pytest.raises(ConfigError, match=r"engine\.urls is \[.*\.\.\..* must be a base URL like") as refused:
        load_config(path, [f'engine.urls=["{"[" * 5000}"]'])
    assert len(str(refused.value)) < 600 + len(str(path))


def test_paths_of_engines_start_at_the_config_and_a_bare_program_is_looked_for(file: Path) -> None:
    engine = load_config(file, ["engine.launch=vllm", "engine.python=python3"]).engine
    assert engine.python == "python3"
    file.write_text(VALID + '[engine]\nlaunch = "vllm"\npython = ".venv/bin/python"\n')
    assert load_config(file).engine.python == str(file.parent / ".venv/bin/python")
    file.write_text(VALID + '[engine]\nurls_file = "engines.txt"\n')
    engine = load_config(file).engine
    assert (engine.launch, engine.urls_file) == ("none", str(file.parent / "engines.txt"))


def test_a_run_in_turn_serves_every_version(file: Path) -> None:
    config = load_config(file, ["trainer.publish_every=3", "rollout.steps_ahead=2"])
    assert synchronous(config).trainer.publish_every == 1


def test_a_login_in_an_address_that_is_refused_is_not_told(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, ['engine.urls=["http://ann:sesame@a:x"]'])
    assert "sesame" not in concealed(str(caught.value))
