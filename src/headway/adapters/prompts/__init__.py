"""Where prompts come from: a JSONL file, Parquet or Arrow files, or a Python function."""

from headway.adapters.prompts.source import open_source

__all__ = ["open_source"]
