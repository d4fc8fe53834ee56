"""API keys of clients, at all ports: reads them from a file, compares a client's key with all of them in constant time, and keeps
what is read for one key, and the ids of its requests, apart from those of others.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from kvseek.core.private_files import LEAST_KEY_CHARACTERS, PrivateFileError, read_key_file
from kvseek.server.errors import ServerError

SHARE_BY_KEY, SHARE_ALL = "key", "all"  # values of --share_prefixes
MAX_KEYS = 10_000  # every request is compared with all of them
SCHEME = "bearer "
REFUSAL = "Authorization: has none of the server's API keys; send Authorization: Bearer KEY"


@dataclass(frozen=True)
class Tenant:
    """Clients that may share what the engine has read: those of one API key, or all.

    Attributes
    ----------
    secret : bytes
        Digest of the key; empty for all clients.
    owner : str
        Name of the key, of which nobody else learns the key: only its requests may stop each other. Empty without keys.
    """

    secret: bytes = b""
    owner: str = field(default="", compare=False)

    def salt(self, cache_salt: str | None) -> str | None:
        """Return the salt under which the engine keeps what this tenant's requests of `cache_salt` share.

        Only who has the key could send this salt at another port.
        """
        if not self.secret:
            return cache_salt
        return hmac.new(self.secret, (cache_salt or "").encode(), hashlib.sha256).hexdigest()


class Keys:
    """Keys of which a client has to send one as `Authorization: Bearer KEY`; without any, every client may ask.

    Parameters
    ----------
    keys : tuple of str
        The keys themselves. Only their SHA-256 digests are kept, which all have one length: comparing texts would tell a
        client how long the keys are.
    apart : bool
        Whether each key is a tenant of its own.
    """

    def __init__(self, keys: tuple[str, ...], apart: bool = True) -> None:
        self._apart = apart
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def tenant(self, authorization: str) -> Tenant | None:
        """Return whose request it is by the value of its Authorization header; None if that has none of the keys."""
        if not self._digests:
            return Tenant()
        scheme, key = authorization[: len(SCHEME)], authorization[len(SCHEME) :].strip()
        digest, found = hashlib.sha256(key.encode("utf-8", "replace")).digest(), False
        for each in self._digests:  # all of them, however early one fits: the time must not tell which one it was
            found |= hmac.compare_digest(digest, each)
        if not found or scheme.lower() != SCHEME:
            return None
        owner = hmac.new(digest, b"owner", hashlib.sha256).hexdigest()
        return Tenant(digest if self._apart else b"", owner)

    def __bool__(self) -> bool:
        return bool(self._digests)


NO_KEYS = Keys(())


def read_keys(path: Path) -> tuple[str, ...]:
    """Read a file of keys, one a line; empty lines do not count. Raises ServerError, which never has a key in its message."""
    try:
        lines = read_key_file(path).splitlines()
    except PrivateFileError as error:
        raise ServerError(f"--api_key_file = {path}: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not (key.isascii() and (not key or key.isprintable()) and " " not in key):
            limit = "printable ASCII characters without spaces"
            raise ServerError(f"--api_key_file = {path}: the key in line {number} must be {limit}; change it")
        if 0 < len(key) < LEAST_KEY_CHARACTERS:
            raise ServerError(
                f"--api_key_file = {path}: the key in line {number} has {len(key)} characters, must have at least "
                f"{LEAST_KEY_CHARACTERS}; take one that `openssl rand -hex 32` draws"
            )
        if key:
            keys.append(key)
    if not 0 < len(keys) <= MAX_KEYS:
        limit = f"in [1, {MAX_KEYS}], one a line"
        raise ServerError(f"--api_key_file = {path}: {len(keys)} keys, must be {limit}; leave the flag out for no keys")
    return tuple(keys)
