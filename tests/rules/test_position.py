"""How far a run is in its prompts: nothing is skipped and nothing comes twice, whatever was tried again in between."""

import random

import pytest

from headway.events import Admitted, GroupDropped, Resumed
from headway.rules.ledger import Ledger, apply
from headway.rules.position import Consumed
from headway.sim.prompts import ListPrompts
from headway.types import DataPosition

N, EPOCHS = 6, 3


class Life:
    """What a process does with its prompts: admits them in their order, and loses some of their groups."""

    def __init__(self):
        self.ledger, self.consumed, self.done = Ledger(), Consumed(), []

    def record(self, event):
        apply(self.ledger, event)
        if isinstance(event, Admitted):
            self.consumed.admitted(event)

    async def live(self, draw, steps):
        """Go on for so many admissions; return whether prompts are left."""
        back = []
        source = ListPrompts(N, epochs=EPOCHS, seed=3).after(self.consumed.position(self.ledger))
        for _ in range(steps):
            prompt = back.pop(0) if back else await anext(source, None)
            if prompt is None:
                return False
            group = self.ledger.next_group
            self.record(Admitted(0.0, group, prompt.id, prompt.epoch, 1, 0))
            if draw.random() < 0.3:
                self.record(GroupDropped(0.0, group, "stale", "", 0, requeued=True))
                back.append(prompt)
            elif draw.random() < 0.6:
                self.record(GroupDropped(0.0, group, "filtered", "", 0))
                self.done.append((prompt.id, prompt.epoch))
        return True

    def end(self):
        """The process ends: what was in flight is begun anew."""
        self.record(Resumed(0.0, 0, 0, "line"))
        for group in list(self.ledger.interrupted):
            self.record(GroupDropped(0.0, group, "interrupted", "", 0, requeued=True))


@pytest.mark.parametrize("seed", range(40))
async def test_through_any_number_of_lives_each_prompt_of_each_epoch_is_done_once(seed):
    draw, life = random.Random(seed), Life()
    for _ in range(200):
        left = await life.live(draw, draw.randint(0, 9))
        life.end()
        if not left and not life.ledger.waiting:
            break
    assert sorted(life.done) == sorted((f"prompt-{n}", epoch) for n in range(N) for epoch in range(EPOCHS))


def test_a_position_is_in_the_newest_epoch_and_older_ones_are_over_but_for_what_waits():
    position = DataPosition(2, frozenset({"a"}), {("b", 0): 1})
    assert position.first_epoch == 0
    assert position.has_left("b", 0)
    assert not position.has_left("a", 0)
    assert not position.has_left("c", 1)
    assert not position.has_left("a", 2)
    assert position.has_left("b", 2)
    assert position.has_left("a", 3)
