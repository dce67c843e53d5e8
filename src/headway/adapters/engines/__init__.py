"""Clients of inference servers, one package per protocol."""
