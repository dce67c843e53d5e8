"""The sections of a config as frozen values, each key with its type, range, default and meaning.

These structs are the one definition of every key: `headway.config` reads TOML into them and checks what spans keys, the reference page is
generated from them, and the parts (engine, trainer, sink, ...) take their section as it is. Nothing here reads a file.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from msgspec import Meta

from headway.settings.engine import EngineSection
from headway.settings.rollout import RolloutSection, replayed_groups, smallest_batch, steps_ahead
from headway.settings.run import FinishWhen, RunSection
from headway.settings.section import NotNegative, Section

__all__ = [
    "Config",
    "DebugSection",
    "EngineSection",
    "EnvironmentSection",
    "EvalSection",
    "FinishWhen",
    "IngestSection",
    "InitSection",
    "MetricsSection",
    "ModelSection",
    "PromptsSection",
    "ReplaySection",
    "RolloutSection",
    "RunSection",
    "Section",
    "TrainerSection",
    "eval_source",
    "replayed_groups",
    "smallest_batch",
    "steps_ahead",
    "thread_limit",
]

SMALL_MACHINE_CORES = 4


class InitSection(Section, frozen=True, kw_only=True):
    """A model with random weights, made at the start of the run. Names are those of Hugging Face configs."""

    architecture: Annotated[Literal["qwen3", "llama"], Meta(description="Model family.")] = "qwen3"
    alphabet: Annotated[
        str, Meta(description="Characters of a one-token-per-character vocabulary; `<pad>`, `<bos>`, `<eos>` come before them.")
    ] = "0123456789abcdefghijklmnopqrstuvwxyz .,:;!?<>=+-*/()#\n"
    hidden_size: Annotated[int, Meta(ge=8, description="Width.")] = 64
    num_hidden_layers: Annotated[int, Meta(ge=1, description="Depth.")] = 2
    num_attention_heads: Annotated[int, Meta(ge=1, description="Query heads.")] = 4
    num_key_value_heads: Annotated[int, Meta(ge=1, description="Key / value heads; divides num_attention_heads.")] = 4
    head_dim: Annotated[int, Meta(ge=2, description="Width of one head.")] = 32
    intermediate_size: Annotated[int, Meta(ge=8, description="Width of the MLP.")] = 128
    max_position_embeddings: Annotated[int, Meta(ge=8, description="Longest context.")] = 512
    initializer_range: Annotated[float, Meta(gt=0, description="Standard deviation of the initial weights.")] = 0.06
    tie_word_embeddings: Annotated[bool, Meta(description="Share input and output embeddings.")] = False


class ModelSection(Section, frozen=True, kw_only=True):
    """The policy: a checkpoint, or random weights. Exactly one of `path` and `init`."""

    path: Annotated[
        str,
        Meta(
            description="Directory of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json). Relative to the config file."
        ),
    ] = ""
    init: Annotated[InitSection | None, Meta(description='Random weights: `{architecture = "qwen3", hidden_size = 64, ...}`.')] = None


class PromptsSection(Section, frozen=True, kw_only=True):
    """Where prompts come from."""

    source: Annotated[
        str,
        Meta(
            min_length=1,
            examples=["prompts.jsonl"],
            description="`prompts.jsonl`, a directory of Parquet or Arrow files, or `module:function` (an iterable of dicts). "
            "Relative to the config file.",
        ),
    ]
    id_field: Annotated[str, Meta(description="Field with a prompt's stable id; absent from a row: its row number.")] = "id"
    shuffle: Annotated[bool, Meta(description="Shuffle each epoch, reproducibly from run.seed.")] = True
    epochs: Annotated[int, Meta(ge=0, description="Passes over the prompts; 0: as many as the run takes.")] = 0


class EnvironmentSection(Section, frozen=True, kw_only=True):
    """The user's code that turns a prompt into a rollout, and where it runs."""

    entry: Annotated[
        str,
        Meta(
            pattern=r"^[\w.]+:[\w.]+$",
            examples=["my_environment:attempt"],
            description="`module:name` of `async def attempt(prompt, policy) -> Outcome`, or of `headway.single_turn(...)`. "
            "Modules beside the config file are found.",
        ),
    ]
    name: Annotated[str, Meta(description="Name in the records of rollouts; empty: the entry's module.")] = ""
    score: Annotated[
        str,
        Meta(
            description="`module:name` of a scorer, run between finish and batch: `async def`, or a plain function, which runs in a thread. "
            "Empty: the outcome's reward counts."
        ),
    ] = ""
    score_scope: Annotated[
        Literal["rollout", "group"],
        Meta(description="Whether the scorer sees one rollout at a time or a whole group (then incomplete groups are dropped)."),
    ] = "rollout"
    score_concurrency: Annotated[int, Meta(ge=1, description="Scorer calls at once.")] = 64
    score_timeout_seconds: Annotated[float, Meta(ge=0, description="A scorer call may take this long; 0: no limit.")] = 600.0
    workers: Annotated[int, Meta(ge=0, description="Processes that run environments; 0: inside the orchestrator (tests, debugging).")] = 1
    cleanup_seconds: Annotated[float, Meta(ge=0, description="How long cancelled user code may take to clean up.")] = 10.0
    truncated_reward: Annotated[
        float,
        Meta(description="Reward of a rollout that ran out of room, where the environment does not catch RolloutTruncated itself."),
    ] = 0.0


class TrainerSection(Section, frozen=True, kw_only=True):
    """What turns batches into weights."""

    kind: Annotated[
        Literal["embedded", "external"],
        Meta(description="`embedded`: start headway's own trainer; `external`: a program of yours that keeps the contract."),
    ] = "embedded"
    device: Annotated[str, Meta(description="torch device: `cpu`, `cuda`, `cuda:0`, `auto`.")] = "auto"
    dtype: Annotated[Literal["float32", "bfloat16"], Meta(description="Compute type; master weights stay float32.")] = "float32"
    threads: Annotated[int, Meta(ge=0, description="torch threads; 0: one on small CPUs, torch's choice elsewhere.")] = 0
    loss: Annotated[
        Literal["decoupled_ppo", "tis", "ppo", "reinforce"],
        Meta(description="`reinforce` does not correct for staleness: for demonstrations."),
    ] = "decoupled_ppo"
    aggregation: Annotated[
        Literal["token", "sequence", "constant"],
        Meta(description="Mean over tokens, over sequences of token means, or a sum over a constant. Denominators are original lengths."),
    ] = "token"
    constant_denominator_tokens: Annotated[
        int, Meta(ge=0, description='Denominator per sequence of `aggregation = "constant"`; 0: the longest sample of the batch.')
    ] = 0
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW.")] = 1e-6
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up.")] = 10
    schedule: Annotated[Literal["constant", "cosine"], Meta(description="Learning rate after the warm-up.")] = "cosine"
    schedule_steps: Annotated[int, Meta(ge=0, description="Step at which the cosine ends; 0: run.steps.")] = 0
    final_learning_rate_share: Annotated[float, Meta(ge=0, le=1, description="Where the cosine ends, as a share of learning_rate.")] = 0.05
    betas: Annotated[tuple[float, float], Meta(description="AdamW betas.")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW weight decay.")] = 0.0
    gradient_clip: Annotated[float, Meta(ge=0, description="Clip the gradient's norm; 0: off.")] = 1.0
    minibatches: Annotated[int, Meta(ge=1, description="Optimiser steps per batch; whole groups are dealt out to them.")] = 1
    max_tokens_per_microbatch: Annotated[int, Meta(ge=1, description="Samples are packed into sequences of at most this many tokens.")] = (
        8192
    )
    clip_low: Annotated[float, Meta(ge=0, lt=1, description="Ratio clip below 1.")] = 0.2
    clip_high: Annotated[float, Meta(ge=0, description="Ratio clip above 1.")] = 0.28
    allow_uncorrected: Annotated[
        bool, Meta(description='Allow `rollout.on_stale = "train"` with a loss that does not correct for staleness (`reinforce`).')
    ] = False
    importance_cap: Annotated[float, Meta(gt=0, description="Cap of the truncated importance weight (`decoupled_ppo`, `tis`).")] = 2.0
    entropy_bonus: Annotated[float, Meta(ge=0, description="Weight of the entropy bonus.")] = 0.0
    keep_checkpoints: Annotated[
        int, Meta(ge=2, description="Newest weights and trainer states kept; what an engine loads or serves is never removed.")
    ] = 4
    keep_every: Annotated[int, Meta(ge=0, description="Also keep every n-th version for good; 0: none.")] = 0
    start_timeout_seconds: Annotated[float, Meta(gt=0, description="The trainer must be ready within this time.")] = 300.0
    max_restarts: Annotated[
        int, Meta(ge=0, description="How often in a row, without a new version, an embedded trainer that died is started again.")
    ] = 3
    publish_every: Annotated[
        int,
        Meta(
            ge=1,
            description="Engines are given every n-th version, and the last; the versions between are trained and never served. "
            "At most rollout.steps_ahead + 1: past that nothing could start.",
        ),
    ] = 1
    poll_seconds: Annotated[float, Meta(gt=0, description="How often trainer and orchestrator look for each other's files.")] = 0.01


class EvalSection(Section, frozen=True, kw_only=True):
    """Evaluation on prompts of its own, beside training."""

    every: Annotated[int, Meta(ge=1, description="Evaluate every so many versions, and at the end.")] = 25
    prompts: Annotated[
        str, Meta(min_length=1, description="Source of the evaluation prompts, as in [prompts].", examples=["held_out.jsonl"])
    ]
    limit: Annotated[int, Meta(ge=0, description="Use the first so many prompts; 0: all.")] = 0
    n: Annotated[int, Meta(ge=1, description="Rollouts per prompt.")] = 1
    temperature: Annotated[NotNegative | None, Meta(description="Sampling temperature; unset: that of [rollout].")] = None
    hold_seconds: Annotated[
        float, Meta(ge=0, description="A weight sync waits this long for a running evaluation; then the evaluation is flagged mixed.")
    ] = 30.0
    at_start: Annotated[bool, Meta(description="Also evaluate version 0.")] = False


class MetricsSection(Section, frozen=True, kw_only=True):
    """What is reported, and how often."""

    interval_seconds: Annotated[float, Meta(gt=0, description="Interval of pipeline.jsonl and of the progress line.")] = 1.0
    progress: Annotated[
        Literal["auto", "plain", "none"],
        Meta(description="Progress line: live on a terminal (`auto`), otherwise, and as `plain`, one every 5 s at most; or none."),
    ] = "auto"
    exporters: Annotated[
        tuple[str, ...],
        Meta(
            description="`module:name` of functions that take the run directory (a Path) and return an exporter: rows go there as well. "
            "Modules beside the config file are found. One that fails or hangs loses its rows; the run goes on.",
            examples=[["my_tracker:Tracker"]],
        ),
    ] = ()


class ReplaySection(Section, frozen=True, kw_only=True):
    """Rollouts of earlier runs, or of another program, to train on beside live ones: outside of the gate and of the staleness statistics."""

    files: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            description="`rollouts.parquet` files of batches, or `.jsonl` files with a group per line. Relative to the config file; `*` matches.",
            examples=[["runs/old/batches/*/rollouts.parquet"]],
        ),
    ]
    epochs: Annotated[int, Meta(ge=0, description="Passes over the files; 0: as many as the run takes.")] = 1


class IngestSection(Section, frozen=True, kw_only=True):
    """Take rollouts over HTTP (`POST /v1/rollouts`) while the run goes on: marked external, outside of the gate and of the statistics."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on; 0: a free one, written to ingest.json in the run directory.")
    ] = 0
    max_request_bytes: Annotated[int, Meta(ge=1024, description="Largest request that is read.")] = 64 * 1024**2


class DebugSection(Section, frozen=True, kw_only=True):
    """For studies, not for runs that shall learn well."""

    publish_lag: Annotated[
        int,
        Meta(
            ge=0,
            description="Serve the version so many before the newest one. At most rollout.steps_ahead; "
            "with max_staleness = steps_ahead = n every token is trained on at a staleness of exactly n, from batch n on.",
        ),
    ] = 0


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    rollout: RolloutSection = RolloutSection()
    prompts: PromptsSection
    environment: EnvironmentSection
    engine: EngineSection = EngineSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection | None = None
    metrics: MetricsSection = MetricsSection()
    replay: ReplaySection | None = None
    ingest: IngestSection | None = None
    debug: DebugSection = DebugSection()


def eval_source(evaluation: EvalSection, prompts: PromptsSection) -> PromptsSection:
    """Return where evaluation prompts come from: one pass in their own order, with ids by the field that training prompts use."""
    return PromptsSection(source=evaluation.prompts, id_field=prompts.id_field, shuffle=False, epochs=1)


def thread_limit(asked: int) -> int:
    """Return how many threads a launched process may compute with: as asked; 0 asked: one on small CPUs, no limit (0) elsewhere.

    Engine, trainer, workers and orchestrator share a small machine: more than one thread each would fight over the cores. Counted are the
    cores that this process may use.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked or (1 if cores <= SMALL_MACHINE_CORES else 0)
