"""Ways for other programs to hand rollouts to a run."""
