"""Simulating and planning runs: scenarios from files and from runs that were, reports of what they came to, and advice."""
