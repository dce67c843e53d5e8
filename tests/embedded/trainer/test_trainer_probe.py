"""probe.npz as the trainer writes it: what the model says, and an engine that serves the weights passes by it, one with others does not."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from trainer_runs import LINEAGE, TINY, config

from headway.adapters.engines import admin_of
from headway.errors import EngineFailed
from headway.formats.manifest import read_manifest
from headway.formats.probe import Probe, read_probe, write_probe
from headway.settings import EngineSection, InitSection
from headway.types import Checkpoint, EngineAddress

torch = pytest.importorskip("torch")
import msgspec  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from headway.embedded.engine.process import running  # noqa: E402
from headway.embedded.engine.settings import EngineServerSettings  # noqa: E402
from headway.embedded.trainer.loop import Trainer  # noqa: E402

pytestmark = pytest.mark.torch


def version_0(run, *, dtype="float32", init: InitSection = TINY):
    settings = config()
    model = msgspec.structs.replace(settings.model, init=init)
    trainer = msgspec.structs.replace(settings.trainer, dtype=dtype)
    Trainer(run, msgspec.structs.replace(settings, model=model, trainer=trainer), lineage=LINEAGE)
    return run.weight(0)


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_a_probe_says_what_the_published_weights_say(run, dtype, within):
    directory = version_0(run, dtype=dtype)
    probe = read_probe(directory)
    assert "probe.npz" in read_manifest(directory).files
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        said = model(torch.tensor([probe.token_ids])).logits[0, -1].log_softmax(-1)
    assert len(probe.token_ids) == 32
    assert (said - torch.from_numpy(probe.logprobs)).abs().max() < within


def test_a_model_with_a_short_context_gets_a_short_prompt(run):
    probe = read_probe(version_0(run, init=msgspec.structs.replace(TINY, max_position_embeddings=16)))
    assert len(probe.token_ids) == 15


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["in_flight", "abort_resume", "wait"])
async def test_the_embedded_engine_passes_by_it_and_one_with_other_weights_does_not(run, tmp_path, dtype, mode):
    directory = version_0(run, dtype=dtype)
    async with running(EngineServerSettings(model=directory, label="default", threads=1)) as (url, _):
        admin = admin_of("engine-0", EngineAddress(url), EngineSection(weight_sync=mode), model=str(directory))
        for version in (0, 1):
            weights = Checkpoint(version, f"{LINEAGE}-{version}", str(directory))
            await admin.prepare(weights)
            await admin.transfer(weights)
            await admin.commit(weights)
        assert await admin.sampled_tokens() == 0
        other = Path(shutil.copytree(directory, tmp_path / "other"))
        probe = read_probe(directory)
        certain = np.full(len(probe.logprobs), 0.01 / (len(probe.logprobs) - 1))
        certain[0] = 0.99
        write_probe(other, Probe(probe.token_ids, np.log(certain).astype(np.float32)))
        strange = Checkpoint(2, f"{LINEAGE}-2", str(other))
        await admin.prepare(strange)
        await admin.transfer(strange)
        with pytest.raises(EngineFailed, match="serves other weights"):
            await admin.commit(strange)
        await admin.close()
