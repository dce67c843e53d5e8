"""Builds the parts that a config names, supervises what runs beside the orchestrator, and plays a run from start to exit code."""
