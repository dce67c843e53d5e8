"""What keys say about each other: configs whose every value is valid, and which could still not run, would hang, or would learn nothing.

Pure: a config in, problems out. Each problem names the key to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from headway.config.problems import Problem
from headway.config.toml import toml_value
from headway.rules.advantages import ADVANTAGES, GROUP_RELATIVE
from headway.settings import Config, InitSection

ENTRY = re.compile(r"^[\w.]+:[\w.]+$")
_DEVICE = re.compile(r"^(auto|cpu|(cuda|xpu|mps)(:\d+)?)$")


def contradictions(config: Config) -> list[Problem]:
    """Return everything that is wrong with the values of a config taken together; empty: it can run."""
    return [
        *_run(config),
        *_model(config),
        *_pacing(config),
        *_learning_signal(config),
        *_lengths(config),
        *_environment(config),
        *_engine(config),
        *_trainer(config),
    ]


def _is(key: str, value: object, problem: str) -> Problem:
    return Problem(key, f"{key} is {toml_value(value)}: {problem}")


def _run(config: Config) -> Iterator[Problem]:
    for key, directory in (("run.directory", config.run.directory), ("run.state_directory", config.run.state_directory)):
        if re.search(r"[{}]", directory.replace("{name}", "")):
            yield _is(key, directory, "only {name} may stand in braces")
    if not config.run.directory.strip():
        yield _is("run.directory", config.run.directory, 'it must name a directory, like "runs/{name}"')


def _model(config: Config) -> Iterator[Problem]:
    path, init = config.model.path, config.model.init
    if path and init is not None:
        yield Problem("model.path", "model.path and model.init are both given: keep one (init starts from random weights)")
    elif not path and init is None:
        yield Problem(
            "model.path",
            'model.path is missing: name a Hugging Face checkpoint under [model], like path = "models/my-model", '
            'or ask for random weights, like init = {architecture = "qwen3"}',
        )
    if init is not None:
        yield from _init(init)


def _init(init: InitSection) -> Iterator[Problem]:
    if init.num_attention_heads % init.num_key_value_heads:
        yield _is(
            "model.init.num_key_value_heads",
            init.num_key_value_heads,
            f"it must divide model.init.num_attention_heads ({init.num_attention_heads})",
        )
    if init.head_dim % 2:
        yield _is("model.init.head_dim", init.head_dim, "it must be even (rotary positions turn pairs)")
    twice = sorted({character for character in init.alphabet if init.alphabet.count(character) > 1})
    if twice:
        yield _is("model.init.alphabet", init.alphabet, f"{toml_value(twice[0])} stands in it twice: each character is one token")
    elif not init.alphabet:
        yield _is("model.init.alphabet", init.alphabet, "it must hold at least one character")


def _pacing(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if isinstance(rollout.steps_ahead, float) and rollout.steps_ahead > rollout.max_staleness:
        yield _is(
            "rollout.steps_ahead",
            rollout.steps_ahead,
            f"at most rollout.max_staleness ({rollout.max_staleness}): what starts further ahead would be too old to train on",
        )
    if rollout.max_concurrent < rollout.group_size:
        yield _is(
            "rollout.max_concurrent",
            rollout.max_concurrent,
            f"at least rollout.group_size ({rollout.group_size}): a group starts as a whole, so none ever could",
        )
    if rollout.on_stale != "mask":
        yield _is("rollout.on_stale", rollout.on_stale, 'not available yet: use "mask"')


def _learning_signal(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    known = ", ".join(toml_value(name) for name in ADVANTAGES)
    if rollout.advantage not in ADVANTAGES and not ENTRY.match(rollout.advantage):
        yield _is("rollout.advantage", rollout.advantage, f'it must be one of {known}, or "module:function"')
    if rollout.group_size == 1 and rollout.advantage in GROUP_RELATIVE:
        yield _is(
            "rollout.group_size",
            rollout.group_size,
            f"{toml_value(rollout.advantage)} compares the members of a group, so every advantage would be 0: make it 2 or more, or set "
            'rollout.advantage to a "module:function" of yours',
        )
    if rollout.filter and not ENTRY.match(rollout.filter):
        yield _is("rollout.filter", rollout.filter, 'it must be "module:function", or empty')
    if rollout.temperature == 0:
        yield _is("rollout.temperature", 0, "it must be above 0 to train: greedy rollouts do not explore (eval.temperature may be 0)")
    if rollout.top_k == 1:
        yield _is("rollout.top_k", 1, "greedy rollouts do not explore: 0 (off), or 2 or more")


def _lengths(config: Config) -> Iterator[Problem]:
    rollout, engine, trainer, init = config.rollout, config.engine, config.trainer, config.model.init
    if rollout.max_rollout_tokens == 1:
        yield _is("rollout.max_rollout_tokens", 1, "a prompt token and a sampled one make 2: 0 (the engine's context), or 2 or more")
    longest, key = rollout.max_rollout_tokens, "rollout.max_rollout_tokens"
    if engine.launch == "embedded" and engine.max_context_tokens:
        if longest > engine.max_context_tokens:
            yield _is(key, longest, f"at most engine.max_context_tokens ({engine.max_context_tokens})")
        longest, key = engine.max_context_tokens, "engine.max_context_tokens"
    if init is not None:
        if longest > init.max_position_embeddings:
            yield _is(key, longest, f"at most model.init.max_position_embeddings ({init.max_position_embeddings})")
        longest = longest or init.max_position_embeddings
    longest_sample = rollout.max_rollout_tokens or longest
    if trainer.kind == "embedded" and longest_sample > trainer.max_tokens_per_microbatch:
        yield _is(
            "trainer.max_tokens_per_microbatch",
            trainer.max_tokens_per_microbatch,
            f"a sample may have {longest_sample} tokens and must fit whole: raise it, or lower rollout.max_rollout_tokens",
        )


def _environment(config: Config) -> Iterator[Problem]:
    environment = config.environment
    if environment.score and not ENTRY.match(environment.score):
        yield _is("environment.score", environment.score, 'it must be "module:name", or empty')
    if environment.score_scope == "group" and not environment.score:
        yield _is("environment.score_scope", environment.score_scope, "it needs environment.score, the scorer that sees the group")


def _engine(config: Config) -> Iterator[Problem]:
    engine = config.engine
    if engine.launch == "none" and not engine.urls:
        yield Problem(
            "engine.urls", 'engine.urls is missing: with launch = "none", name the engines, like urls = ["http://127.0.0.1:8000"]'
        )
    for url in engine.urls:
        if not _is_base_url(url):
            yield _is("engine.urls", engine.urls, f'{toml_value(url)} must be a base URL like "http://127.0.0.1:8000"')
    if len({url.rstrip("/") for url in engine.urls}) < len(engine.urls):
        yield _is("engine.urls", engine.urls, "an engine is named twice")
    if engine.launch == "embedded" and not _DEVICE.match(engine.device):
        yield _is("engine.device", engine.device, 'it must be "auto", "cpu", "cuda" or "cuda:0" (or xpu, mps)')


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:
        return False


def _trainer(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.kind != "embedded":
        return
    if not _DEVICE.match(trainer.device):
        yield _is("trainer.device", trainer.device, 'it must be "auto", "cpu", "cuda" or "cuda:0" (or xpu, mps)')
    if trainer.minibatches > config.rollout.groups_per_batch:
        yield _is(
            "trainer.minibatches",
            trainer.minibatches,
            f"at most rollout.groups_per_batch ({config.rollout.groups_per_batch}): whole groups are dealt out to minibatches",
        )
    if not all(0 <= beta < 1 for beta in trainer.betas):
        yield _is("trainer.betas", trainer.betas, "each must be 0 or more and below 1")
    if trainer.constant_denominator_tokens and trainer.aggregation != "constant":
        yield _is(
            "trainer.constant_denominator_tokens",
            trainer.constant_denominator_tokens,
            f'only aggregation = "constant" uses it, and trainer.aggregation is {toml_value(trainer.aggregation)}: remove one of the two',
        )
    if trainer.schedule == "cosine" and 0 < trainer.schedule_steps <= trainer.warmup_steps:
        yield _is("trainer.schedule_steps", trainer.schedule_steps, f"it must come after trainer.warmup_steps ({trainer.warmup_steps})")
