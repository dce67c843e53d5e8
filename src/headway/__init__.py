"""headway: the orchestrator of asynchronous RL post-training."""

__version__ = "0.1.0"
