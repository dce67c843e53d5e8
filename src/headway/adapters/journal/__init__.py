"""Journals: SQLite with payload segments for runs, memory for simulations."""
