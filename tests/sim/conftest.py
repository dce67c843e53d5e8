"""Async tests of this directory run on virtual time."""

from headway.sim.loop import VirtualLoop


def pytest_asyncio_loop_factories(config, item):
    return {"virtual": VirtualLoop}
