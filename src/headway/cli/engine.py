"""`headway engine`: serves a model with headway's own engine; `headway engine check URL`: says whether a server does what a run needs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Context, Exit, Option

from headway.errors import ConfigError

app = typer.Typer(
    invoke_without_command=True,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Dtype(StrEnum):
    """What an engine may compute in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Kind(StrEnum):
    """The protocol of an engine."""

    VLLM = "vllm"
    SGLANG = "sglang"


@app.callback()
def engine(
    context: Context,
    *,
    model: Annotated[Path | None, Option("--model", metavar="DIR", help="Directory of a Hugging Face checkpoint. Required.")] = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 0,
    device: Annotated[str, Option(help="torch device: cpu, cuda, cuda:0, auto.")] = "auto",
    dtype: Annotated[Dtype, Option(help="Weights and cache.")] = Dtype.FLOAT32,
    max_sequences: Annotated[int, Option(min=1, help="Sequences decoded at once.")] = 256,
    max_context_tokens: Annotated[int, Option(min=0, help="Longest context; 0: the model's.")] = 0,
    threads: Annotated[int, Option(min=0, help="torch threads; 0: one on small CPUs, torch's choice elsewhere.")] = 0,
    label: Annotated[str, Option(help="Version label of the weights in --model.")] = "default",
    await_model_seconds: Annotated[float, Option(min=0, help="Wait this long for the model directory to be complete.")] = 0.0,
) -> None:
    """Serve a model with headway's own engine, until it is interrupted; or check a server (headway engine check URL)."""
    if context.invoked_subcommand is not None:
        if model is not None:
            raise ConfigError("--model of a check stands behind `check`: headway engine check URL --model DIR")
        return
    if model is None:
        raise ConfigError("headway engine needs --model, the directory of a Hugging Face checkpoint: headway engine --model DIR")
    from headway.embedded.engine import EngineServerSettings, serve
    from headway.lifeline import guard

    guard()
    serve(
        EngineServerSettings(
            model=model,
            host=host,
            port=port,
            device=device,
            dtype=dtype.value,
            max_sequences=max_sequences,
            max_context_tokens=max_context_tokens,
            threads=threads,
            label=label,
            await_model_seconds=await_model_seconds,
        )
    )


@app.command()
def check(
    url: Annotated[str, Argument(metavar="URL", help="Base URL of a running server; sglang+http://... names the protocol, too.")],
    *,
    kind: Annotated[Kind, Option("--kind", help="The protocol it speaks, unless the URL says so.")] = Kind.VLLM,
    model: Annotated[
        Path | None, Option("--model", metavar="DIR", help="The checkpoint that it serves, for checks of weight syncs.")
    ] = None,
    other: Annotated[
        Path | None, Option("--other", metavar="DIR", help="A checkpoint of the same shapes that it is given meanwhile.")
    ] = None,
    adapter: Annotated[
        Path | None, Option("--adapter", metavar="DIR", help="A LoRA adapter of the model that it serves, for the check of adapters.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Say whether an inference server does what a run needs, check by check. It is left as it was found: use one that nobody else uses.

    Exit codes: 0 nothing failed, 1 a check failed, 2 the input cannot be used.
    """
    from headway.cli.engine_check import check_engine

    raise Exit(check_engine(url, kind=kind.value, model=model, other=other, adapter=adapter, as_json=json))
