"""A real vLLM takes only the tensors that have changed: what it serves then is the version, whole."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from pushing import assert_right, differences, fleet, prompts
from real_server import RealServer
from tiny_models import LINEAGE, tensors_of, write_version

from headway.formats.delta import write_delta
from headway.formats.offers import DeltaOffer
from headway.types import Checkpoint

QUERIES = "model.layers.0.self_attn.q_proj.weight"  # vLLM holds it in one tensor with keys and values
OTHER_DIFFERENCE = 0.1  # mean, from the version before: right ones are below .03
STEPS = ((QUERIES, "model.layers.1.mlp.down_proj.weight"), ("lm_head.weight", "model.layers.1.self_attn.o_proj.weight"))


async def test_deltas_come_to_the_versions_that_they_lead_to(
    server: RealServer, versions: list[Checkpoint], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    [prompt] = prompts(1, 64)
    other = tensors_of(versions[3])
    chain = [versions[1]]
    for changed in STEPS:
        base = chain[-1]
        version = write_version(tmp_path, base.version + 1, tensors_of(base) | {name: other[name] for name in changed})
        out = tmp_path / f"delta-{version.version}"
        labels: dict[str, Any] = {"lineage": LINEAGE, "base_version": base.version, "version": version.version}
        written = write_delta(Path(base.directory), Path(version.directory), out, **labels)
        offer = DeltaOffer(base=base.version, directory=str(out), bytes=written.bytes)
        chain.append(dataclasses.replace(version, offers={"delta": offer}))
    known = [versions[0], *chain]
    async with fleet(server.url, weight_transfer="delta") as it:
        for version in chain:
            await it.push(version)
            generated = await it.generate(prompt, max_tokens=200)
            assert generated.spans == [(0, version.version)]
            assert_right(differences(prompt, generated, known))
            if version.version > 1:
                assert differences(prompt, generated, known, lambda number: number - 1).mean() > OTHER_DIFFERENCE
    for base in chain[:-1]:
        assert f"by what has changed since {base.label}" in caplog.text
