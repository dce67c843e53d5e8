"""Packing: tokens per CPU second, forward + backward, of the same samples packed, one by one, and padded, side by side in one process.

Prints one JSON line. `ratio_*` is packed over the other way; each way runs in turn, repeatedly, and its fastest round counts.

    python benchmarks/packing.py [--rounds 5] [--shapes small,quickstart,medium]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from headway.embedded.trainer.initialise import random_model
from headway.embedded.trainer.packing import pack
from headway.embedded.trainer.scoring import Policy
from headway.settings import InitSection


@dataclass(frozen=True)
class Shape:
    """A model, and samples with lengths drawn evenly from a range; `pack_tokens` bounds a pack (and a padded batch)."""

    init: InitSection
    samples: int
    shortest: int
    longest: int
    pack_tokens: int


SHAPES = {
    "quickstart": Shape(InitSection(), 256, 4, 9, 8192),
    "small": Shape(InitSection(hidden_size=128, num_hidden_layers=4, intermediate_size=256), 32, 20, 200, 2048),
    "medium": Shape(
        InitSection(
            hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64, intermediate_size=1536,
            max_position_embeddings=1024,
        ),
        10, 30, 200, 1024,
    ),
}  # fmt: skip


def measure(shape: Shape, rounds: int) -> dict[str, float]:
    """Return tokens per CPU second of each way."""
    policy = Policy(random_model(shape.init, 0)[0], torch.device("cpu"), torch.float32)
    chance = np.random.default_rng(0)
    lengths = chance.integers(shape.shortest, shape.longest + 1, shape.samples)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = chance.integers(0, policy.vocabulary, offsets[-1])
    mask = np.ones(offsets[-1], dtype=bool)
    mask[offsets[:-1]] = False

    def packed() -> None:
        for one in pack(offsets, mask, np.arange(shape.samples), shape.pack_tokens):
            policy.score(one, token_ids, 1.0).logprobs.sum().backward()

    def one_by_one() -> None:
        for start, end in pairwise(offsets):
            plain(policy, torch.from_numpy(token_ids[None, start:end]), None)

    def padded() -> None:
        order = np.argsort(-lengths, kind="stable")
        rows = max(1, shape.pack_tokens // int(lengths.max()))
        for members in np.split(order, range(rows, shape.samples, rows)):
            ids = torch.zeros(len(members), int(lengths[members].max()), dtype=torch.long)
            real = torch.zeros_like(ids)
            for row, sample in enumerate(members):
                ids[row, : lengths[sample]] = torch.from_numpy(token_ids[offsets[sample] : offsets[sample + 1]])
                real[row, : lengths[sample]] = 1
            plain(policy, ids, real)

    best = {way.__name__: 0.0 for way in (packed, one_by_one, padded)}
    for number in range(rounds + 1):
        for way in (packed, one_by_one, padded):
            policy.model.set_attn_implementation("headway_packed" if way is packed else "sdpa")
            rate = offsets[-1] / timed(way)
            if number:  # the first round warms up
                best[way.__name__] = max(best[way.__name__], rate)
    return {
        "tokens": int(offsets[-1]),
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        **{f"{name}_tokens_per_second": round(rate) for name, rate in best.items()},
        "ratio_one_by_one": round(best["packed"] / best["one_by_one"], 2),
        "ratio_padded": round(best["packed"] / best["padded"], 2),
    }


def plain(policy: Policy, ids: torch.Tensor, real: torch.Tensor | None) -> None:
    """Forward and backward of the model as it comes, logits at all positions."""
    logits = policy.model(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (logprobs if real is None else logprobs * real[:, 1:]).sum().backward()


def timed(way: Callable[[], None]) -> float:
    started = time.process_time()  # one thread: CPU seconds, which a busy machine disturbs least
    way()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(SHAPES[name], arguments.rounds) for name in arguments.shapes.split(",")}
    print(json.dumps({"benchmark": "packing", "torch": torch.__version__, "threads": 1, **results}))


if __name__ == "__main__":
    main()
