"""What an event can change for those who wait: a rollout that ends frees a slot, and nothing else.

Of all events the most tell that one rollout has ended. Beside the slots it leaves behind what reports and choices read (tokens, bytes,
causes), but nothing that a group could wait for to be admitted by staleness, scored, formed, trained, published or evaluated.
"""

from __future__ import annotations

from headway.events import AnyEvent, Finished, RolloutDropped

_ENDS = frozenset({Finished, RolloutDropped})


def frees_slots_only(event: AnyEvent) -> bool:
    """Whether nothing but the number of rollouts in flight is different for who waits, once this has happened."""
    return type(event) in _ENDS
