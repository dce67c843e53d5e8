"""The one arrow back: a read-only view of the latest ledger, and `until(condition)` in place of polling.

Conditions are checked once per turn of the loop in which something changed, not once per change.
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
        self._waiters: dict[asyncio.Future[None], Condition] = {}
        self._scheduled = False

    async def until(self, condition: Condition) -> None:
        """Return once the condition holds. It is checked after changes; look again before acting if anything was awaited since."""
        if condition(self.now):
            return
        future = asyncio.get_running_loop().create_future()
        self._waiters[future] = condition
        try:
            await future
        finally:
            self._waiters.pop(future, None)

    def touch(self) -> None:
        """Have the conditions checked, soon and once for all changes of this turn of the loop."""
        if self._waiters and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        self._scheduled = False
        for future, condition in list(self._waiters.items()):
            if future.done():
                continue
            try:
                if condition(self.now):
                    future.set_result(None)
            except Exception as error:  # noqa: BLE001  whoever waits gets it; the loop would only log it, and the others wait for ever
                future.set_exception(error)
