"""K07: an exporter that fails or hangs, when it is made, in between, or when it is closed, holds up neither the run nor its end."""

import threading

import pytest

from headway.adapters.exporters.behind import BehindExporter


class Kept:
    """Keeps rows; stands still in a call while `gate` is not set."""

    def __init__(self, *, gate=None, stuck_in="", raises_in=""):
        self.rows = []
        self.closed = 0
        self._gate = gate
        self._stuck_in = stuck_in
        self._raises_in = raises_in
        self._do("make")

    def _do(self, call):
        if call == self._raises_in:
            raise ConnectionError(f"no tracker at {call}")
        if call == self._stuck_in:
            self._gate.wait()

    def export(self, stream, row):
        self._do("export")
        self.rows.append((stream, row["n"]))

    def close(self):
        self._do("close")
        self.closed += 1


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def test_rows_arrive_in_order_and_before_the_close():
    kept = Kept()
    behind = BehindExporter("kept", lambda: kept)
    for n in range(500):
        behind.export("metrics", {"n": n})
    behind.close()
    behind.close()
    assert kept.rows == [("metrics", n) for n in range(500)]
    assert (kept.closed, behind.lost) == (1, 0)


@pytest.mark.parametrize("stuck_in", ["make", "export", "close"])
def test_K07_an_exporter_that_hangs_costs_the_run_nothing_and_its_end_the_limit(stuck_in, gate, caplog):
    behind = BehindExporter("tracker", lambda: Kept(gate=gate, stuck_in=stuck_in), rows_waiting=8, close_seconds=0.3)
    for n in range(100):  # whoever waited here, or at the close, for one that hangs would wait for ever: the gate stays shut
        behind.export("metrics", {"n": n})
    behind.close()
    assert "exporter tracker: it did not close within 0.3 s" in caplog.text
    if stuck_in != "close":
        assert behind.lost >= 99


@pytest.mark.parametrize("raises_in", ["make", "export", "close"])
def test_K07_an_exporter_that_raises_is_reported_once_and_its_rows_are_counted(raises_in, caplog):
    behind = BehindExporter("tracker", lambda: Kept(raises_in=raises_in))
    for n in range(20):
        behind.export("metrics", {"n": n})
    behind.close()
    assert behind.lost == (0 if raises_in == "close" else 20)
    assert len([record for record in caplog.records if "no tracker at" in record.getMessage()]) == 1


def test_K07_one_that_hangs_for_a_while_gets_what_the_queue_has_kept(gate):
    made = []

    def make():
        made.append(Kept(gate=gate, stuck_in="export"))
        return made[0]

    behind = BehindExporter("tracker", make, rows_waiting=1000)
    for n in range(300):
        behind.export("pipeline", {"n": n})
    gate.set()
    behind.close()
    assert [n for _, n in made[0].rows] == list(range(300))
