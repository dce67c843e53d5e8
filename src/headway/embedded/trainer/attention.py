"""Attention over packed samples: causal within each sample, blind to its neighbours, without a mask of the whole pack.

Registered with transformers as `headway_packed`. A pack is described by its runs of equal-length samples; each run is one batched call of
torch's scaled dot-product attention over views of the packed tensors (no copy, no mask, no call per sample). On GPUs that have it, in half
precision, one call of torch's variable-length flash attention takes the whole pack. Without `segments` it is plain causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from headway.errors import ConfigError

NAME = "headway_packed"


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Where samples lie in a pack: `runs` of (count, length), and, for flash attention only, `cumulative` int32 (samples + 1) starts."""

    runs: tuple[tuple[int, int], ...]
    cumulative: torch.Tensor | None = None

    @classmethod
    def of(cls, runs: tuple[tuple[int, int], ...], device: torch.device, dtype: torch.dtype) -> Segments:
        """Describe a pack for attention on `device` that computes in `dtype`."""
        if not flash_is_available(device, dtype):
            return cls(runs)
        lengths = np.repeat([length for _, length in runs], [count for count, _ in runs])
        return cls(runs, torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device))


def flash_is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch brings variable-length flash attention for this device and dtype (Ampere or newer, half precision, torch >= 2.10)."""
    if device.type != "cuda" or dtype not in {torch.bfloat16, torch.float16} or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401  # its presence is the answer
    except ImportError:
        return False
    return True


def packed_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: query (1, heads, t, d), key and value (1, kv heads, t, d) -> (1, t, heads, d). Signature as transformers calls it."""
    grouped = query.shape[1] != key.shape[1]
    if segments is None:
        out = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2), None
    if segments.cumulative is not None:
        return _flash(query, key, value, segments, scaling, grouped=grouped), None
    sizes = [count * length for count, length in segments.runs]
    # One split, not a slice per run: the gradient of a slice is a zeroed copy of the whole pack.
    pieces = zip(*(x[0].split(sizes, dim=1) for x in (query, key, value)), strict=True)
    parts = []
    for run, piece in zip(segments.runs, pieces, strict=True):
        q, k, v = (x.unflatten(1, run).transpose(0, 1) for x in piece)
        out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).unsqueeze(0), None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scaling: float | None, *, grouped: bool
) -> torch.Tensor:
    """The whole pack by one variable-length call; `window_size=(-1, 0)` is causal."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    longest = max(length for _, length in segments.runs)
    starts = segments.cumulative
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=grouped)
    return out.unsqueeze(0)


def install(model: Any) -> None:
    """Make a Hugging Face decoder use packed attention.

    Raises:
        ConfigError: the model has layers whose attention is not plain and full (sliding windows, linear attention).
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"[model]: {config.model_type} has layers of kind {', '.join(sorted(kinds))}; the embedded trainer takes full_attention only: "
            'choose another model, or trainer.kind = "external"'
        )
    AttentionInterface.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)
