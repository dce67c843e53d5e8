"""Tokens per second from finished rollouts to a batch on disk, against writing the same bytes plainly.

    python benchmarks/batch.py [--groups 32] [--group-size 8] [--tokens 4096] [--rounds 9] [--directory DIR]

tensors:   opens every payload, checks stamps and numbers, masks, flattens, measures; writes batch.safetensors and syncs it.
published: all that headway does: tensors, the Parquet record beside them, SHA-256 of both, manifest, syncs, rename.
plain:     writes the very same files from memory with one write each, then syncs them and their directory.

All in turn within one run; medians; one JSON line. A ratio is plain seconds / headway seconds for the same files: 1 would mean that
everything but the bytes is free.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from headway.formats.batch import TENSORS, assemble, write_batch
from headway.formats.files import sync
from headway.formats.rollout import encode_samples
from headway.formats.run_directory import RunDirectory
from headway.types import Admission, Batch, Prompt, ReadyGroup, Rollout, Sample

K = 8


def rollout(random, group, member, tokens):
    """A quarter prompt, the rest sampled across two versions, lengths spread by half."""
    n = int(tokens * random.uniform(0.5, 1.5))
    sampled = np.arange(n) >= n // 4
    sample = Sample(
        token_ids=random.integers(0, 150_000, n, dtype=np.int32),
        sampled_mask=sampled,
        loss_mask=sampled.copy(),
        logprobs=np.where(sampled, -random.exponential(0.5, n), 0).astype(np.float32),
        span_start=np.array([0, n // 4], np.int32),
        span_version=np.array([K - 2 - member % 3, K - 1], np.int32),
    )
    return Rollout(
        group=group,
        member=member,
        attempt=1,
        prompt_id=f"prompt-{group}",
        environment="benchmark",
        reward=float(member % 2),
        rewards={},
        finish="stop",
        turns=1,
        started=0.0,
        finished=1.0,
        engine="engine-0",
        metadata={},
        samples=1,
        tokens=n,
        sampled_tokens=n - n // 4,
        head=K - 2 - member % 3,
        tail=K - 1,
        payload=encode_samples([sample]),
    )


def make_batch(groups, group_size, tokens):
    random = np.random.default_rng(0)
    return Batch(
        k=K,
        groups=tuple(
            ReadyGroup(
                Admission(group, Prompt(f"prompt-{group}", 0, {}), group_size, K - 4),
                tuple(rollout(random, group, member, tokens) for member in range(group_size)),
                tuple(float(member % 2) - 0.5 for member in range(group_size)),
            )
            for group in range(groups)
        ),
        max_staleness=3,
        on_stale="mask",
        temperature=1.0,
    )


def timed_tensors(batch, scratch):
    """Seconds to assemble, and to have the tensors on disk."""
    start = time.perf_counter()
    assembled = assemble(batch)
    middle = time.perf_counter()
    save_file(dict(assembled.arrays), scratch / TENSORS)
    sync(scratch / TENSORS)
    end = time.perf_counter()
    (scratch / TENSORS).unlink()
    return middle - start, end - start


def timed_published(batch, run):
    """Seconds to have the batch published, and the files written."""
    start = time.perf_counter()
    write_batch(run, assemble(batch), "benchmark")
    seconds = time.perf_counter() - start
    files = {path.name: path.read_bytes() for path in run.batch(K).iterdir()}
    shutil.rmtree(run.batch(K))
    return seconds, files


def timed_plain(files, directory):
    start = time.perf_counter()
    directory.mkdir()
    for name, data in files.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, data)
        os.fsync(descriptor)
        os.close(descriptor)
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - start
    shutil.rmtree(directory)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=None, help="where to write (default: the current directory)")
    options = parser.parse_args()
    batch = make_batch(options.groups, options.group_size, options.tokens)
    tokens = sum(r.tokens for group in batch.groups for r in group.rollouts)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory or Path.cwd()) as name:
        scratch = Path(name)
        run = RunDirectory.create(scratch / "run")
        _, files = timed_published(batch, run)  # imports and first touches, not counted
        tensors = {TENSORS: files[TENSORS]}
        for _ in range(options.rounds):
            row = [*timed_tensors(batch, scratch), timed_plain(tensors, scratch / "plain")]
            rows.append([*row, timed_published(batch, run)[0], timed_plain(files, scratch / "plain")])
        run.close()
    assembling, tensors_seconds, tensors_plain, published, published_plain = map(statistics.median, zip(*rows, strict=True))
    result = {
        "benchmark": "batch",
        "rollouts": options.groups * options.group_size,
        "tokens": tokens,
        "bytes": {name: len(data) for name, data in files.items()},
        "tokens_per_second": round(tokens / tensors_seconds),
        "plain_tokens_per_second": round(tokens / tensors_plain),
        "ratio": round(tensors_plain / tensors_seconds, 3),
        "published_tokens_per_second": round(tokens / published),
        "published_ratio": round(published_plain / published, 3),
        "assemble_seconds": round(assembling, 4),
        "tensors_seconds": round(tensors_seconds, 4),
        "published_seconds": round(published, 4),
    }
    print(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
