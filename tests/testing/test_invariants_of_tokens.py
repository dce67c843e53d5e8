"""The invariants of single tokens, 2 and 3, fail of a run that breaks them."""

import numpy as np
import pytest

pytestmark = pytest.mark.e2e


# ----------------------------------------------------------------------------------------------------------------------------- 2 bound


def test_2_a_token_too_old(scene):
    arrays = scene.arrays(4)
    arrays["versions"][np.flatnonzero(arrays["loss_mask"])[0]] = 0
    scene.set_arrays(4, **arrays)
    scene.set_facts(4, min_contributing_version=0)
    assert 2 in scene.broken()


def test_2_a_token_of_the_future(scene):
    arrays = scene.arrays(1)
    arrays["versions"][np.flatnonzero(arrays["loss_mask"])[0]] = 2
    scene.set_arrays(1, **arrays)
    assert 2 in scene.broken()


def test_2_a_batch_with_more_room_than_the_config_gives(scene):
    scene.set_facts(1, max_staleness=7)
    assert scene.broken() == {2}


def test_2_a_manifest_that_hides_the_oldest_token(scene):
    scene.set_facts(4, min_contributing_version=5)
    assert scene.broken() == {2}


def test_2_stamps_too_old_for_tokens_that_train(scene):
    rows = scene.rows(4)
    sample = next(row for row in rows if row["trained"])["samples"][0]
    sample["span_start"], sample["span_version"] = [0], [0]
    scene.set_rows(4, rows)
    assert 2 in scene.broken()


def test_2_a_stamp_newer_than_the_weights_that_wrote_it(scene):
    for log in scene.engines:
        for entry in log:
            if entry["what"] == "finished":
                entry["loaded"] = [[0, start, end] for _, start, end in entry["loaded"]]
    assert scene.broken() == {2}


# -------------------------------------------------------------------------------------------------------------------------- 3 fidelity


def test_3_an_id_that_the_engine_did_not_write(scene):
    finished = [entry for log in scene.engines for entry in log if entry["what"] == "finished" and entry["ids"]]
    for entry in finished:
        entry["ids"] = [entry["ids"][0] + 1, *entry["ids"][1:]]
    assert scene.broken() == {3}


def test_3_a_logprob_that_the_engine_did_not_give(scene):
    for log in scene.engines:
        for entry in log:
            if entry["what"] == "finished" and entry["logprobs"]:
                entry["logprobs"][-1] -= 0.5
    assert scene.broken() == {3}


def test_3_a_stamp_that_the_engine_did_not_say(scene):
    for log in scene.engines:
        for entry in log:
            if entry["what"] == "finished":
                entry["labels"] = [["run-99", start, end] for _, start, end in entry["labels"]]
    assert scene.broken() == {3}


def test_3_a_turn_that_was_not_sent_what_stood_before_it(scene):
    for log in scene.engines:
        for entry in log:
            if entry["what"] == "arrived" and entry["turn"] == 2:
                entry["prompt"][-1] += 1
    assert scene.broken() == {3}


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "sampled_mask"])
def test_3_lists_of_a_sample_with_unequal_lengths(scene, name):
    rows = scene.rows(2)
    rows[0]["samples"][0][name].append(rows[0]["samples"][0][name][-1])
    scene.set_rows(2, rows)
    assert 3 in scene.broken()


def test_3_an_observed_token_in_the_loss(scene):
    rows = scene.rows(2)
    rows[0]["samples"][0]["loss_mask"][0] = True
    scene.set_rows(2, rows)
    assert 3 in scene.broken()


def test_3_arrays_that_are_not_the_record(scene):
    arrays = scene.arrays(3)
    arrays["token_ids"][0] += 1
    scene.set_arrays(3, **arrays)
    assert scene.broken() == {3}


def test_3_a_version_in_the_arrays_that_is_not_the_stamp_though_young_enough(scene):
    arrays = scene.arrays(4)
    trains = np.flatnonzero(arrays["loss_mask"])
    newest = trains[arrays["versions"][trains].argmax()]
    arrays["versions"][newest] = 3 if arrays["versions"][newest] != 3 else 4  # both young enough for batch 4
    scene.set_arrays(4, **arrays)
    scene.set_facts(4, min_contributing_version=int(arrays["versions"][trains].min()))
    assert scene.broken() == {3}


def test_3_an_advantage_that_changes_within_a_sample(scene):
    arrays = scene.arrays(3)
    arrays["advantages"][0] += 1
    scene.set_arrays(3, **arrays)
    assert scene.broken() == {3}
