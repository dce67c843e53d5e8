"""The configured bound is the observed bound: whole runs by the components that ship, over every shape of latency, mode, S and room."""

import os
from itertools import combinations, product
from typing import NamedTuple

import pytest
from bound_world import LATENCIES, MODES, bounded, bounded_world, four_fifths, play

from headway.sim.worker import Fault

B, STEPS = 16, 40
BOUNDS = (0, 1, 2, 4, 8)
ROOM = ("ample", "scarce")
MEMBERS = (1, 8)
FAULTS = (Fault("environment_error", 0.07), Fault("worker_died", 0.03, retryable=False))  # 10 % of the attempts


class Cell(NamedTuple):
    latency: str
    bound: int
    mode: str
    room: str
    members: int


def chosen():
    """Every latency with every S and mode, rooms in turn, every third pair of cells with large groups."""
    for (i, latency), (j, bound), (m, mode) in product(enumerate(LATENCIES), enumerate(BOUNDS), enumerate(MODES)):
        number = i + j + m
        yield Cell(latency, bound, mode, ROOM[number % 2], MEMBERS[number // 2 % 3 == 0])


ALL = [Cell(*values) for values in product(LATENCIES, BOUNDS, MODES, ROOM, MEMBERS)]
CELLS = ALL if os.environ.get("HEADWAY_FUZZ") else list(chosen())  # the whole product: `make fuzz`


def section(cell):
    need = B * cell.members
    room = (cell.bound + 2) * need if cell.room == "ample" else need // 4
    return bounded(cell.mode, cell.bound, groups_per_batch=B, group_size=cell.members, max_concurrent=room)


def test_the_chosen_cells_hold_every_three_values_together_and_with_group_sizes_every_two():
    def together(cells, columns, n):
        return {tuple((column, cell[column]) for column in picked) for picked in combinations(columns, n) for cell in cells}

    assert together(list(chosen()), range(4), 3) == together(ALL, range(4), 3)
    assert together(list(chosen()), range(5), 2) == together(ALL, range(5), 2)
    assert (len(list(chosen())), len(ALL)) == (200, 800)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: ", ".join(map(str, cell)))
def test_no_token_over_the_bound_and_the_books_close(cell):
    world = bounded_world(LATENCIES[cell.latency], faults=FAULTS, keep=four_fifths)
    number = ALL.index(cell)
    result = play(world, section(cell), STEPS, interleaving=number if number % 2 else None)
    assert result.reason == f"all {STEPS} steps are trained"
    assert len(result.batches) == STEPS
    assert result.ledger.dropped["filtered"] > 0
    assert result.ledger.lost["environment_error"] > 0
    if cell.room == "ample":
        assert result.max_staleness == cell.bound, "with A = S and room to spare the bound is reached"
