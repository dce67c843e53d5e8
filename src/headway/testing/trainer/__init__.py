"""The fake trainer: as a process (`TrainerProcess`) or on a thread (`trainer_thread`)."""

from headway.testing.trainer.process import TrainerProcess, TrainerThread, trainer_thread
from headway.testing.trainer.script import TrainerScript

__all__ = ["TrainerProcess", "TrainerScript", "TrainerThread", "trainer_thread"]
