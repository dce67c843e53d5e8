"""Runs environments: the policy handle that user code samples through, the runtime behind its error boundary, and the worker process."""
