"""Runs between fakes that cannot end before a test says so: their trainer stands still at a batch, however late the test comes.

While it does, at most two batches more are formed; another trainer takes up the newest version, and the run goes on.
"""

from headway.testing import Stage, TrainerProcess, TrainerScript


def hold(stage: Stage, k: int) -> None:
    """Have the trainer of a stage stand still at batch `k`. Call before the run is started."""
    _train(stage, TrainerScript(stall_at=k))


def go_on(stage: Stage) -> None:
    """Have the batches trained that there are, and whatever comes."""
    _train(stage, TrainerScript())


def _train(stage: Stage, script: TrainerScript) -> None:
    stage.trainer.kill()
    stage.trainer = TrainerProcess(stage.run, stage.directory, script=script).start()  # with the same log: it is the run's trainer
