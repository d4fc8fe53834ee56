"""Errors of talking to a server."""

from kvseek.engine.errors import KvseekError


class ClientError(KvseekError, RuntimeError):
    """The server cannot be reached, or it refused a request; the message is the server's."""
