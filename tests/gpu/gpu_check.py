"""Checks a machine with a GPU in at most ten minutes and writes one JSON file (`make gpu-check`).

The embedded engine and trainer run whole runs (`headway run`) in bfloat16 on a model of half a billion random weights, one for each way of
syncing weights. Rollouts are of very uneven length, up to 4,096 tokens, so that several versions are in flight at once. Told are:

`recomputed`: each token's behaviour log-probability beside that of a forward pass under the very version it is stamped with (mean, 99th
percentile and maximum of the difference, by version span), and under the version after it, which must not fit as well. `mismatch_kl`: how
far the trainer's policy at the batch is from what wrote the tokens, by staleness (mean of exp(r) - 1 - r with r = log pi_k - log mu, which
estimates KL(mu || pi_k)). `syncs`: seconds in which engines took weights, tokens sampled in
vain, tokens per second, by `engine.weight_sync`.

A check that fails is named in `failed`, and the exit code is 1. `--small` plays the same on a CPU within minutes, to test this script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from headway.formats.batch import TrainerBatch, read_batch
from headway.formats.run_directory import RunDirectory, numbered

MODES = ("in_flight", "abort_resume", "wait")
LIMIT_SECONDS = 570.0
ANALYSIS_SECONDS = 90.0  # kept for what comes after the runs
DRAIN_SECONDS, STOP_SECONDS = 20.0, 45.0  # for a run that has used up its time: to drain, and then to stop
MOST_DIFFERENCE = 0.1  # nats, mean over tokens: bfloat16 against float32 is about .013 (docs/reference/engines-tested.md)
CONFIG = """
[run]
name = "gpu-check"
directory = "{directory}"
steps = {steps}
[model.init]
alphabet = {alphabet}
hidden_size = {hidden}
num_hidden_layers = {layers}
num_attention_heads = {heads}
num_key_value_heads = {kv_heads}
head_dim = 64
intermediate_size = {intermediate}
max_position_embeddings = {context}
initializer_range = 0.03
tie_word_embeddings = true
[rollout]
groups_per_batch = 4
group_size = 4
max_concurrent = 64
max_staleness = 4
steps_ahead = 3
max_tokens = {longest}
max_rollout_tokens = {context}
on_stale = "mask"
[prompts]
source = "writing:prompts"
shuffle = false
[environment]
entry = "writing:attempt"
[engine]
device = "{device}"
dtype = "bfloat16"
max_sequences = 64
weight_sync = "{mode}"
[trainer]
device = "{device}"
dtype = "bfloat16"
learning_rate = 1e-3
warmup_steps = 0
keep_checkpoints = {kept}
max_tokens_per_microbatch = {context}
[metrics]
progress = "plain"
interval_seconds = 5
"""
ENVIRONMENT = '''
"""Writes on and on, unless the end-of-sequence token comes: a quarter of the prompts ask for {longest} tokens, the others for less."""
from headway import Outcome
LENGTHS = ({longest} // 8, {longest} // 8, {longest} // 4, {longest})

def prompts():
    return [{{"id": f"p{{n}}", "length": LENGTHS[n % 4]}} for n in range(64)]

async def attempt(prompt, policy):
    text = await policy.open([5, 6, 7])
    turn = await text.generate(max_tokens=prompt.fields["length"])
    return Outcome(sum(token % 2 for token in turn.token_ids) / len(turn.token_ids))
'''


@dataclass(frozen=True)
class Size:
    """What is run. `limit_seconds`: what one run may take."""

    device: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    letters: int
    longest: int
    steps: int
    limit_seconds: float


HALF_A_BILLION = Size("cuda", 896, 30, 14, 2, 4864, 8000, 4096, 8, (LIMIT_SECONDS - ANALYSIS_SECONDS) / 3 - DRAIN_SECONDS)
SMALL = Size("cpu", 64, 2, 2, 2, 128, 500, 256, 6, 150.0)


def play(size: Size, mode: str, place: Path) -> dict[str, Any]:
    """Run once in this mode, or as far as the limit lets it; return how it ended and how long it took."""
    directory = place / mode
    (place / "writing.py").write_text(ENVIRONMENT.format(longest=size.longest))
    config = place / f"{mode}.toml"
    alphabet = json.dumps("".join(chr(0x4E00 + number) for number in range(size.letters)), ensure_ascii=False)
    shape = {name: getattr(size, name) for name in ("device", "hidden", "layers", "heads", "kv_heads", "intermediate", "longest", "steps")}
    config.write_text(
        CONFIG.format(directory=directory, alphabet=alphabet, context=size.longest + 16, kept=size.steps + 2, mode=mode, **shape)
    )
    started = time.monotonic()
    with (place / f"{mode}.log").open("w") as log:
        running = subprocess.Popen([sys.executable, "-m", "headway", "run", str(config)], stdout=log, stderr=log)
        _end(running, size.limit_seconds)
    seconds = time.monotonic() - started
    tail = (place / f"{mode}.log").read_text().splitlines()[-3:]
    return {"exit_code": running.returncode, "seconds": round(seconds, 1), "said": tail}


def _end(running: subprocess.Popen[bytes], limit_seconds: float) -> None:
    """Wait for the end of a run; one that has used up its time drains as far as it gets, is stopped, and is killed at last."""
    for seconds, then in ((limit_seconds, running.terminate), (DRAIN_SECONDS, running.terminate), (STOP_SECONDS, running.kill)):
        try:
            running.wait(seconds)
        except subprocess.TimeoutExpired:
            then()
        else:
            return
    running.wait()


def sync_figures(directory: Path) -> dict[str, Any]:
    """Return what weight syncs have cost a run, by its own rows."""
    rows = [json.loads(line) for line in (directory / "pipeline.jsonl").read_text().splitlines()]
    if not rows:
        return {}
    told = subprocess.run(
        [sys.executable, "-m", "headway", "inspect", str(directory), "waste", "--json"], capture_output=True, text=True, check=False
    )
    last = rows[-1]
    return {
        "versions_served": last["version"],
        "sync_seconds": last["sync_seconds"],
        "sync_seconds_per_version": last["sync_seconds"] / max(1, last["version"]),
        "engine_sampled_tokens": last["engine_sampled_tokens"],
        "tokens_per_second": (last["engine_sampled_tokens"] or 0) / max(1e-9, rows[-1]["time"] - rows[0]["time"]),
        "waste": json.loads(told.stdout) if told.returncode == 0 else told.stderr[-300:],
    }


class Models:
    """The versions of a run as float32 models, two in memory at most."""

    def __init__(self, run: RunDirectory, device: str) -> None:
        self._run = run
        self._device = device
        self._loaded: dict[int, Any] = {}

    def logprobs(self, version: int, token_ids: npt.NDArray[np.int32], temperature: float) -> npt.NDArray[np.float32]:
        """Return log pi_version(token i | tokens before it) for i = 1 .. n - 1, float32 (n - 1)."""
        if version not in self._loaded:
            while len(self._loaded) >= 2:
                del self._loaded[next(iter(self._loaded))]
            model = AutoModelForCausalLM.from_pretrained(self._run.weight(version), dtype=torch.float32)
            self._loaded[version] = model.to(self._device).eval()
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
        with torch.no_grad():
            logits = self._loaded[version](input_ids=ids[None, :-1], use_cache=False).logits[0].float() / temperature
            found: npt.NDArray[np.float32] = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].cpu().numpy()
        return found


@dataclass(frozen=True)
class Stretch:
    """A sample of batch `k`: ids, behaviour log-probabilities, and versions (-1: not sampled)."""

    k: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]


def stretches(batch: TrainerBatch) -> list[Stretch]:
    """Return the samples of a batch, those with most versions first."""
    bounds = zip(batch.sample_offsets[:-1], batch.sample_offsets[1:], strict=True)
    found = [Stretch(batch.k, batch.token_ids[a:b], batch.logprobs[a:b], batch.versions[a:b]) for a, b in bounds]
    return sorted(found, key=lambda each: -len(np.unique(each.versions)))


def recomputed(run: RunDirectory, device: str, until: float, *, samples: int = 24) -> dict[str, Any]:
    """Recompute samples of a run under the versions that they are stamped with, the next ones, and those they were trained at."""
    models, versions = Models(run, device), set(numbered(run.weights))
    found = [each for k in numbered(run.batches) for each in stretches(read_batch(run.batch(k)))[: 2 + samples // 4]]
    chosen = sorted(found, key=lambda each: -len(np.unique(each.versions)))[:samples]
    right: list[npt.NDArray[Any]] = []
    wrong: list[npt.NDArray[Any]] = []
    by_staleness: dict[int, list[npt.NDArray[Any]]] = defaultdict(list)
    spans = most = 0
    for version in sorted(versions):  # one model after the other, each loaded once
        for each in chosen:
            if time.monotonic() > until:
                break
            sampled = np.flatnonzero(each.versions[1:] >= 0) + 1
            most = max(most, len(np.unique(each.versions[sampled])))
            here, before = each.versions[sampled] == version, each.versions[sampled] == version - 1
            if not (here.any() or before.any() or each.k == version):
                continue
            logprobs = models.logprobs(version, each.token_ids, 1.0)[sampled - 1]
            behaviour = each.logprobs[sampled]
            spans += bool(here.any())
            right.append(np.abs(logprobs - behaviour)[here])
            wrong.append(np.abs(logprobs - behaviour)[before])
            if each.k == version:
                for staleness in np.unique(each.k - each.versions[sampled]):
                    its = each.k - each.versions[sampled] == staleness
                    by_staleness[int(staleness)].append((logprobs - behaviour)[its].astype(np.float64))
    differences, others = np.concatenate(right or [np.zeros(0)]), np.concatenate(wrong or [np.zeros(0)])
    return {
        "samples": len(chosen),
        "spans": spans,
        "most_versions_in_a_sample": most,
        "tokens": len(differences),
        "difference_mean": float(differences.mean()) if len(differences) else None,
        "difference_p99": float(np.quantile(differences, 0.99)) if len(differences) else None,
        "difference_max": float(differences.max()) if len(differences) else None,
        "difference_mean_under_the_next_version": float(others.mean()) if len(others) else None,
        "mismatch_kl": {
            str(staleness): {"tokens": sum(map(len, parts)), "kl": float(np.mean(np.expm1(r := np.concatenate(parts)) - r))}
            for staleness, parts in sorted(by_staleness.items())
        },
    }


def failures(report: dict[str, Any]) -> list[str]:
    """Return what is wrong, one line each."""
    runs = report["runs"].items()
    found = [f"{mode}: the run ended with exit code {run['exit_code']}" for mode, run in runs if run["exit_code"] not in {0, 143}]
    check = report.get("recomputed", {})
    if not check.get("tokens"):
        return [*found, "nothing could be recomputed"]
    if check["difference_mean"] > MOST_DIFFERENCE:
        found.append(f"log-probabilities differ by {check['difference_mean']:.3f} nats in the mean from those of their versions")
    other = check["difference_mean_under_the_next_version"]
    if other is None or check["difference_mean"] * 2 > other:
        found.append(
            "the next versions fit the tokens almost as well as those that they are stamped with: the check has shown less than it should"
        )
    if check["most_versions_in_a_sample"] < 3:
        found.append(
            f"no sample straddles 3 versions ({check['most_versions_in_a_sample']} at most): the check has shown less than it should"
        )
    if report["wait_straddles"]:
        found.append(f'engine.weight_sync = "wait", and {report["wait_straddles"]} rollouts of one turn have tokens of two versions')
    return found


def straddling(run: RunDirectory) -> int:
    """Return how many samples have tokens of more than one version."""
    return sum(
        len(np.unique(each.versions[each.versions >= 0])) > 1 for k in numbered(run.batches) for each in stretches(read_batch(run.batch(k)))
    )


def main() -> int:
    """Run, recompute, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--keep", type=Path, help="where runs are kept; unset: they are removed")
    options = parser.parse_args()
    size = SMALL if options.small else HALF_A_BILLION
    if size.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU here (--small plays it on the CPU)", file=sys.stderr)  # noqa: T201
        return 2
    begun = time.monotonic()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if size.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "size": vars(size),
        "runs": {},
        "syncs": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        for mode in MODES:
            report["runs"][mode] = play(size, mode, place)
            if (place / mode / "pipeline.jsonl").exists():
                report["syncs"][mode] = sync_figures(place / mode)
            print(f"{mode}: {report['runs'][mode]}", flush=True)  # noqa: T201
        if (place / "in_flight" / "batches").is_dir():
            report["recomputed"] = recomputed(RunDirectory(place / "in_flight"), size.device, begun + LIMIT_SECONDS)
        report["wait_straddles"] = straddling(RunDirectory(place / "wait")) if (place / "wait" / "batches").is_dir() else 0
    report["seconds"] = round(time.monotonic() - begun, 1)
    report["failed"] = failures(report)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["failed"] or "all checks hold"), f"-> {options.out}")  # noqa: T201
    return int(bool(report["failed"]))


if __name__ == "__main__":
    sys.exit(main())
