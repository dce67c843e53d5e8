"""The section `[engine]`: which inference servers there are, who starts them, and how new weights reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headway.settings.section import Section
from headway.types import EngineKind, TransferWay


class EngineSection(Section, frozen=True, kw_only=True):
    """The inference server(s)."""

    kind: Annotated[
        EngineKind,
        Meta(
            description="Protocol of the engines at `urls` and in `urls_file` that are not written with one (`sglang+http://...`). "
            "The embedded engine speaks vLLM's."
        ),
    ] = "vllm"
    launch: Annotated[
        Literal["embedded", "vllm", "sglang", "none"],
        Meta(description="`embedded`: start headway's own engine; `vllm`, `sglang`: start such servers; `none`: attach to `urls`."),
    ] = "embedded"
    urls: Annotated[
        tuple[str, ...], Meta(description='Base URLs of running engines; implies `launch = "none"`.', examples=[["http://127.0.0.1:8000"]])
    ] = ()
    urls_file: Annotated[
        str,
        Meta(
            description="File with a URL per line, watched while the run goes on: engines join and leave as lines come and go. Beside `urls`, "
            'or alone; implies `launch = "none"`. Relative to the config file.'
        ),
    ] = ""
    api_key_variable: Annotated[
        str,
        Meta(
            pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$",
            examples=["VLLM_API_KEY"],
            description="Environment variable that holds the key the engines ask for (`Authorization: Bearer`); the key itself is stored nowhere. "
            "Empty: HEADWAY_ENGINE_KEY, if it is set; a launched engine gets a key of its own.",
        ),
    ] = ""
    count: Annotated[int, Meta(ge=1, description="How many engines to launch.")] = 1
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the first launched engine, the others follow; 0: free ones.")] = 0
    visible_devices: Annotated[
        tuple[str, ...],
        Meta(
            description="GPUs of launched engines, a text for each engine, as in CUDA_VISIBLE_DEVICES; empty: all see what this process sees.",
            examples=[["0,1", "2,3"]],
        ),
    ] = ()
    python: Annotated[
        str,
        Meta(
            description="Python of the environment in which a launched vLLM or SGLang is installed; empty: headway's own. Relative to the config file.",
            examples=[".venv-vllm/bin/python"],
        ),
    ] = ""
    arguments: Annotated[
        tuple[str, ...],
        Meta(description="Further arguments of a launched vLLM or SGLang.", examples=[["--tensor-parallel-size", "2"]]),
    ] = ()
    environment: Annotated[
        tuple[str, ...],
        Meta(description="Further environment variables of a launched vLLM or SGLang.", examples=[["VLLM_CPU_KVCACHE_SPACE=1"]]),
    ] = ()
    device: Annotated[str, Meta(description="torch device of an embedded engine: `cpu`, `cuda`, `cuda:0`, `auto`.")] = "auto"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Meta(description="Weights and cache of a launched engine.")] = "float32"
    max_sequences: Annotated[int, Meta(ge=1, description="Sequences that a launched engine decodes at once.")] = 256
    max_context_tokens: Annotated[int, Meta(ge=0, description="Longest context of a launched engine; 0: the model's.")] = 0
    threads: Annotated[
        int,
        Meta(
            ge=0,
            description="Threads of a launched engine's math libraries; 0: as they choose, torch of an embedded engine one on small CPUs.",
        ),
    ] = 0
    weight_sync: Annotated[
        Literal["in_flight", "wait", "abort_resume"],
        Meta(
            description="At a weight sync, requests in flight are kept and go on under the new weights (`in_flight`), or are aborted and "
            "continued from what they had (`abort_resume`). `wait`: an engine takes no new rollouts before its sync, which waits until those "
            "there have ended: no rollout has tokens of two versions, and engines idle as long as their longest rollout takes."
        ),
    ] = "in_flight"
    recompute_kv: Annotated[bool, Meta(description="With `in_flight`: rebuild the cache of live contexts under the new weights.")] = True
    weight_transfer: Annotated[
        TransferWay,
        Meta(
            description="How weights reach the engines: as a checkpoint in a directory that all can read; as the tensors that have changed since "
            "the version they serve; through shared memory (embedded trainer and engine); or as a LoRA adapter under a name of its own."
        ),
    ] = "directory"
    sync_order: Annotated[
        Literal["all_at_once", "rolling"],
        Meta(description="Whether all engines take new weights together, or one after the other, while the others generate."),
    ] = "all_at_once"
    on_lost: Annotated[
        Literal["continue", "restart"],
        Meta(description="A rollout whose engine is lost goes on at another one from the turns that it has, or starts anew."),
    ] = "continue"
    start_timeout_seconds: Annotated[float, Meta(gt=0, description="An engine must be up, and answer, within this time.")] = 300.0
    max_restarts: Annotated[
        int, Meta(ge=0, description="How often in a row a launched engine that died is started again, with the weights that are served.")
    ] = 3
    lost_timeout_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="An engine that cannot be reached gets so long to come back before the run ends; meanwhile nothing is sent to it.",
        ),
    ] = 60.0
    request_timeout_seconds: Annotated[float, Meta(gt=0, description="Limit of one administrative call (pause, load, resume).")] = 120.0
