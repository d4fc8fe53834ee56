"""Errors of talking to a server."""

from kvseek.core.errors import KvseekError


class ClientError(KvseekError, RuntimeError):
    """The server cannot be reached, is silent, or refused a request; for a refusal the message is the server's own."""


def no_reply(url: str, seconds: float) -> ClientError:
    """Make the error for a server that sent nothing for `seconds` seconds."""
    return ClientError(
        f"timeout = {seconds:g} s: the server at {url} sent nothing for that long; raise it (kvseek chat --timeout) for a long "
        "prompt or a busy server, otherwise look into the server's log and start it again: its model may have crashed"
    )
