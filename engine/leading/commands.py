"""What rank 0 tells the other ranks: every call that changes what they hold, in the order in which it makes them itself.

Rank 0 alone has requests, schedules them and draws tokens. The other ranks do what it says, with the same code on their own part
of the model. Extents are decided alike, as all ranks make the same calls; each step's Digest says whether they did.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Literal

import msgspec

from kvseek.core.config import EngineConfig
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.prefix import Reuse


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the engine directory with this configuration, that of all ranks, and use so many threads.

    A rank of another node has a directory and threads of its own.
    """

    directory: str
    config: EngineConfig
    threads: int
    host: str  # of the store
    port: int
    rank: int
    timeout_seconds: float
    stall_seconds: float


class Open(msgspec.Struct, frozen=True, tag=True):
    """Cache.open, with the prefix that each rank has for `reuse`."""

    slot: int
    tokens: int
    reuse: Reuse | None


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Decoder.prefill, with a callback for the slots `asked`; `number` is what the following commands call the prefill."""

    number: int
    prompts: tuple[tuple[int, tuple[int, ...]], ...]
    asked: tuple[int, ...]


class Call(msgspec.Struct, frozen=True, tag=True):
    """A method of the cache, of the decoder, of PrefixRows, or of the prefill of this number, which ends with `finish`.

    The decoder's `prepare` on GPUs runs steps, whose sums all ranks compute.
    """

    method: Literal[
        "cache.close",
        "decoder.accept",
        "decoder.prepare",
        "decoder.prepare_to_verify",
        "decoder.resume",
        "prefill.advance",
        "prefill.drop",
        "prefill.finish",
        "rows.complete",
        "rows.forget",
        "rows.keep",
        "rows.reserve",
    ]
    arguments: tuple[int | bool | tuple[int, ...], ...] = ()
    number: int = 0


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Decoder.launch, or Decoder.verify, if the cache's digest is this."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    digest: int
    verifies: bool = False


Command = Open | Begin | Decode | Call
_decoder = msgspec.msgpack.Decoder(Load | Command)


def encode(command: Load | Command) -> bytes:
    """Write a command as a message."""
    return msgspec.msgpack.encode(command)


def decode(message: bytes) -> Load | Command:
    """Read a command; raises MsgspecError if it is none, and ConfigError if a configuration cannot be."""
    command: Load | Command = _decoder.decode(message)
    return command


def name_of(command: Command) -> str:
    """Name a command, for whoever looks at what a rank is doing."""
    return command.method.partition(".")[2].capitalize() if isinstance(command, Call) else type(command).__name__


def digest(cache: Cache) -> int:
    """Compute a checksum of what a cache holds where: lengths and extents of all slots, and the extents that are free or kept."""
    return cache.extents.checksum(zlib.crc32(array("q", cache.tokens + cache.lengths)))
