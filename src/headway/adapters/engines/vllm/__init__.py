"""Engines that speak vLLM's API, a real vLLM and headway's embedded engine alike.

`wire` and `completions` are the two ways in which they generate; `VllmEngine` (admin) administers one server.
"""
