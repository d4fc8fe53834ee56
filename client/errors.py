"""Errors of talking to a server: each says what stopped a call, as far as it can be told apart, and what helps."""

from __future__ import annotations

from http.client import HTTPException
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import NameResolutionError, ProtocolError

from kvseek.core.errors import KvseekError


class ClientError(KvseekError, RuntimeError):
    """The server cannot be reached, is silent, or refused a request."""


class RefusedError(ClientError):
    """The server refused a request; the message is the server's own."""


def check_address(url: str) -> None:
    """Raise ClientError unless an address is HOST:PORT; of a URL, gRPC and HTTP would look up the scheme as a host."""
    host, _, port = url.rpartition(":")
    if host and "/" not in url and port.isdecimal() and 0 < int(port) < 65536:
        return
    _, scheme, rest = url.partition("://")
    remedy = f"write {rest.partition('/')[0]}" if scheme else "write it as 127.0.0.1:8001"
    raise ClientError(f"url = {url!r}: must be HOST:PORT, without a scheme or a path; {remedy}")


def check_base_url(url: str) -> None:
    """Raise ClientError unless a URL is one that HTTP can ask."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none, or half an IPv6 address
        valid = False
    if not valid:
        remedy = "write it as http://127.0.0.1:9000/v1"
        raise ClientError(f"openai_url = {url!r}: must be http://HOST:PORT/v1, or https://; {remedy}")


def no_answer(url: str, error: Exception, remedy: str) -> ClientError:
    """Make the error for an HTTP call that ended without an answer, by what ended it.

    Parameters
    ----------
    error : Exception
        What requests raised.
    remedy : str
        Which address to give.
    """
    cause = error.args[0] if error.args else None
    if isinstance(error, requests.exceptions.ProxyError):
        return ClientError(f"the proxy of this shell does not reach {url} ({error}); name the host in no_proxy")
    if isinstance(error, requests.exceptions.SSLError):
        return ClientError(f"no TLS with {url} ({error}); give an http:// URL, or mend the server's certificate")
    if isinstance(cause, ProtocolError):  # something listens there
        reason = cause.args[-1]
        if isinstance(reason, HTTPException) and not isinstance(reason, ConnectionError):
            return ClientError(f"what listens at {url} does not speak HTTP ({reason!r:.100}); {remedy}")
        return ClientError(
            f"{url} closed the connection ({reason}): the server has ended or is being restarted; send it again"
        )
    if isinstance(getattr(cause, "reason", None), NameResolutionError):
        return ClientError(f"no host has the name in {url} ({error}); {remedy}")
    return ClientError(f"no server answers at {url} ({error}); start one with kvseek serve, or {remedy}")


def no_reply(url: str, seconds: float) -> ClientError:
    """Make the error for a server that sent nothing for `seconds` seconds."""
    return ClientError(
        f"timeout = {seconds:g} s: the server at {url} sent nothing for that long; raise it (kvseek chat --timeout) for a long "
        "prompt or a busy server, otherwise look into the server's log and start it again: its model may have crashed"
    )
