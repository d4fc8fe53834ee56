"""What rank 0 tells the other ranks: every call that changes what they hold, in the order in which it makes them itself.

Rank 0 alone has requests, schedules them and draws tokens. The other ranks do what it says, with the same code on their own part
of the model. Extents are decided alike, as all ranks make the same calls; each step's Digest says whether they did.
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass

from kvseek.core.config import EngineConfig
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.prefix import Reuse
from kvseek.engine.model.prefill import Prompts


@dataclass(frozen=True)
class Load:
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


@dataclass(frozen=True)
class Open:
    """Cache.open, with the prefix that each rank has for `reuse`."""

    slot: int
    tokens: int
    reuse: Reuse | None


@dataclass(frozen=True)
class Close:
    """Cache.close."""

    slot: int


@dataclass(frozen=True)
class Begin:
    """Decoder.prefill, with takers for the slots `asked`; `number` is what the following commands call the prefill."""

    number: int
    prompts: Prompts
    asked: tuple[int, ...]


@dataclass(frozen=True)
class Advance:
    """Prefill.advance."""

    number: int
    max_tokens: int


@dataclass(frozen=True)
class Drop:
    """Prefill.drop."""

    number: int
    slot: int


@dataclass(frozen=True)
class Finish:
    """Prefill.finish; nothing more is said of this prefill."""

    number: int


@dataclass(frozen=True)
class Decode:
    """Decoder.decode, if the cache's digest is this."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    digest: int


@dataclass(frozen=True)
class Reserve:
    """PrefixRows.reserve."""

    slot: int
    tokens: int


@dataclass(frozen=True)
class Complete:
    """PrefixRows.complete."""

    slot: int
    kept: int
    places: int


@dataclass(frozen=True)
class Keep:
    """PrefixRows.keep."""

    slot: int
    extents: tuple[int, ...]
    begins: bool


@dataclass(frozen=True)
class Forget:
    """PrefixRows.forget."""

    extents: tuple[int, ...]


@dataclass(frozen=True)
class Prepare:
    """Steps.prepare: on GPUs it runs steps, whose sums all ranks compute."""


Command = Open | Close | Begin | Advance | Drop | Finish | Decode | Prepare | Reserve | Complete | Keep | Forget


def digest(cache: Cache) -> int:
    """Compute a checksum of what a cache holds where: lengths and extents of all slots, and the extents that are free or kept."""
    return cache.extents.checksum(zlib.crc32(array("q", cache.tokens + cache.lengths)))
