"""Attention over the slot cache, registered with transformers under `IMPLEMENTATION`.

The model sees one packed sequence [1, N]: all tokens of all prompts of a prefill, or the newest token of every row of a decode step. A
plan, passed through the model's keyword arguments, says which row and position each token has. Every layer writes its keys and values
into the cache and attends over it. No mask function is registered under the name, so transformers builds no mask: causality is the
plan's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface

from headway.embedded.engine.cache import SlotCache

IMPLEMENTATION = "headway_slots"
LENGTH_ROUNDING = 8  # fused attention kernels want masks aligned


class Plan(Protocol):
    """Where the N packed tokens of one forward pass live, and what each of them may see."""

    cache: SlotCache
    rows: torch.Tensor  # int64 [N]
    positions: torch.Tensor  # int64 [N]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the output for queries [N, heads, head_dim], of their shape, over one layer's cache [rows, kv_heads, length, head_dim]."""
        ...


class PrefillPlan:
    """Whole contexts, from position 0, into rows of their own; `last` [n] are the packed indices of their last tokens."""

    def __init__(self, cache: SlotCache, rows: npt.NDArray[np.int64], lengths: Sequence[int]) -> None:
        self.cache = cache
        device = cache.keys.device
        sizes = np.asarray(lengths, dtype=np.int64)
        longest = int(sizes.max())
        within = np.arange(longest) < sizes[:, None]  # [n, longest]: real tokens
        self._padded = None if within.all() else torch.from_numpy(np.where(within, within.cumsum().reshape(within.shape) - 1, 0)).to(device)
        self._real = torch.from_numpy(np.flatnonzero(within)).to(device)
        self._shape = within.shape
        self._rows = torch.from_numpy(rows).to(device)
        self.rows = torch.from_numpy(np.repeat(rows, sizes)).to(device)
        self.positions = torch.from_numpy(np.nonzero(within)[1]).to(device)
        self.last = torch.from_numpy(sizes.cumsum() - 1).to(device)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend causally within each context. Right padding is seen by no real token, so it needs no mask."""
        n, longest = self._shape
        heads, head_dim = query.shape[1:]
        if self._padded is not None:
            query = query[self._padded.flatten()]
        query = query.view(n, longest, heads, head_dim).transpose(1, 2)
        out = functional.scaled_dot_product_attention(
            query,
            keys[self._rows, :, :longest],
            values[self._rows, :, :longest],
            is_causal=True,
            scale=scaling,
            enable_gqa=heads != keys.shape[1],
        )
        out = out.transpose(1, 2).reshape(n * longest, heads, head_dim)
        return out if self._padded is None else out[self._real]


class DecodePlan:
    """The newest token of rows 0 .. N-1, at `positions`: each sees its own row up to itself."""

    def __init__(self, cache: SlotCache, positions: npt.NDArray[np.int64]) -> None:
        self.cache = cache
        device = cache.keys.device
        self.rows = torch.arange(len(positions), device=device)
        self.positions = torch.from_numpy(positions).to(device)
        longest = int(positions.max()) + 1
        self._length = min(cache.length, -(-longest // LENGTH_ROUNDING) * LENGTH_ROUNDING)
        unseen = torch.arange(self._length, device=device) > self.positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=cache.keys.dtype, device=device).masked_fill_(unseen, -torch.inf)
        self._mask = mask[:, None, None]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend over the cached prefix. Query heads that share a key head become its query positions: nothing is repeated."""
        n, heads, head_dim = query.shape
        query = query.reshape(n, keys.shape[1], heads // keys.shape[1], head_dim)
        keys, values = keys[:n, :, : self._length], values[:n, :, : self._length]
        if query.device.type == "cpu":  # batched matrix products beat torch's fused kernel on a CPU by 1.3 times and more for one query
            weights = torch.matmul(query * scaling, keys.transpose(2, 3)).add_(self._mask)
            out = torch.matmul(weights.softmax(-1, dtype=torch.float32).to(values.dtype), values)
        else:
            out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=self._mask, scale=scaling)
        return out.reshape(n, heads, head_dim)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  (None: no mask function is registered)
    *,
    scaling: float,
    plan: Plan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write one layer's keys and values [1, kv_heads, N, head_dim] to the cache and return the attention output [1, N, heads, head_dim]."""
    layer = module.layer_idx
    keys, values = plan.cache.keys[layer], plan.cache.values[layer]
    keys[plan.rows, :, plan.positions] = key[0].transpose(0, 1)
    values[plan.rows, :, plan.positions] = value[0].transpose(0, 1)
    return plan.attend(query[0].transpose(0, 1), keys, values, scaling)[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
