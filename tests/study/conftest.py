"""The study's modules lie beside each other in examples/study, as its scripts see them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "study"))
