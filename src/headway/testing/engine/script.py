"""What the fake engine is told to do: replies, rules that hand them out, and the whole as a file."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headway.testing.model import EOS, FIRST_ID, VOCABULARY
from headway.testing.rules import Firing

NotNegative = Annotated[float, Meta(ge=0)]


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What comes back for one request. All defaults: what an honest engine answers.

    Generations: `ids` are sampled exactly, or `tokens` of them (a number, or a range to draw from by the request's seed; unset: 1 to
    max_tokens), at `token_seconds` each; `max_tokens` is kept unless `ids` say otherwise. `finish` "auto": "stop", with the end token last,
    or "length" where the budget cut it; null: the field is absent. `logprobs`: right (of the distribution that was sampled from), "raw" (as
    at temperature 1, whatever was asked for), one "fewer" or "more" than ids, "none" (an empty list), "absent", or "nan". `label` is
    claimed instead of the served one; `spans` "absent" leaves the versions out.

    All requests: after `seconds`, the answer is `status` with `text` or `json` (unset: the honest body). With `status` not 200, `text` or
    `json` nothing is carried out (`effect` true: it is, and the answer lies). `hang`: never an answer. `cut`: the connection is cut.
    `trickle_seconds`: the body comes in pieces of 64 bytes, so far apart. `deaf`: who leaves is
    written for all the same. `kill`: the engine dies on the spot, as by kill -9.
    """

    ids: tuple[int, ...] | None = None
    tokens: int | tuple[int, int] | None = None
    token_seconds: NotNegative | None = None
    finish: str | None = "auto"
    logprobs: Literal["right", "raw", "fewer", "more", "none", "absent", "nan"] = "right"
    label: str | None = None
    spans: Literal["right", "absent"] = "right"
    seconds: NotNegative = 0.0
    status: int = 200
    text: str | None = None
    json: Any = None
    content_type: str = ""
    headers: dict[str, str] = {}
    effect: bool | None = None
    hang: bool = False
    cut: bool = False
    trickle_seconds: NotNegative = 0.0
    deaf: bool = False
    kill: bool = False

    @property
    def is_honest(self) -> bool:
        """Whether the answer's body is what was done, and not scripted."""
        return self.status == 200 and self.text is None and self.json is None

    @property
    def carries_out(self) -> bool:
        """Whether what was asked for is done."""
        return self.is_honest if self.effect is None else self.effect


class Rule(Firing, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`do` this for the requests that `match`. Facts to match on: see `calls.facts_of`."""

    do: Reply = Reply()


class EngineScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole engine. Sampled ids are drawn from [`first_id`, `vocabulary`) and `eos`; a prompt of `context` tokens or more is refused.

    `speaks`: whose routes are served, the other's answer 404. `version`: which release of it it says that it is. `generate_route` false:
    vLLM without --enable-scale-out, which has /v1/completions only. `model`: directory of the weights that it is started with; unset: they
    are not known, and the first load tells which tensors there are. `cache_block`: prompts are cached in blocks of so many tokens, each
    stamped with the weights that filled it. `pause_clears` false: a pause forgets none of them, whatever it is asked for. `pause_holds`
    false: a pause holds what comes, and what is under way goes on.
    """

    speaks: Literal["vllm", "sglang", "both"] = "both"
    generate_route: bool = True
    model: str = ""

    rules: tuple[Rule, ...] = ()
    default: Reply = Reply()
    label: str = "default"
    version: str = "0.0.0"
    token_seconds: NotNegative = 0.0
    load_seconds: NotNegative = 0.0
    context: int = 4096
    first_id: int = FIRST_ID
    vocabulary: int = VOCABULARY
    eos: int = EOS
    cache_block: int = 4
    pause_clears: bool = True
    pause_holds: bool = True


def load_script(path: Path) -> EngineScript:
    """Read a script from JSON. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=EngineScript)


def planned(
    reply: Reply, script: EngineScript, *, seed: int, max_tokens: int, stops: Collection[int] = (), greedy: bool = False
) -> tuple[list[int], str]:
    """Return the ids that a reply will sample and how they end, at the first of `stops` at the latest: the same for the same seed.

    `greedy`: they are only counted, up to the budget, and the weights pick them.
    """
    if reply.ids is not None:
        ids, finish = list(reply.ids), "stop"
    elif greedy and reply.tokens is None:
        ids, finish = [script.first_id] * max_tokens, "length"
    else:
        chance = random.Random(seed)  # noqa: S311 -- a fake's tokens
        low, high = (1, max_tokens) if reply.tokens is None else (reply.tokens,) * 2 if isinstance(reply.tokens, int) else reply.tokens
        wanted = chance.randint(low, high)
        count = min(wanted, max_tokens)
        ids = [chance.randrange(script.first_id, script.vocabulary) for _ in range(count)]
        finish = "stop" if wanted <= max_tokens else "length"
        if finish == "stop" and count > 1:
            ids[-1] = script.eos  # a one-token turn keeps its token: there would be nothing to read in it
        cut = next((index for index, token in enumerate(ids) if token in stops), None)
        if cut is not None:
            ids, finish = ids[: cut + 1], "stop"
    return ids, finish if reply.finish == "auto" else reply.finish or ""


def logprob_of(token_id: int, index: int) -> float:
    """Return the log-probability that an honest answer gives: negative, exact in float32, told by its place and its id."""
    return -(1 + token_id % 16) / 8 - (index % 8) / 64
