"""Rollout workers as processes."""
