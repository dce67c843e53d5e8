"""Groups as somebody outside the run offers them: played elsewhere, with no place in a batch yet."""

from typing import Any

from headway.formats.offered import UNPLACED, OfferedGroup
from headway.types import Rollout


def offered_group(name, source, rewards=(0.0, 1.0)):
    """A group of `source` ("external" or "replay"): a member per reward."""

    def one(member, reward):
        header: dict[str, Any] = {
            "rewards": {},
            "finish": "stop",
            "turns": 1,
            "started": 0.0,
            "finished": 0.0,
            "engine": "",
            "metadata": {},
        }
        figures: dict[str, Any] = {"samples": 1, "tokens": 9, "sampled_tokens": 5, "head": -1, "tail": -1, "payload": b""}
        return Rollout(UNPLACED, member, 0, name, "elsewhere", reward, source=source, **header, **figures)

    return OfferedGroup(name, source, tuple(one(member, reward) for member, reward in enumerate(rewards)))
