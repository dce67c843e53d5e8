"""The LoRA adapters of the fake engine: loaded and unloaded by name, answered as vLLM and as SGLang do. They are lost when it dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway.testing.log import FakeLog

Answer = tuple[int, bytes]
CONFIG_FILE = "adapter_config.json"


class Adapters:
    """Names to directories, oldest first."""

    def __init__(self, log: FakeLog) -> None:
        self.loaded: dict[str, str] = {}
        self._log = log

    def load(self, body: dict[str, Any], *, sglang: bool) -> Answer:
        """Take an adapter; one of that name is there: refused, but for vLLM's load_inplace."""
        name, path = str(body.get("lora_name") or ""), str(body.get("lora_path") or "")
        refuse = self._sglang_refused if sglang else _vllm_refused
        if not name or not path:
            return refuse(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name in self.loaded and sglang:
            return refuse(400, f"Failed to load LoRA adapter {name}. A LoRA adapter with this name is loaded already.", "")
        if name in self.loaded and not body.get("load_inplace"):
            in_place = "If you want to load the adapter in place, set 'load_inplace' to True."
            return refuse(400, f"The lora adapter '{name}' has already been loaded. {in_place}", "InvalidUserInput")
        if not (Path(path) / CONFIG_FILE).is_file() or not any(Path(path).glob("*.safetensors")):
            return refuse(400 if sglang else 404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        self.loaded[name] = path
        self._log.add("adapter", name=name, directory=path)
        return self._done(sglang, f"Success: LoRA adapter '{name}' added successfully.")

    def unload(self, body: dict[str, Any], *, sglang: bool) -> Answer:
        """Drop an adapter by name; requests in flight end as they began."""
        name = str(body.get("lora_name") or "")
        if name not in self.loaded:
            message = f"The lora adapter '{name}' cannot be found."
            return self._sglang_refused(400, message, "") if sglang else _vllm_refused(404, message, "NotFoundError")
        del self.loaded[name]
        self._log.add("adapter_gone", name=name)
        return self._done(sglang, f"Success: LoRA adapter '{name}' removed successfully.")

    def _done(self, sglang: bool, text: str) -> Answer:  # noqa: FBT001 -- which of two protocols
        if sglang:
            return 200, json.dumps({"success": True, "error_message": "", "loaded_adapters": self.loaded}).encode()
        return 200, text.encode()

    def _sglang_refused(self, status: int, message: str, _kind: str) -> Answer:
        return status, json.dumps({"success": False, "error_message": message, "loaded_adapters": self.loaded}).encode()


def _vllm_refused(status: int, message: str, kind: str) -> Answer:
    return status, json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
