"""What an inference server must do so that headway can train on what it writes, as checks that run against any server.

`headway engine check URL` runs them; see docs/how-to/check-an-engine.md.
"""

from headway.testing.conformance.bench import ConformanceSettings
from headway.testing.conformance.suite import CHECKS, run_conformance
from headway.testing.conformance.verdicts import Verdict

__all__ = ["CHECKS", "ConformanceSettings", "Verdict", "run_conformance"]
