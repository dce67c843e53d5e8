"""Trainers behind a run directory."""
