"""A trainer that offers more than a directory beside its versions, played to its end; what it offers, and whether a delta is true.

Needs torch: who imports it has asked for that.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from trainer_runs import LINEAGE, config

from headway.embedded.trainer.loop import Trainer
from headway.formats.delta import TENSORS, read_delta, refuse_other_base, tensor_hashes, verified_tensors
from headway.formats.manifest import read_manifest
from headway.formats.offers import read_offers
from headway.formats.run_directory import RunDirectory
from headway.settings import EngineSection
from headway.types import TransferWay

# In bfloat16 a norm's ones stay what they are for a while: every delta has something to leave out.
ROUNDED: dict[str, Any] = {"dtype": "bfloat16", "learning_rate": 1e-5}


def trainer_of(run: RunDirectory, way: TransferWay, run_id: str = LINEAGE, **keys) -> Trainer:
    whole = msgspec.structs.replace(config(**keys), engine=EngineSection(weight_transfer=way))
    return Trainer(run, whole, lineage=LINEAGE, run_id=run_id)


def play(run: RunDirectory, way: TransferWay, run_id: str = LINEAGE, **keys) -> Trainer:
    trainer = trainer_of(run, way, run_id, **keys)
    trainer.run(threading.Event())
    return trainer


def offers(run: RunDirectory, version: int):
    said, problem = read_offers(read_manifest(run.weight(version)).extra.get("offers"), run=run.path, version=version)
    assert problem == ""
    return said


def weights(run: RunDirectory, version: int):
    return load_file(run.weight(version) / TENSORS)


def assert_delta_leads_to(run: RunDirectory, version: int) -> None:
    """Hold the delta of a version against base and version, both complete on disk."""
    offer = offers(run, version)["delta"]
    delta = read_delta(run.delta(version))
    assert delta is not None
    carried = verified_tensors(run.delta(version), delta)
    assert (delta.lineage, delta.base, delta.version) == (LINEAGE, offer.base, version)
    refuse_other_base(delta, tensor_hashes(run.weight(offer.base)), carried)
    assert delta.tensors == tensor_hashes(run.weight(version))
    assert offer.bytes == sum(entry.span[1] - entry.span[0] for entry in carried.values())
    got = weights(run, offer.base) | load_file(run.delta(version) / TENSORS)
    for name, tensor in weights(run, version).items():
        assert torch.equal(got[name], tensor), name
