"""Whole runs on virtual time: the components that ship, with an in-memory world around them."""
