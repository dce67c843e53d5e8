"""What durability costs: finished rollouts through recorder and journal, against a plain write and fsync of the same bytes.

    python benchmarks/journal.py [--rounds 7] [--directory DIR] [--ready 100000]

durable  `committing` rollouts wait at a time, each to be durable and applied to the ledger, as the dispatcher has it: rollouts per second,
         for rollouts of 1k and of 32k tokens. plain: the same records, encoded before, in the same steps (what the recorder took at once):
         one write, one fsync a step. In turn within each round; the ratio is the median over the rounds of plain seconds / ours.
latency  rollouts of 1k tokens finish at random, 500 a second: the time until one counts, less the same with a journal in memory. plain:
         a write of one of them and its fsync, one after another on the same disk.
resume   a history of `ready` rollouts in complete groups of 8: opening the journal (every event and segment checked), folding it, and
         deciding what the run goes on with. Seconds of each; the aim is 5 s for 10^5 in all. cpu: of the process, all in all, which
         other work on the machine stretches least.

One JSON line. `--directory` decides which disk is measured (default: the current directory).
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from null_world import ForgetfulJournal

from headway.adapters.journal.sqlite import SqliteJournal
from headway.events import Admitted, Published, Ready
from headway.flow.durable import finished_event
from headway.flow.recorder import Recorder
from headway.flow.take_up import read_history, take_up
from headway.formats.rollout import encode_rollout, encode_samples
from headway.launch.collector import collector_off
from headway.protocols import Entry
from headway.rules.admission import GateLimits
from headway.rules.lineage import Line
from headway.sim.prompts import ListPrompts
from headway.types import Rollout, Sample

GROUP_SIZE = 8
PAYLOADS = 32  # of their own content; more would only warm other caches
RATE = 500  # rollouts a second, of the latency


def payload(tokens, seed):
    draws = np.random.default_rng(seed)
    sampled = np.arange(tokens) >= tokens // 8
    sample = Sample(
        token_ids=draws.integers(0, 150_000, tokens, np.int32),
        sampled_mask=sampled,
        loss_mask=sampled.copy(),
        logprobs=np.where(sampled, -draws.random(tokens, np.float32), np.float32(0)),
        span_start=np.array([0], np.int32),
        span_version=np.array([0], np.int32),
    )
    return encode_samples([sample])


def rollout(number, tokens, data):
    return Rollout(
        group=number // GROUP_SIZE,
        member=number % GROUP_SIZE,
        attempt=1,
        prompt_id=f"prompt-{number // GROUP_SIZE}",
        environment="benchmark",
        reward=float(number % 2),
        rewards={},
        finish="stop",
        turns=1,
        started=0.0,
        finished=1.0,
        engine="engine-0",
        metadata={},
        samples=1,
        tokens=tokens,
        sampled_tokens=tokens - tokens // 8,
        head=0,
        tail=0,
        payload=data,
    )


def rollouts_of(count, tokens):
    payloads = [payload(tokens, seed) for seed in range(PAYLOADS)]
    return [rollout(number, tokens, payloads[number % PAYLOADS]) for number in range(count)]


class Counting(SqliteJournal):
    """The journal, and how many rollouts each call brought."""

    def __init__(self, directory, **options):
        super().__init__(directory, run_id="benchmark", **options)
        self.steps = []

    async def append(self, entries):
        self.steps.append(sum(entry.rollout is not None for entry in entries))
        return await super().append(entries)


async def durable(directory, rollouts, committing):
    """Return (seconds, rollouts of each step) of committing them all."""
    journal = Counting(directory)
    recorder = Recorder(journal)
    writing = asyncio.create_task(recorder.run())
    recorder.record(Published(0.0, 0, ("engine-0",)))
    for group in range(len(rollouts) // GROUP_SIZE):
        recorder.record(Admitted(0.0, group, f"prompt-{group}", 0, GROUP_SIZE, 0))
    await recorder.flush()
    left = iter(rollouts)
    start, before = time.perf_counter(), len(journal.steps)

    async def one_after_another():
        for one in left:
            await recorder.commit(finished_event(one, 1.0), one)

    await asyncio.gather(*(one_after_another() for _ in range(committing)))
    seconds = time.perf_counter() - start
    recorder.close()
    await writing
    await journal.close()
    return seconds, journal.steps[before:]


def plain(path, records, steps):
    """Seconds to write the records to one file, with one fsync a step."""
    start, done = time.perf_counter(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in steps:
        data = b"".join(records[done : done + step])
        if os.write(file, data) != len(data):
            raise OSError("the disk is full")
        os.fsync(file)
        done += step
    os.close(file)
    return time.perf_counter() - start


def compare(scratch, rounds, count, tokens, committing):
    rollouts = rollouts_of(count, tokens)
    records = [encode_rollout(one) for one in rollouts]
    ours, theirs, steps = [], [], []
    for number in range(rounds + 1):
        seconds, steps = asyncio.run(durable(scratch / "state", rollouts, committing))
        plainly = plain(scratch / "plain", records, steps)
        shutil.rmtree(scratch / "state")
        (scratch / "plain").unlink()
        if number:  # the first is not counted
            ours.append(seconds)
            theirs.append(plainly)
    return {
        "rollouts": count,
        "committing": committing,
        "bytes_per_rollout": len(records[0]),
        "rollouts_per_step": round(count / len(steps), 1),
        "rollouts_per_second": round(count / statistics.median(ours)),
        "megabytes_per_second": round(sum(map(len, records)) / statistics.median(ours) / 1e6),
        "plain_rollouts_per_second": round(count / statistics.median(theirs)),
        "ratio_to_plain": round(statistics.median(p / o for p, o in zip(theirs, ours, strict=True)), 3),
        "ratio_worst": round(min(p / o for p, o in zip(theirs, ours, strict=True)), 3),
    }


async def until_it_counts(journal, rollouts, rate):
    """Return how long each rollout took from its end until it counted; they end at random moments."""
    recorder = Recorder(journal)
    writing = asyncio.create_task(recorder.run())
    recorder.record(Published(0.0, 0, ("engine-0",)))
    took = []

    async def finish(one):
        start = time.perf_counter()
        await recorder.commit(finished_event(one, 1.0), one)
        took.append(time.perf_counter() - start)

    draws = random.Random(0)
    async with asyncio.TaskGroup() as tasks:
        due = asyncio.get_running_loop().time()
        for one in rollouts:
            if one.member == 0:
                recorder.record(Admitted(0.0, one.group, one.prompt_id, 0, GROUP_SIZE, 0))
            due += draws.expovariate(rate)
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            tasks.create_task(finish(one))
    recorder.close()
    await writing
    await journal.close()
    return sorted(took)


def write_and_sync(path, data, times):
    """Return how long each took, sorted."""
    took = []
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in range(times):
        start = time.perf_counter()
        os.write(file, data)
        os.fsync(file)
        took.append(time.perf_counter() - start)
    os.close(file)
    return sorted(took)


def latency(scratch):
    rollouts = rollouts_of(RATE * 10, 1024)
    plainly = write_and_sync(scratch / "plain", encode_rollout(rollouts[0]), 300)
    on_disk = asyncio.run(until_it_counts(SqliteJournal(scratch / "latency", run_id="benchmark"), rollouts, RATE))
    in_memory = asyncio.run(until_it_counts(ForgetfulJournal(), rollouts, RATE))

    def added(share):
        at = int(share * len(on_disk))
        return round(1e3 * (on_disk[at] - in_memory[at]), 3)

    return {
        "rollouts_per_second": RATE,
        "added_p50_ms": added(0.5),
        "added_p99_ms": added(0.99),
        "added_max_ms": added(1 - 1e-9),
        "plain_p50_ms": round(1e3 * plainly[150], 3),
        "plain_p99_ms": round(1e3 * plainly[297], 3),
    }


async def write_ready(directory, ready):
    """Write the history of so many rollouts in complete groups; payloads are as small as they come, none is read at a resume."""
    data = payload(16, 0)
    journal = SqliteJournal(directory, run_id="benchmark")
    entries = [Entry(Published(0.0, 0, ("engine-0",)))]
    for group in range(ready // GROUP_SIZE):
        entries.append(Entry(Admitted(0.0, group, f"prompt-{group}", 0, GROUP_SIZE, 0)))
        members = (rollout(group * GROUP_SIZE + member, 16, data) for member in range(GROUP_SIZE))
        entries += [Entry(finished_event(one, 1.0), one) for one in members]
        entries.append(Entry(Ready(1.0, group, zero_advantage=False)))
        if len(entries) > 1000:
            await journal.append(entries)
            entries = []
    await journal.append(entries)
    await journal.close()


def advantages(rewards):
    return rewards - rewards.mean()


async def timed_resume(directory, ready):
    """Return the seconds of opening, folding and deciding, and what came of it."""
    groups = ready // GROUP_SIZE
    times = [time.perf_counter()]
    journal = SqliteJournal(directory, run_id="benchmark")
    times.append(time.perf_counter())
    with collector_off():
        history = await read_history(journal, lineage="line")
    times.append(time.perf_counter())
    with collector_off():
        resumption = await take_up(
            journal,
            history,
            version=0,
            line=Line("line"),
            limits=GateLimits(groups_per_batch=groups, group_size=GROUP_SIZE, max_concurrent=GROUP_SIZE, steps_ahead=2.0, steps=100),
            prompts=ListPrompts(groups, shuffle=False),
            stored=lambda _: None,
            advantages=advantages,
            clock=time.time,
        )
    times.append(time.perf_counter())
    await journal.close()
    if sum(len(group.rollouts) for group in resumption.ready) != groups * GROUP_SIZE:
        raise RuntimeError("not all that was ready is")
    return [after - before for before, after in itertools.pairwise(times)]


def resume(scratch, ready, rounds):
    asyncio.run(write_ready(scratch / "ready", ready))
    events = (scratch / "ready" / "events.sqlite").stat().st_size
    passes, cpu = [], []
    for number in range(rounds):
        shutil.copytree(scratch / "ready", scratch / f"resume-{number}")
        before = time.process_time()
        passes.append(asyncio.run(timed_resume(scratch / f"resume-{number}", ready)))
        cpu.append(time.process_time() - before)
        shutil.rmtree(scratch / f"resume-{number}")
    opened, folded, decided = (statistics.median(one[step] for one in passes) for step in range(3))
    return {
        "ready_rollouts": ready,
        "event_bytes_per_rollout": round(events / ready, 1),
        "open_seconds": round(opened, 3),
        "fold_seconds": round(folded, 3),
        "decide_seconds": round(decided, 3),
        "seconds": round(statistics.median(sum(one) for one in passes), 3),
        "cpu_seconds": round(statistics.median(cpu), 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ready", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, default=None, help="where to write (default: the current directory)")
    options = parser.parse_args()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)  # as a run has it
    with tempfile.TemporaryDirectory(dir=options.directory or Path.cwd()) as name:
        scratch = Path(name)
        row = {
            "benchmark": "journal",
            "load": round(os.getloadavg()[0], 1),
            "tokens_1k": compare(scratch, options.rounds, 16_000, 1024, 512),
            "tokens_32k": compare(scratch, options.rounds, 1024, 32_768, 128),
            "latency": latency(scratch),
            "resume": resume(scratch, options.ready, min(3, options.rounds)),
        }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
