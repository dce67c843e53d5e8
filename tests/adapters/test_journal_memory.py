import pytest
from small_rollouts import finished, small_rollout

from headway.adapters.journal.memory import MemoryJournal
from headway.errors import StorageError
from headway.protocols import Entry
from headway.types import Admitted, Finished


async def test_events_replay_in_order_and_rollouts_are_found():
    journal = MemoryJournal()
    admitted, rollout = Admitted(0.0, 5, "prompt-5", 0, 1, 0), small_rollout(5)
    written = await journal.append([Entry(admitted), finished(rollout)])
    await journal.append([Entry(Admitted(2.0, 6, "prompt-6", 0, 1, 0))])
    assert [type(event) for event in journal.replay()] == [Admitted, Finished, Admitted]
    assert await journal.read(written[1]) is rollout
    with pytest.raises(StorageError, match="holds no rollout"):
        await journal.read(admitted)
    await journal.close()
