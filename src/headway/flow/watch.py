"""The one arrow back: a read-only view of the latest ledger, and `until(condition)` in place of polling.

Conditions are checked once per turn of the loop in which something changed, not once per change, and one that many wait for is asked once.
Most changes are rollouts that end (`rules.changes`); these concern only who waits for slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.rules.view import LedgerView

Condition = Callable[[LedgerView], bool]


class Watch:
    """A read-only view of the latest ledger, and a way to wait for what it will say."""

    def __init__(self, ledger: LedgerView) -> None:
        self.now = ledger
        self._waiters: dict[asyncio.Future[None], tuple[Condition, bool]] = {}  # with whether it is about slots
        self._scheduled = False
        self._only_slots = True  # of what changed since the last check

    async def until(self, condition: Condition, *, slots: bool = False) -> bool:
        """Return once the condition holds, and whether that was waited for. It is checked after changes; look again before acting if so.

        `slots`: it reads how many rollouts are in flight, and is checked also where no more has changed than that.
        """
        if condition(self.now):
            return False
        future = asyncio.get_running_loop().create_future()
        self._waiters[future] = (condition, slots)
        try:
            await future
        finally:
            self._waiters.pop(future, None)
        return True

    def touch(self, *, only_slots: bool = False) -> None:
        """Have the conditions checked, soon and once for all changes of this turn of the loop; `only_slots`: those that are about slots."""
        if not self._waiters:
            return
        self._only_slots &= only_slots
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        only_slots, self._only_slots = self._only_slots, True
        self._scheduled = False
        holds: dict[Condition, bool] = {}
        for future, (condition, slots) in list(self._waiters.items()):
            if (only_slots and not slots) or future.done():
                continue
            try:
                if condition not in holds:
                    holds[condition] = condition(self.now)
                if holds[condition]:
                    future.set_result(None)
            except Exception as error:  # noqa: BLE001  whoever waits gets it; the loop would only log it, and the others wait for ever
                future.set_exception(error)
