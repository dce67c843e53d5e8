"""Doubles and checks for whoever runs headway: a fake engine, a fake environment, a fake trainer, and what must hold of every run.

The fakes are real on the outside (HTTP, files, processes) and scripted on the inside; none needs torch. See docs/how-to/testing.md.
"""

from headway.testing.acts import Act, EnvironmentRule, EnvironmentScript, Fault, Turn
from headway.testing.check import Violation, assert_run, check_run
from headway.testing.engine import EngineProcess, EngineScript, EngineThread, FakeEngine, Reply, Rule, engine_thread
from headway.testing.log import read_log, read_logs
from headway.testing.model import ids_of, text_of, write_tiny_model
from headway.testing.stage import Ended, Playing, Stage
from headway.testing.trainer import TrainerProcess, TrainerScript, TrainerThread, trainer_thread

__all__ = [
    "Act",
    "Ended",
    "EngineProcess",
    "EngineScript",
    "EngineThread",
    "EnvironmentRule",
    "EnvironmentScript",
    "FakeEngine",
    "Fault",
    "Playing",
    "Reply",
    "Rule",
    "Stage",
    "TrainerProcess",
    "TrainerScript",
    "TrainerThread",
    "Turn",
    "Violation",
    "assert_run",
    "check_run",
    "engine_thread",
    "ids_of",
    "read_log",
    "read_logs",
    "text_of",
    "trainer_thread",
    "write_tiny_model",
]
