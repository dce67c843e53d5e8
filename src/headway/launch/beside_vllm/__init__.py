"""What a launched vLLM imports: this directory is on the PYTHONPATH of its own Python, which need not have headway installed."""
