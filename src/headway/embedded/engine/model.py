"""A Hugging Face decoder-only model that runs over the slot cache: packed prefill, batched decode, weights swapped in place.

The modelling code is transformers' own; only its attention function is ours. An architecture whose attention is not plain (sliding
windows, linear attention, encoders, compressed caches) is refused by name, and what slips through is caught by `self_test`, which compares
step-wise log-probabilities with the model's own forward pass before the engine serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from headway.embedded.engine.attention import IMPLEMENTATION, DecodePlan, PrefillPlan
from headway.embedded.engine.cache import CacheShape, SlotCache
from headway.embedded.engine.weights import WeightLoader
from headway.embedded.threads import LOADING
from headway.errors import ConfigError, StorageError
from headway.formats.bounded import refuse_irregular_in
from headway.formats.tensor_headers import read_tensors

# Largest difference of a log-probability that the self-test accepts: rounding, by the width of the type.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


class SlotModel:
    """A model, its cache and its weight loader. Not thread-safe: one thread runs it."""

    def __init__(self, model: Any, loader: WeightLoader, *, max_rows: int, max_length: int) -> None:
        config = model.config
        self._model = model
        self.loader = loader
        self.vocabulary = int(config.vocab_size)
        self.context = max_length
        self.eos_ids = _eos_ids(model)
        self.cache = SlotCache(_cache_shape(model), max_rows=max_rows, max_length=max_length)

    @torch.inference_mode()
    def prefill(self, rows: npt.NDArray[np.int64], contexts: Sequence[npt.NDArray[np.int64]]) -> torch.Tensor:
        """Cache the contexts (token ids) in the rows and return the logits after each, float32 [n, vocabulary]."""
        plan = PrefillPlan(self.cache, rows, [len(context) for context in contexts])
        return self._forward(np.concatenate(contexts), plan, plan.last)

    @torch.inference_mode()
    def decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """Append one token to each of rows 0 .. n-1 at its position and return the logits after it, float32 [n, vocabulary]."""
        return self._forward(tokens, DecodePlan(self.cache, positions), 0)

    def _forward(self, tokens: npt.NDArray[np.int64], plan: PrefillPlan | DecodePlan, keep: torch.Tensor | int) -> torch.Tensor:
        ids = torch.from_numpy(tokens).to(self.cache.keys.device)[None]
        output = self._model(input_ids=ids, position_ids=plan.positions[None], use_cache=False, logits_to_keep=keep, plan=plan)
        return output.logits[0].float()

    @torch.inference_mode()
    def self_test(self) -> None:
        """Refuse (ConfigError) a model whose step-wise log-probabilities differ from its own full forward pass."""
        generator = np.random.default_rng(0)
        contexts = [generator.integers(self.vocabulary, size=4) for _ in range(min(2, self.cache.rows))]  # there may be room for one only
        rows = np.arange(len(contexts))
        try:
            steps = [self.prefill(rows, [context[:2] for context in contexts])]
            steps += [self.decode(np.array([c[i] for c in contexts]), np.full_like(rows, i)) for i in (2, 3)]
        except (TypeError, AttributeError, KeyError, RuntimeError, IndexError) as error:
            raise ConfigError(f"{self.name} cannot run over a plain key/value cache ({error}): serve it with vLLM") from error
        stepwise = torch.stack(steps, 1).log_softmax(-1)
        self._model.set_attn_implementation("sdpa" if self._model._supports_sdpa else "eager")
        plain = [self._model(input_ids=torch.from_numpy(c[None]).to(stepwise.device), use_cache=False).logits[0, 1:] for c in contexts]
        self._model.set_attn_implementation(IMPLEMENTATION)
        difference = (torch.stack(plain).float().log_softmax(-1) - stepwise).abs().max().item()
        if not difference <= TOLERANCE[self._model.dtype]:
            raise ConfigError(
                f"{self.name}: step-wise log-probabilities differ from its forward pass by {difference:.3g}: serve it with vLLM"
            )

    @property
    def name(self) -> str:
        """The architecture's name."""
        return type(self._model).__name__


def load_model(directory: Path, *, device: torch.device, dtype: torch.dtype, max_rows: int, max_context_tokens: int) -> SlotModel:
    """Load a checkpoint and test it; ConfigError says what is wrong with the directory or the architecture."""
    config = read_config(directory)
    refuse_unsupported(config)
    longest = int(getattr(config, "max_position_embeddings", 0) or max_context_tokens)
    context = min(longest, max_context_tokens or longest)
    if context < 2:
        raise ConfigError(f"{directory}/config.json names no max_position_embeddings: set engine.max_context_tokens")
    transformers_logging.disable_progress_bar()
    try:
        refuse_irregular_in(directory)
        tensors = read_tensors(directory)
        with LOADING:
            model, report = AutoModelForCausalLM.from_pretrained(
                directory, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True, output_loading_info=True
            )
    except (StorageError, ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"{directory} cannot be loaded: {str(error).splitlines()[0]}") from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"{directory} lacks {missing[0]} ({len(missing)} tensors are missing): the checkpoint is incomplete")
    model.to(device).eval().requires_grad_(False)
    slots = SlotModel(model, WeightLoader(model, tensors), max_rows=max_rows, max_length=context)
    slots.self_test()
    return slots


def read_config(directory: Path) -> Any:
    """Return the transformers config of a checkpoint directory."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} holds no config.json: point the engine at a Hugging Face checkpoint directory")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{directory}/config.json cannot be used: {str(error).splitlines()[0]}") from error


def refuse_unsupported(config: Any) -> None:
    """Raise ConfigError, naming the architecture and the reason, unless every layer keeps a plain full-attention cache."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    reason = ""
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder"
    elif kinds:
        reason = f"it has layers of {', '.join(sorted(kinds))}"
    elif getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        reason = "it has sliding-window attention"
    elif getattr(config, "kv_lora_rank", None):
        reason = "it compresses its key/value cache"
    elif type(config) not in AutoModelForCausalLM._model_mapping:
        reason = "it is no decoder-only language model"
    else:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
        if getattr(model_class, "_is_stateful", False) or not getattr(model_class, "_supports_attention_backend", False):
            reason = "its attention cannot be replaced"
    if reason:
        name = (getattr(config, "architectures", None) or [config.model_type])[0]
        raise ConfigError(f"{name} is not served by the embedded engine: {reason}. Serve it with vLLM and name its address in engine.urls")


def _eos_ids(model: Any) -> tuple[int, ...]:
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    eos = generation.eos_token_id if generation is not None and generation.eos_token_id is not None else model.config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _cache_shape(model: Any) -> CacheShape:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return CacheShape(config.num_hidden_layers, heads, head_dim, model.dtype, model.device)
