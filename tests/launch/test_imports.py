"""What the orchestrator's process loads: no torch, nothing that belongs to a model."""

import subprocess
import sys

import pytest

CODE = """
import sys
import {module}
print([name for name in ("torch", "transformers", "multiprocessing.pool") if name in sys.modules])
"""


@pytest.mark.parametrize("module", ["headway", "headway.orchestrator", "headway.launch.run", "headway.worker.server", "headway.sim.run"])
def test_neither_torch_nor_transformers_is_imported(module):
    done = subprocess.run([sys.executable, "-c", CODE.format(module=module)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
