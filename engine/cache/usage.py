"""Measures, for metrics, how the cache is used: extents and their bytes, and the rows that steps read from host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kvseek.engine.cache.prefixes.cache import PrefixCache, ReuseCounts
from kvseek.kernels.cuda.attention.hot_rows import HotRows, hit_rate

from .prefixes.store import DiskUsage


@dataclass(frozen=True)
class CacheUsage:
    """State of the row pool.

    Attributes
    ----------
    extents_used, extents_kept, extents_free : int
        Extents that requests use, those that are kept for later requests alone, and those that are free.
    device_extent_bytes, host_extent_bytes : int
        Bytes of an extent's rows on the device, and in host memory, of all ranks.
    host_rows : int
        Retrieval rows in host memory, of all layers and KV heads, that decode steps have attended to since the start. All layers
        are counted as if they attended alike, although the first layers of some methods (ClusterKV's) attend densely.
    hot_row_hit_ratio : float or None
        Share of the rows selected since the start that the device had kept from earlier steps; None where it keeps no rows, and
        before the first selection.
    reuse : ReuseCounts
        What prefix reuse has done since the start.
    sessions, pinned_extents : int
        Sessions that are known, and extents that those of them pin whose time to live has not passed.
    disk : DiskUsage
        State of the prefixes on disk.
    """

    extents_used: int
    extents_kept: int
    extents_free: int
    device_extent_bytes: int
    host_extent_bytes: int
    host_rows: int
    hot_row_hit_ratio: float | None
    reuse: ReuseCounts
    sessions: int
    pinned_extents: int
    disk: DiskUsage = field(default_factory=DiskUsage)


class UsageMeter:
    """Measures the use of a cache and of its hot rows. Any thread may call `usage`.

    `ranks` have as many rows each, of which `prefixes` has rank 0's. The engine adds to `tokens` what its steps have attended to
    outside windows, in retrieval tokens of a request.
    """

    def __init__(self, prefixes: PrefixCache, hot_rows: Sequence[HotRows], ranks: int = 1) -> None:
        self._prefixes, self._cache, self._ranks = prefixes, prefixes.cache, ranks
        cache = prefixes.cache
        # Rows of one token in host memory: one per KV head and layer there. On the CPU these are all of its rows.
        self._row_copies = ranks * cache.window.shape[2] * cache.rows.layout.host_layers
        self.tokens = 0.0
        self._hot_rows = hot_rows
        # A stream of its own: on the engine's stream the counters would be read only after all steps launched so far.
        device = cache.window.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def usage(self) -> CacheUsage:
        """Return the present state. Where the device keeps rows, this reads their hits, 16 bytes a layer.

        Steps do not wait for that.
        """
        extents, layout = self._cache.extents, self._cache.rows.layout
        return CacheUsage(
            extents_used=extents.used,
            extents_kept=extents.idle,
            extents_free=extents.free,
            device_extent_bytes=self._ranks * layout.device_layers * layout.layer_bytes,
            host_extent_bytes=self._ranks * layout.host_layers * layout.layer_bytes,
            host_rows=round(self.tokens * self._row_copies),
            hot_row_hit_ratio=self._hit_ratio(),
            reuse=replace(self._prefixes.counts),
            sessions=len(self._prefixes.sessions),
            pinned_extents=self._prefixes.sessions.pinned,
            disk=DiskUsage() if self._prefixes.store is None else self._prefixes.store.usage(),
        )

    def _hit_ratio(self) -> float | None:
        with torch.cuda.stream(self._stream):  # None: does nothing
            return hit_rate(self._hot_rows)
