"""Decisions as plain functions: no await, no clock, no randomness, no logging. What branches is decided here, and tested here."""
