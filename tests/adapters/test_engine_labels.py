"""Labels of a long run: each names its version, and none is kept for good."""

import tracemalloc

from headway.adapters.engines.generation import Labels


def test_the_labels_of_a_long_run_take_no_memory():
    labels = Labels("abc")
    labels.version("abc-0")
    tracemalloc.start()
    try:
        read = sum(labels.version(f"abc-{version}") == version for version in range(20_000))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == 20_000
    assert held < 50_000
