"""A user's own run under faults: `headway chaos CONFIG --plan PLAN.toml`."""

from headway.testing.chaos.plan import Fault, Plan, load_plan
from headway.testing.chaos.play import Chaos, Verdict

__all__ = ["Chaos", "Fault", "Plan", "Verdict", "load_plan"]
