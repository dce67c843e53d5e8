"""What keys say about each other: configs whose every value is valid, and which could still not run, would hang, or would learn nothing.

Pure: a config in, problems out. Each problem names the key to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headway.config.engines import DEVICE, engine_contradictions
from headway.config.problems import Problem, is_wrong
from headway.config.staleness import staleness_contradictions
from headway.config.toml import shown, toml_value
from headway.rules.advantages import ADVANTAGES, GROUP_RELATIVE
from headway.settings import Config, InitSection, smallest_batch

ENTRY = re.compile(r"^[\w.]+:[\w.]+$")


def contradictions(config: Config) -> list[Problem]:
    """Return everything that is wrong with the values of a config taken together; empty: it can run."""
    return [
        *_run(config),
        *_model(config),
        *staleness_contradictions(config),
        *_learning_signal(config),
        *_lengths(config),
        *_environment(config),
        *engine_contradictions(config),
        *_trainer(config),
        *_metrics(config),
    ]


def _run(config: Config) -> Iterator[Problem]:
    for key, directory in (("run.directory", config.run.directory), ("run.state_directory", config.run.state_directory)):
        if re.search(r"[{}]", directory.replace("{name}", "")):
            yield is_wrong(key, directory, "only {name} may stand in braces")
    if not config.run.directory.strip():
        yield is_wrong("run.directory", config.run.directory, 'it must name a directory, like "runs/{name}"')
    reserve = config.run.drain_timeout_seconds + config.run.shutdown_seconds
    if 0 < config.run.stop_before_seconds <= reserve:
        parts = f"run.drain_timeout_seconds + run.shutdown_seconds ({reserve:g})"
        yield is_wrong("run.stop_before_seconds", config.run.stop_before_seconds, f"the run would drain at once: it must be above {parts}")


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
        yield is_wrong(
            "model.init.num_key_value_heads",
            init.num_key_value_heads,
            f"it must divide model.init.num_attention_heads ({init.num_attention_heads})",
        )
    if init.head_dim % 2:
        yield is_wrong("model.init.head_dim", init.head_dim, "it must be even (rotary positions turn pairs)")
    twice = sorted({character for character in init.alphabet if init.alphabet.count(character) > 1})
    if twice:
        yield is_wrong("model.init.alphabet", init.alphabet, f"{shown(twice[0])} stands in it twice: each character is one token")
    elif not init.alphabet:
        yield is_wrong("model.init.alphabet", init.alphabet, "it must hold at least one character")


def _learning_signal(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    known = ", ".join(toml_value(name) for name in ADVANTAGES)
    if rollout.advantage not in ADVANTAGES and not ENTRY.match(rollout.advantage):
        yield is_wrong("rollout.advantage", rollout.advantage, f'it must be one of {known}, or "module:function"')
    if rollout.group_size == 1 and rollout.advantage in GROUP_RELATIVE:
        yield is_wrong(
            "rollout.group_size",
            rollout.group_size,
            f"{toml_value(rollout.advantage)} compares the members of a group, so every advantage would be 0: make it 2 or more, or set "
            'rollout.advantage to a "module:function" of yours',
        )
    if rollout.filter and not ENTRY.match(rollout.filter):
        yield is_wrong("rollout.filter", rollout.filter, 'it must be "module:function", or empty')
    if rollout.temperature == 0:
        yield is_wrong("rollout.temperature", 0, "it must be above 0 to train: greedy rollouts do not explore (eval.temperature may be 0)")
    if rollout.top_k == 1:
        yield is_wrong("rollout.top_k", 1, "greedy rollouts do not explore: 0 (off), or 2 or more")


def _lengths(config: Config) -> Iterator[Problem]:
    rollout, engine, trainer, init = config.rollout, config.engine, config.trainer, config.model.init
    if rollout.max_rollout_tokens == 1:
        yield is_wrong("rollout.max_rollout_tokens", 1, "a prompt token and a sampled one make 2: 0 (the engine's context), or 2 or more")
    longest, key = rollout.max_rollout_tokens, "rollout.max_rollout_tokens"
    if engine.launch == "embedded" and engine.max_context_tokens:
        if longest > engine.max_context_tokens:
            yield is_wrong(key, longest, f"at most engine.max_context_tokens ({engine.max_context_tokens})")
        longest, key = engine.max_context_tokens, "engine.max_context_tokens"
    if init is not None:
        if longest > init.max_position_embeddings:
            yield is_wrong(key, longest, f"at most model.init.max_position_embeddings ({init.max_position_embeddings})")
        longest = longest or init.max_position_embeddings
    longest_sample = rollout.max_rollout_tokens or longest
    if trainer.kind == "embedded" and longest_sample > trainer.max_tokens_per_microbatch:
        yield is_wrong(
            "trainer.max_tokens_per_microbatch",
            trainer.max_tokens_per_microbatch,
            f"a sample may have {longest_sample} tokens and must fit whole: raise it, or lower rollout.max_rollout_tokens",
        )


def _environment(config: Config) -> Iterator[Problem]:
    environment = config.environment
    if environment.score and not ENTRY.match(environment.score):
        yield is_wrong("environment.score", environment.score, 'it must be "module:name", or empty')
    if environment.score_scope == "group" and not environment.score:
        yield is_wrong("environment.score_scope", environment.score_scope, "it needs environment.score, the scorer that sees the group")


def _trainer(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.kind != "embedded":
        return
    if not DEVICE.match(trainer.device):
        yield is_wrong("trainer.device", trainer.device, 'it must be "auto", "cpu", "cuda" or "cuda:0" (or xpu, mps)')
    if trainer.minibatches > (smallest := smallest_batch(config.rollout)) > 0:
        key = "rollout.batch_tokens" if config.rollout.batch_tokens else "rollout.groups_per_batch"
        yield is_wrong(
            "trainer.minibatches",
            trainer.minibatches,
            f"a batch may have no more than {smallest} groups ({key}), and whole groups are dealt out to minibatches",
        )
    if not all(0 <= beta < 1 for beta in trainer.betas):
        yield is_wrong("trainer.betas", trainer.betas, "each must be 0 or more and below 1")
    if trainer.constant_denominator_tokens and trainer.aggregation != "constant":
        yield is_wrong(
            "trainer.constant_denominator_tokens",
            trainer.constant_denominator_tokens,
            f'only aggregation = "constant" uses it, and trainer.aggregation is {toml_value(trainer.aggregation)}: remove one of the two',
        )
    if trainer.schedule == "cosine" and 0 < trainer.schedule_steps <= trainer.warmup_steps:
        yield is_wrong(
            "trainer.schedule_steps", trainer.schedule_steps, f"it must come after trainer.warmup_steps ({trainer.warmup_steps})"
        )


def _metrics(config: Config) -> Iterator[Problem]:
    for entry in config.metrics.exporters:
        if not ENTRY.match(entry):
            yield is_wrong("metrics.exporters", entry, 'each must have the form "module:name"')
