"""The fake engine: in a test's own loop (`FakeEngine`), on a thread (`engine_thread`), as a process (`EngineProcess`)."""

from headway.testing.engine.process import EngineProcess, EngineThread, engine_thread
from headway.testing.engine.script import EngineScript, Reply, Rule
from headway.testing.engine.server import FakeEngine

__all__ = ["EngineProcess", "EngineScript", "EngineThread", "FakeEngine", "Reply", "Rule", "engine_thread"]
