"""What metrics tell of prefixes on disk."""

from __future__ import annotations

from dataclasses import dataclass, field

# Reasons why nodes are not written: evicted from memory before their turn; disk_bytes do not suffice; an error of the disk;
# the node before, without which they could not be found, is not on disk; the engine was closed.
DROPS = ("evicted", "disk_bytes", "error", "parent", "closed")


@dataclass
class StoreCounts:
    """What has happened since the start.

    Attributes
    ----------
    written, loaded : int
        Files.
    loaded_tokens : int
        Tokens of prompts that were not read because their rows were loaded.
    dropped : dict of str to int
        Nodes that were not written, by the reason: one of DROPS.
    write_seconds, load_seconds : float
        That the thread has spent on either.
    """

    written: int = 0
    loaded: int = 0
    loaded_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DROPS, 0))
    write_seconds: float = 0.0
    load_seconds: float = 0.0


@dataclass(frozen=True)
class DiskUsage:
    """State of the prefixes on disk; `files`, `bytes`, `removed` and `damaged` are those of PrefixFolder."""

    files: int = 0
    bytes: int = 0
    removed: int = 0
    damaged: int = 0
    waiting: int = 0
    counts: StoreCounts = field(default_factory=StoreCounts)
