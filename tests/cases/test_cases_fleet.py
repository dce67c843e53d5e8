"""A fleet as a person runs it: a file of URLs that is edited while the run goes on; real processes, all invariants hold afterwards."""

import pytest

from headway.testing import EngineScript, Stage

pytestmark = pytest.mark.e2e

SLOW = EngineScript(token_seconds=0.02)
FIRST = ("engine-0", "engine-1")


def states(stage):
    rows = stage.rows("pipeline.jsonl")
    return rows[-1]["engines"] if rows else {}


def fleet(tmp_path, *, engines=3, **settings):
    file = tmp_path / "engines.txt"
    watched = {"engine.urls": [], "engine.urls_file": "engines.txt", "metrics.interval_seconds": 0.2}
    return file, Stage(
        tmp_path, engines=[SLOW] * engines, settings=watched | {key.replace("__", "."): value for key, value in settings.items()}
    )


def name(file, *engines, prefix=""):
    write(file, "".join(f"{prefix}{engine.url}\n" for engine in engines))


def write(file, text):
    """Write the file anew, whole: half of it, or nothing, would be read as well."""
    temporary = file.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(file)


@pytest.mark.parametrize("order", ["rolling", "all_at_once"])
def test_engines_join_and_leave_as_a_file_is_edited(tmp_path, order):
    file, staged = fleet(tmp_path, run__steps=1000, run__drain_timeout_seconds=120, engine__sync_order=order)
    file.write_text("")
    with staged as stage:
        first, second, third = stage.engines
        name(file, first, second)
        run = stage.start()
        stage.until_batch(1)
        name(file, first, second, third, prefix="vllm+")
        stage.until(lambda: states(stage).get("engine-2", "").startswith("serving "), what="the third serves")
        name(file, second, third)
        stage.until(lambda: len(states(stage)) == 2, what="the first has left")
        first.kill()  # nobody is there any more
        number = len(stage.rows("metrics.jsonl"))
        stage.until_batch(number + 3)
        write(file, "%%% no address\n")  # garbled: it goes on with those that there are
        stage.until(lambda: "no engine's URL" in (stage.run / "events.log").read_text(), what="that is told")
        number = len(stage.rows("metrics.jsonl"))
        stage.until_batch(number + 3)
        assert sorted(states(stage)) == ["engine-1", "engine-2"]
        run.process.terminate()
        ended = run.end()
        assert ended.code == 143, ended.err
        stage.check(ended)
        rows = stage.rows("pipeline.jsonl")
        assert sum(rows[-1]["dropped"].values()) == 0
        states_of = [row["engines"] for row in rows]
        serve = next(n for n, found in enumerate(states_of) if all(found.get(name, "").startswith("serving") for name in FIRST))
        assert not any(found.get(name) == "lost" for found in states_of[serve:] for name in FIRST)
        told = (stage.run / "events.log").read_text()
        said = [line.removeprefix("headway: ") for line in ended.err.splitlines() if line.startswith("headway: engine-")]
        joins = [f"engine-{number} joins: {engine.url}" for number, engine in enumerate(stage.engines)]
        assert [line for line in said if " joins: " in line] == joins
        assert sum(line.startswith("engine-2 serves, version ") for line in said) == 1
        assert [line.partition(":")[0] for line in said if line.startswith("engine-0 ")][-2:] == ["engine-0 leaves", "engine-0 has left"]
        assert ended.err.count("; the engines stay those that it named before (engine.urls_file)\n") == 1
        assert "engine-0 has left" in told
        assert told.count("line 1 is no engine's URL") == 1
        assert "answered" in {entry["what"] for entry in third.entries()}


def test_a_run_waits_for_the_first_engine_in_the_file(tmp_path):
    file, staged = fleet(tmp_path, engines=1, run__steps=3)
    file.write_text("# none yet\n")
    with staged as stage:
        run = stage.start()
        stage.until(lambda: stage.rows("pipeline.jsonl"), what="the run is there")
        assert states(stage) == {}
        name(file, *stage.engines)
        ended = run.end()
        assert ended.code == 0, ended.err
        stage.check(ended)


def test_every_third_version_is_served(tmp_path):
    file, staged = fleet(tmp_path, engines=2, run__steps=8, trainer__publish_every=3, rollout__steps_ahead=2, rollout__max_staleness=4)
    file.write_text("")
    with staged as stage:
        name(file, *stage.engines)
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        assert len(stage.rows("metrics.jsonl")) == 8
        served = {state.rpartition("-")[2] for row in stage.rows("pipeline.jsonl") for state in row["engines"].values() if "-" in state}
        assert {"0"} < served <= {"0", "3", "6", "8"}
