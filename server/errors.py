"""Errors of starting a server."""

from kvseek.core.errors import KvseekError


class ServerError(KvseekError, RuntimeError):
    """A tritonserver cannot be found, started, or does not become ready."""
