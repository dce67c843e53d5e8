"""Fault cases of weight updates (E01, E05, E06, E09) and of sessions at several engines (I10), held against the engines' own logs."""

from collections import Counter
from itertools import groupby
from typing import Any

import pytest
from shipped import batches_of, events_of, rows_of, stamped

from headway.events import Admitted, GroupDropped
from headway.testing import Act, EngineScript, EnvironmentRule, EnvironmentScript, Reply, Rule, Stage, TrainerScript, Turn
from headway.testing.check.evidence import versions_of
from headway.types import EngineKind

pytestmark = pytest.mark.e2e

TOKEN_SECONDS, TOKENS = 0.01, 40
BASE = {"run.steps": 10, "rollout.max_tokens": TOKENS, "rollout.max_concurrent": 24}
SLOW = Rule(match={"member": 1}, every=3, do=Reply(tokens=TOKENS, token_seconds=20 * TOKEN_SECONDS))  # outlives some versions
ENDLESS = Rule(match={"member": 2}, nth=(4,), do=Reply(tokens=TOKENS, token_seconds=2000 * TOKEN_SECONDS))  # outlives all of them
RUNS: dict[str, tuple[dict[str, Any], tuple[Rule, ...]]] = {
    "drop": ({"rollout.on_stale": "drop"}, (SLOW, ENDLESS)),
    "kept cache": ({"engine.recompute_kv": False}, ()),
    "wait": ({"engine.weight_sync": "wait", "run.steps": 6}, ()),
}


CALLS = {
    "vllm": ("/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"),
    "sglang": ("/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"),
}
TOLD = {"/weight_info", "/model_info", "/metrics"}


@pytest.fixture(scope="module", params=[(speaks, kind) for speaks in CALLS for kind in RUNS], ids="-".join)
def played(request, tmp_path_factory):
    """One run of each kind at each kind of engine, at its end: (what it speaks, the kind of run, the stage)."""
    speaks, kind = request.param
    settings, rules = RUNS[kind]
    engine = EngineScript(speaks=speaks, token_seconds=TOKEN_SECONDS, load_seconds=0.05, rules=rules)
    trainer, settings = TrainerScript(step_seconds=0.3), {**BASE, "engine.kind": speaks, **settings}
    with Stage(tmp_path_factory.mktemp("weights"), engines=[engine], trainer=trainer, settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        yield speaks, kind, stage


def syncs_of(stage, first, last):
    """The administrative calls of each weight sync: [(path, time asked, time answered)] from the `first` to the `last`."""
    asked = {entry["id"]: entry for entry in stage.requests("asked")}
    found = []
    for entry in stage.requests("answered"):
        call = entry["path"], asked[entry["id"]]["time"], entry["time"]
        if entry["path"] == first and (first != last or not found or found[-1][-1][0] == last):
            found.append([call])
        elif found and (found[-1][-1][0] != last or len(found[-1]) == 1) and entry["path"] not in TOLD:
            found[-1].append(call)
    return found


def test_E01_an_update_is_pause_load_resume_and_nothing_is_aborted_between_pause_and_the_first_step_after(played):
    speaks, kind, stage = played
    pause, *between, resume = CALLS[speaks]
    if (speaks, kind) == ("sglang", "wait"):
        pause = resume  # it waits for what is in flight only where nobody has paused it
    syncs = syncs_of(stage, pause, resume)
    assert len(syncs) >= stage.rows("metrics.jsonl")[-1]["batch"]
    if kind != "kept cache":
        between.pop()
    for sync in syncs:
        assert [path for path, *_ in sync] == [pause, *between, resume]
    group_of = {entry["id"]: entry["group"] for entry in stage.requests("arrived")}
    aborted = [(entry["time"], group_of[entry["id"]]) for entry in stage.requests("finished") if entry["disconnected"]]
    assert bool(aborted) == (kind == "drop"), "only what is stale is cancelled"
    dropped = {event.group: event.time for event in events_of(stage, GroupDropped)}
    for sync in syncs:
        began, ended = sync[0][1], sync[-1][2] + TOKEN_SECONDS
        meanwhile = [(time, group) for time, group in aborted if began <= time <= ended]
        assert all(dropped[group] <= time for time, group in meanwhile), "not by the sync: the run had given it up"


def test_E05_no_prefix_that_older_weights_have_filled_is_used_again(played):
    _, _, stage = played
    finished = stage.requests("finished")
    assert sum(entry["cache_hits"] for entry in finished) > 0
    assert sum(entry["stale_hits"] for entry in finished) == 0


def test_E09_each_token_of_a_rollout_that_straddles_an_update_is_stamped_with_the_weights_that_wrote_it(played):
    """Against what the engine has really loaded; the age of a rollout is that of its oldest token."""
    _, kind, stage = played
    loaded: dict[Any, Any] = {}  # (group, member, attempt) by id, until it ends; then versions by these
    for entry in stage.requests("arrived", "finished"):
        if entry["what"] == "arrived":
            loaded[entry["id"]] = (entry["group"], entry["member"], entry["attempt"])
        else:
            loaded[loaded.pop(entry["id"])] = [max(version, 0) for version, start, end in entry["loaded"] for _ in range(start, end)]
    rows = rows_of(stage)
    straddling = 0
    for row in rows:
        [sample] = row["samples"]
        written = loaded[row["group_id"], row["member"], row["attempt"]]
        assert versions_of(sample).tolist() == written
        straddling += len(set(written)) > 1
        bound = row["k"] - 2
        if row["trained"]:
            assert min(written) >= bound or kind != "drop"
            assert all(in_loss or version < bound for version, in_loss in stamped(sample))
    assert (straddling > 0) == (kind != "wait")
    for k, batch in batches_of(stage).items():
        oldest = [min(loaded[row["group_id"], row["member"], row["attempt"]]) for row in batch.rows if row["trained"]]
        assert batch.facts["min_contributing_version"] == max(k - 2, min(oldest))


@pytest.mark.parametrize("speaks", CALLS)
def test_E06_a_reset_of_the_cache_that_the_engine_refuses_is_noticed_told_and_done_again(tmp_path, speaks):
    reset = CALLS[speaks][-2]
    refusing = Rule(match={"path": reset}, nth=(3, 4), do=Reply(json={"success": False}))
    engine = EngineScript(speaks=speaks, token_seconds=TOKEN_SECONDS, rules=(refusing,))
    settings = {**BASE, "run.steps": 6, "engine.recompute_kv": False, "engine.kind": speaks}
    with Stage(tmp_path, engines=[engine], trainer=TrainerScript(step_seconds=0.2), settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        assert 'did not reset its prefix cache: {"success": false}' in (stage.run / "events.log").read_text()
        answered = [entry for entry in stage.requests("answered") if entry["path"] == reset]
        asked = [entry["time"] for entry in answered]
        assert len(asked) >= 6 + 2
        finished = stage.requests("finished")
        assert sum(entry["cache_hits"] for entry in finished) > 0
        assert sum(entry["stale_hits"] for entry in finished) == 0
        admitted = {event.group for event in events_of(stage, Admitted) if event.time > asked[2]}  # what began before may be on its way
        began = [entry["time"] for entry in stage.requests("arrived") if entry["turn"] == 1 and entry["group"] in admitted]
        assert not [time for time in began if asked[2] < time < asked[4]], "nothing is sent to an engine with old prefixes"


SESSIONS, ENGINES = 64, 4
DIES_AT = 40  # requests: when its sessions of the beginning are at their second and third turns


def test_I10_sessions_are_spread_evenly_stay_where_they_are_and_go_on_once_elsewhere_when_their_engine_dies(tmp_path):
    """Two engines of each kind. A session that was at the one that dies goes on at another, from where it was, as the same attempt."""
    environment = EnvironmentScript(
        prompts=200, rules=(EnvironmentRule(match={"purpose": "train"}, do=Act(turns=(Turn(max_tokens=8, observe="<"),) * 4)),)
    )
    settings = {
        "run.steps": 3,
        "rollout.groups_per_batch": SESSIONS // 4,
        "rollout.max_concurrent": SESSIONS,
        "rollout.max_attempts": 1,  # a session that is moved has not failed
    }
    speaks: list[EngineKind] = ["vllm", "sglang"] * (ENGINES // 2)
    dies = Rule(match={"purpose": "train"}, nth=(DIES_AT,), do=Reply(kill=True))
    engines = [EngineScript(speaks=kind, token_seconds=0.02, rules=(dies,) if number == 3 else ()) for number, kind in enumerate(speaks)]
    with Stage(tmp_path, engines=engines, environment=environment, settings=settings) as stage:
        stage.write_config(engine__urls=[f"{kind}+{engine.url}" for kind, engine in zip(speaks, stage.engines, strict=True)])
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        at = {}
        for number, engine in enumerate(stage.engines):
            for entry in engine.entries():
                if entry["what"] == "arrived":
                    at.setdefault((entry["group"], entry["member"]), []).append((entry["time"], number, entry["attempt"]))
        places = {session: [number for _, number, _ in sorted(requests)] for session, requests in at.items()}
        went = {session: [number for number, _ in groupby(visited)] for session, visited in places.items()}
        assert all(len(engines) == 1 or (engines[0], len(engines)) == (3, 2) for engines in went.values()), "a session stays where it is"
        assert any(len(engines) == 2 for engines in went.values())
        moved = [{attempt for *_, attempt in at[session]} for session, engines in went.items() if len(engines) == 2]
        assert all(attempts == {0} for attempts in moved), "as the same attempt"
        spread = Counter(min(requests)[1] for (group, _), requests in at.items() if group < SESSIONS // 4)
        assert all(abs(spread[number] - SESSIONS // ENGINES) <= 4 for number in range(ENGINES)), spread
        after = [entry["running"] for engine in stage.engines[:3] for entry in engine.entries() if entry["what"] == "arrived"]
        assert max(after) <= -(-SESSIONS // (ENGINES - 1)) + 4, "what it had is spread over the others"
        assert sum(stage.rows("pipeline.jsonl")[-1]["dropped"].values()) == 0
