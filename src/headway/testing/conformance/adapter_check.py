"""The check of LoRA adapters: loaded under a name, asked for by it, gone when unloaded."""

from __future__ import annotations

from typing import Any

from headway.adapters.engines.generation import excerpt
from headway.testing.conformance.bench import Bench
from headway.testing.conformance.verdicts import Skipped, expect


async def adapters(bench: Bench) -> str:
    """A LoRA adapter is loaded under a name of its own, listed, generates by that name, and is refused once it is unloaded."""
    if bench.adapter is None:
        raise Skipped("needs --adapter, a LoRA adapter of the model that is served")
    server, name = bench.server, f"conformance-{bench.run}"
    prefix = "" if server.is_sglang else "/v1"
    body = {"lora_name": name, "lora_path": str(bench.adapter)}
    await server.get(f"{prefix}/load_lora_adapter", body, method="POST")
    try:
        listed = await server.models()
        expect(name in listed, f"/v1/models names {listed}, not {name}")
        again = await server.call("POST", f"{prefix}/load_lora_adapter", body)
        expect(again.status == 400, f"the same name again was answered {again.status}: {excerpt(again.body)}")
        answer = await server.generate(bench.name(), bench.prompt(), max_tokens=4, model=name)
        expect(bool(answer.ids) and len(answer.ids) == len(answer.logprobs), f"{len(answer.logprobs)} logprobs for {len(answer.ids)} ids")
    finally:
        unload: dict[str, Any] = {"lora_name": name}
        await server.get(f"{prefix}/unload_lora_adapter", unload, method="POST")
    gone = await server.send(bench.name(), bench.prompt(), max_tokens=1, model=name)
    expect(gone.status in {400, 404}, f"unloaded, it was answered {gone.status}: {excerpt(gone.body)}")
    return ""
