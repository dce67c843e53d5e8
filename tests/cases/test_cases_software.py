"""A whole run records which engines and which trainer it has met, and points out at a resume what has changed."""

from headway import __version__
from headway.testing import EngineProcess, EngineScript, Stage, TrainerProcess, TrainerScript


def test_versions_of_engines_and_trainer_are_recorded_and_a_change_is_pointed_out_at_the_resume(tmp_path):
    scripts = [EngineScript(version="0.12.0"), EngineScript(version="0.11.0")]
    with Stage(tmp_path, settings={"run.steps": 2}, engines=scripts, trainer=TrainerScript(software="trl 0.20")) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        stage.check(ended)
        met = {"headway_version": __version__, "engine_version": "vllm 0.11.0, vllm 0.12.0", "trainer_version": "trl 0.20"}
        assert stage.info().items() >= met.items()
        assert " was " not in ended.err

        stage.trainer.kill()
        stage.engines[1].kill()
        stage.engines[1] = EngineProcess(tmp_path, script=EngineScript(version="0.12.0"), name="later").start()
        stage.trainer = TrainerProcess(stage.run, tmp_path, script=TrainerScript(software="trl 0.21"), name="later-trainer").start()
        stage.write_config(run__steps=4)
        ended = stage.play(resume=True)
        assert ended.code == 0, ended.err
        said = ["the engine was vllm 0.11.0, vllm 0.12.0 and is vllm 0.12.0 now", "the trainer was trl 0.20 and is trl 0.21 now"]
        assert [line for line in ended.err.splitlines() if " was " in line] == [f"headway: {line}" for line in said]
        assert all(line in (stage.run / "events.log").read_text() for line in said)
        assert (stage.info()["engine_version"], stage.info()["trainer_version"]) == ("vllm 0.12.0", "trl 0.21")
