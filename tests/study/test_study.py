"""The study of on_stale's default, in short: its schedule, masks, stamps and figures are what they claim; nothing here hopes to learn."""

import asyncio
import itertools
import json

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("transformers")

import run as study_run  # noqa: E402
from game import DIGITS, FORK_SHARE, KINDS, PROMPTS, TOOL, TURNS, VOCABULARY, all_histories, dealt, is_long, reward, tables_of  # noqa: E402
from grid import collapse, deciding  # noqa: E402
from play import ARMS, MEMBERS, Cell, play  # noqa: E402
from row import row_of  # noqa: E402
from verdict import Place, broken, by_place, covered, estimate, gap  # noqa: E402
from world import TURN_SECONDS, StudyWorker, ToolDelay, Weights  # noqa: E402

from headway.sim.engine import EngineSettings, SimEngine  # noqa: E402
from headway.sim.loop import run as run_on_virtual_time  # noqa: E402
from headway.types import AttemptRequest, Checkpoint, Prompt, SamplingParams  # noqa: E402

pytestmark = pytest.mark.torch

S, STEPS = 2, 9


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def played():
    """Runs by (arm, share), each played once."""
    runs = {}

    def one(arm, share):
        if (arm, share) not in runs:
            runs[arm, share] = play(Cell(arm=arm, S=S, share=share, rate=1.0, seed=0, steps=STEPS))
        return runs[arm, share]

    return one


def random_tables(seed):
    noise = np.random.default_rng(seed).normal(0, 2, (len(all_histories()), TURNS, VOCABULARY))
    return tables_of(noise - np.log(np.exp(noise).sum(-1, keepdims=True)))


def test_expected_rewards_are_those_of_playing_every_game():
    tables = random_tables(0)
    expected = dict.fromkeys(KINDS, 0.0)
    for kind, hidden in itertools.product(KINDS, range(DIGITS)):
        for tokens in itertools.product(range(VOCABULARY), repeat=TURNS):
            won = reward(kind, hidden, tokens)
            if won:
                logprob = sum(tables.after(kind, hidden, tokens[:turn])[token] for turn, token in enumerate(tokens))
                expected[kind] += won * np.exp(logprob) / DIGITS
    assert tables.fork_value == pytest.approx(expected["fork"])
    assert tables.value == pytest.approx(FORK_SHARE * expected["fork"] + (1 - FORK_SHARE) * expected["plain"])
    assert sum(dealt(number)[0] == "fork" for number in range(PROMPTS)) == pytest.approx(FORK_SHARE * PROMPTS)
    assert is_long("fork", (TOOL,))
    assert not is_long("plain", (TOOL,))


@pytest.mark.parametrize("arm", ARMS)
def test_a_bound_arm_keeps_its_bound_and_two_measurements_of_every_batch_agree(played, arm):
    run = played(arm, 1.0)
    bound = 0 if ARMS[arm].synchronous else S
    assert list(run.store.kept.batches) == list(range(STEPS))
    for kept, row in zip(run.store.kept.batches.values(), run.store.rows, strict=True):
        # by the headers' spans, in sim.store; by the payloads' stamps, in formats.batch
        assert sum(kept.tokens.values()) == row["contributing_tokens"]
        assert sum(kept.masked.values()) == row["masked_tokens"]
        assert max(kept.tokens) == row["token_staleness_max"]
        if ARMS[arm].on_stale != "train":
            assert max(kept.tokens) <= bound
        assert all(staleness > bound for staleness in kept.masked)
        assert not kept.masked or arm == "mask"
    masked = sum(sum(kept.masked.values()) for kept in run.store.kept.batches.values())
    assert (masked > 0) == (arm == "mask")


def test_the_delay_puts_the_arranged_share_of_long_rollouts_over_the_bound(played):
    none, every = played("train+tis", 0.0), played("train+tis", 1.0)
    assert not any(counts["slow"] or counts["fork over"] or counts["plain over"] for counts in none.store.counts)
    assert all(counts["slow"] == counts["long"] for counts in every.store.counts)
    assert not any(counts["long over"] for counts in every.store.counts[: S + 1])  # nothing is so old yet
    late = every.store.counts[S + 1 : -2]  # towards the end nothing new is admitted, and the last batches wait for who is slow
    assert sum(counts["long"] for counts in late) > MEMBERS
    assert all(counts["long over"] == counts["long"] for counts in late)
    assert row_of(every)["staleness_max"] > S


def test_wait_pays_in_seconds_and_drop_in_tokens(played):
    mask, wait, drop = (row_of(played(arm, 1.0)) for arm in ("mask", "wait", "drop"))
    assert wait["seconds"] > 1.1 * mask["seconds"]
    assert wait["sampled_tokens"] == mask["sampled_tokens"]
    assert wait["stale_groups"] == wait["long_lost_share"] == wait["masked_share"] == 0
    assert drop["sampled_tokens"] > mask["sampled_tokens"]
    assert drop["stale_groups"] > 0
    assert drop["long_lost_share"] > 0.5


def test_stamps_and_logprobs_are_those_of_the_weights_that_wrote_the_tokens(played):
    run = played("synchronous", 0.0)
    for measured in run.measured:  # every token is fresh: the trainer's own packed pass must find the sampler's numbers
        assert measured["mismatch_kl"] < 1e-8
        assert measured["ess"] == pytest.approx(1.0, abs=1e-5)
    assert {tokens for kept in run.store.kept.batches.values() for tokens in kept.tokens} == {0}


def test_a_turn_that_begins_during_a_weight_sync_waits_for_its_end_and_is_stamped_with_the_new_version():
    async def main():
        engine = SimEngine("engine-0", EngineSettings(transfer_seconds=1.0))
        weights = Weights(dict.fromkeys((0, 1), random_tables(0)))
        worker = StudyWorker(engine, weights, ToolDelay(seed=0, slow_share=0.0, slow_seconds=0.0))
        prompt = Prompt("0", 0, {"number": 0})
        request = AttemptRequest(0, 0, 0, prompt, "train", engine.url, seed=0, sampling=SamplingParams(), max_rollout_tokens=0)
        _, rollout = await asyncio.gather(sync(engine), worker.attempt(request))
        assert rollout.started == 0.0
        assert rollout.finished >= 1.0 + TURNS * TURN_SECONDS - 1e-9
        assert (rollout.head, rollout.tail) == (1, 1)

    async def sync(engine):
        await engine.prepare(checkpoint := Checkpoint(1, "study-1", "sim://1"))
        await engine.transfer(checkpoint)
        await engine.commit(checkpoint)

    run_on_virtual_time(main(), limit_seconds=100.0)


@pytest.mark.parametrize("lag", [1, 4])
def test_an_exact_lag_is_exact(lag):
    run = play(Cell(arm="train+reinforce", S=lag, share=0.0, rate=1.0, seed=0, steps=6, lag=lag))
    assert [set(kept.tokens) for kept in run.store.kept.batches.values()] == [{min(k, lag)} for k in range(6)]


def test_a_run_comes_out_the_same_again_bit_for_bit():
    cell = Cell(arm="mask", S=1, share=0.5, rate=1.0, seed=0, steps=4)
    first, again = play(cell), play(cell)
    assert json.dumps(row_of(again)) == json.dumps(row_of(first))
    assert again.events == first.events


def test_the_grid_is_whole_and_a_restart_plays_what_is_missing(tmp_path):
    cells = deciding(seeds=2)
    assert len({cell.arm for cell in cells}) == len(ARMS)
    assert len(set(cells)) == len(cells)
    assert len(collapse(seeds=3)) == 3 * 4 * 3 * 3
    out = tmp_path / "results.jsonl"
    out.write_text("".join(json.dumps({name: getattr(cell, name) for name in Cell.__struct_fields__}) + "\n" for cell in cells[:7]))
    assert study_run._missing(cells, out) == cells[7:]
    assert study_run._missing(cells, tmp_path / "none.jsonl") == cells


def rows_of(arm, values, *, coverage=0.9, measure="reward_per_token"):
    other = {"reward_per_token": "reward_per_second", "reward_per_second": "reward_per_token"}[measure]
    return [
        {"arm": arm, "S": 2, "rate": 1.0, "share": 0.5, "seed": seed, "lag": None, "head_coverage_long": coverage}
        | {measure: value, other: 1.0}
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("mask", "coverage", "applies", "breaks"),
    [
        ((1.0, 1.2, 1.1), 0.9, True, False),  # mask is the best
        ((0.95, 1.05, 1.0), 0.9, True, True),  # .06 below, by 1.4 standard errors
        ((0.9, 1.1, 1.0), 0.9, True, False),  # .06 below, by less than one
        ((0.1, 0.1, 0.1), 0.4, False, False),  # far below, where the rule says nothing
    ],
)
@pytest.mark.parametrize("measure", ["reward_per_token", "reward_per_second"])
def test_the_rule_is_applied_as_it_was_written_down(mask, coverage, applies, breaks, measure):
    rows = rows_of("mask", mask, coverage=coverage, measure=measure) + rows_of("wait", (1.03, 1.09, 1.06), measure=measure)
    rows += rows_of("synchronous", (9.0, 9.0, 9.0), measure=measure)  # for reference only
    places = by_place(rows)
    assert covered(places) == [Place(2, 1.0, 0.5)] * applies
    assert broken(places, covered(places)) == [Place(2, 1.0, 0.5)] * breaks
    assert broken(places, list(places), rivals=["mask"]) == []


def test_a_gap_counts_standard_errors_of_the_difference():
    arms = {"mask": rows_of("mask", (1.0, 2.0, 3.0)), "drop": rows_of("drop", (4.0, 4.0, 4.0))}
    found = gap(arms, "reward_per_token")
    assert (found.best, found.value, found.relative) == ("drop", 2.0, 0.5)
    assert found.errors == pytest.approx(2.0 / (1 / 3**0.5))
    assert not found.within
    assert gap(arms, "reward_per_token", arm="drop").within
    assert gap(arms, "reward_per_token", paired=True).errors == pytest.approx(2.0 / (1 / 3**0.5))  # drop is constant: nothing to pair
    assert estimate([], "reward_per_token") is None
    assert estimate([{"x": 1.0}, {"x": None}], "x") == (1.0, 0.0, 1)
