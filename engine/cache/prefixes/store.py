"""Writes kept prefixes to disk and loads them back, in a thread of its own: no step and no request ever waits for a disk.

Between the row pool and the disk stands one buffer, of the size of a file. Rows of a node are copied into it while the node
is in the tree, and hashed and written from there; a node that is evicted before its turn is not written. Likewise a file is
read into the buffer and checked there, and its rows are copied into extents of the slot that waits for them, unless the slot
has been closed meanwhile. Only these copies touch the pool. `_pool` is locked while one runs, and by the engine's thread when
it takes extents away: so it waits at most for the copy of one extent, and a disk that hangs holds up nothing.

Loads go before writes. What waits to be written is bounded by the row pool, as all of it lies there.

Rows of a GPU's pool in pinned memory are on their way there, or from there, when the engine's thread asks for a write or a
load of their extents. The thread waits for these copies first. Later ones do not concern it: nobody writes to an extent that
is kept, and the slot that waits for a load reads its extents when the load has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.streams import everything_launched
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.prefix import Prefix

from .file import HEADER_BYTES, DamagedFileError, Entry, read_data, write_file
from .folder import Match, PrefixFolder
from .tree import TOKEN_BYTES, Node

CLOSE_SECONDS = 3.0  # that closing an engine waits for writes; `kvseek serve` gives its process 5 s
STALLED_SECONDS = 5.0  # without a loaded extent, after which a prompt is read instead
WARN_SECONDS = 60.0  # between two warnings about a disk that cannot be written to
WRITE_REST = 4.0  # rest beside running requests, in times of the work: a core is taken for a fifth of the time
# Rest of a load beside decoding requests: they may take twice as long, as beside reading (schedule/reading.py)
LOAD_REST = 1.0
TOUCH_SECONDS = 10.0  # between two updates of the files' times of use

# Reasons why nodes are not written: evicted from memory before their turn; disk_bytes do not suffice; an error of the disk;
# the node before, without which they could not be found, is not on disk; the engine was closed.
DROPS = ("evicted", "disk_bytes", "error", "parent", "closed")

Bytes = NDArray[np.uint8]

logger = logging.getLogger(__name__)


@dataclass
class StoreCounts:
    """What the store has done since the start, for metrics.

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


@dataclass(frozen=True)
class Write:
    """A node that waits to be written; the engine's thread takes it back when it evicts the node."""

    key: bytes
    before: bytes
    tokens: bytes
    extent: int
    sink_rows: Tensor | None  # of a first node
    arrived: Callable[[], None]  # waits until the rows are in the pool


@dataclass
class Load:
    """Files that a slot waits for, and the extents that their rows go to.

    Attributes
    ----------
    loaded : int
        How many of them are in their extents, from the first on.
    sink_rows : Tensor [layers, G, sink, 2, D] or None
        Of the first file of a sequence, once that is loaded.
    progress_at : float
        When the last one came, in seconds of time.perf_counter.
    ended : Event
        Set when no more will come.
    """

    matches: Sequence[Match]
    extents: Sequence[int]
    vacant: Callable[[], None]  # waits until nobody reads or writes what the extents held before
    loaded: int = 0
    sink_rows: Tensor | None = None
    progress_at: float = field(default_factory=time.perf_counter)
    ended: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False


Erasure = Callable[[], None]  # removes files


class PrefixStore:
    """The prefixes on disk of one engine. Only the engine's thread calls its methods; any thread may ask for its `usage`.

    Parameters
    ----------
    pool : Tensor [extents, layers, G, 1024, 2, D], on the CPU
        The row pool, with the rows of all layers.
    device : device
        Of the engine.

    Attributes
    ----------
    counts : StoreCounts
    """

    def __init__(self, folder: PrefixFolder, pool: Tensor, device: torch.device) -> None:
        self.folder, self.counts, self._device = folder, StoreCounts(), device
        self._rows = pool.view(torch.uint8).flatten(-2).numpy()  # [extents, layers, G, 1024, bytes of a row]
        self._dtype = pool.dtype
        self._buffer = np.empty(folder.shape.data_bytes(folder.shape.sink + EXTENT_TOKENS, first=True), dtype=np.uint8)
        self._pool = threading.Lock()  # held while rows are copied to or from the pool
        self._work = threading.Condition()  # guards the next five
        self._writes: OrderedDict[bytes, Write] = OrderedDict()
        self._loads: deque[Load] = deque()
        self._erasures: deque[Erasure] = deque()
        self._closed = False
        self._busy_since: float | None = None
        self._warned_at = -WARN_SECONDS
        self._load_rest = self._write_rest = self._resumed_at = 0.0
        self._loading = False
        self._thread = threading.Thread(target=self._run, name="kvseek-prefixes", daemon=True)
        self._thread.start()

    def usage(self) -> DiskUsage:
        """Return the present state; from any thread."""
        folder, counts = self.folder, replace(self.counts, dropped=dict(self.counts.dropped))
        return DiskUsage(len(folder), folder.bytes, folder.removed, folder.damaged, len(self._writes), counts)

    def share_cores(self, running: bool, decoding: bool) -> None:
        """Tell whether requests run, and whether any of them decode, so that the thread leaves them the cores most of the time.

        A step's threads wait for each other: one whose core this thread has taken holds up all of them.
        """
        self._write_rest, self._load_rest = WRITE_REST * running, LOAD_REST * decoding

    # Writing.

    def keep(self, nodes: Sequence[Node], sink_rows: Tensor) -> None:
        """Have a sequence's first nodes and its sink's rows written, as far as they are not on disk; nodes are given in order."""
        used, arrived = list[bytes](), everything_launched(self._device)
        with self._work:
            for node in nodes:
                if (known := self.folder.covers(node.key, node.before, node.tokens)) is not None:
                    used.append(known)
                elif node.key not in self._writes and not self.folder.is_foreign(node.key):
                    own = sink_rows if node.parent is None else None
                    self._writes[node.key] = Write(node.key, node.before, node.tokens, node.extent, own, arrived)
            self._work.notify()
        self.folder.touch(used)

    def forget(self, nodes: Sequence[Node]) -> int:
        """Write nodes no longer, as their extents will hold other rows; returns how many were still to be written."""
        with self._pool, self._work:
            return sum(self._writes.pop(node.key, None) is not None for node in nodes)

    def erase(self, keys: Sequence[bytes], *, continued: bool) -> None:
        """Remove the files of nodes, soon; see PrefixFolder.erase."""
        with self._work:
            self._erasures.append(partial(self.folder.erase, keys, continued))
            self._work.notify()

    # Loading.

    def load(self, matches: Sequence[Match], extents: Sequence[int]) -> Load | None:
        """Begin to load files into extents that nobody else uses, until it has ended or is cancelled; None: the disk hangs."""
        vacant = everything_launched(self._device)
        with self._work:
            if self._busy_since is not None and time.perf_counter() - self._busy_since > STALLED_SECONDS:
                return None
            self._loads.append(load := Load(matches, extents, vacant))
            self._work.notify()
        return load

    def stalls(self, load: Load) -> bool:
        """Whether nothing has come for so long that it is better to read the prompt."""
        return time.perf_counter() - load.progress_at > STALLED_SECONDS

    def cancel(self, load: Load) -> None:
        """End a load: nothing is written to its extents any more."""
        with self._pool:
            load.cancelled = True

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, for so many seconds, and stop the thread. The row pool must stay as it is meanwhile.

        May be called again.
        """
        with self._work:
            if self._closed:
                return
            self._closed = True
            self._work.notify()
        self._thread.join(seconds)
        with self._pool, self._work:
            left = len(self._writes)
            self._writes.clear()
        if left:
            self.counts.dropped["closed"] += left
            logger.warning("%d extents of kept prefixes are not on disk, as the engine was closed", left)
        self._thread.join(1.0)  # for the job that it is in
        if self._thread.is_alive():  # it hangs in the disk; the folder stays locked until the process ends
            logger.warning("%s: the disk does not answer", self.folder.path)
            return
        self.folder.close()

    # The store's own thread.

    def _run(self) -> None:
        saved_at = time.perf_counter()
        while (job := self._next()) is not None:
            self._resumed_at = begun = time.perf_counter()
            self._loading = isinstance(job, Load)
            try:
                if isinstance(job, Load):
                    self._load(job)
                elif isinstance(job, Write):
                    self._write(job)
                else:
                    job()
            except Exception:  # the thread must go on
                logger.exception("keeping prefixes on disk failed")
            seconds, self._busy_since = time.perf_counter() - begun, None
            if isinstance(job, Load):
                self.counts.load_seconds += seconds
                job.ended.set()
            elif isinstance(job, Write):
                self.counts.write_seconds += seconds
            if time.perf_counter() - saved_at > TOUCH_SECONDS:
                self.folder.save_times()
                saved_at = time.perf_counter()
        self.folder.save_times()

    def _next(self) -> Load | Write | Erasure | None:
        """Wait for work; None: there will be no more."""
        with self._work:
            while not (self._erasures or self._loads or self._writes):
                if self._closed:
                    return None
                self._work.wait()
            self._busy_since = time.perf_counter()  # before anybody who locks `_work` can see that a job was taken
            if self._erasures:
                return self._erasures.popleft()
            return self._loads.popleft() if self._loads else next(iter(self._writes.values()))

    def _write(self, write: Write) -> None:
        folder, first = self.folder, write.sink_rows is not None
        data = self._buffer[: folder.shape.data_bytes(len(write.tokens) // TOKEN_BYTES, first)]
        write.arrived()
        with self._pool:
            with self._work:
                if self._writes.pop(write.key, None) is None:
                    return  # taken back
            self._copy_out(write, data)
        if not first and not folder.has(write.before):
            self.counts.dropped["parent"] += 1
        elif not folder.make_room(HEADER_BYTES + len(data), write.before):
            self.counts.dropped["disk_bytes"] += 1
        else:
            try:
                node = (write.before, first, write.tokens, data.data)
                folder.add(write_file(folder.path, folder.origin, folder.shape, *node, self._pause))
                self.counts.written += 1
            except OSError as error:
                self.counts.dropped["error"] += 1
                self._warn(error)

    def _pause(self) -> None:
        """Rest for a multiple of the time of the work since the last pause, as `share_cores` says."""
        rest = self._load_rest if self._loading else self._write_rest
        if rest and not self._closed:
            time.sleep(rest * (time.perf_counter() - self._resumed_at))
        self._resumed_at = time.perf_counter()

    def _copy_out(self, write: Write, data: Bytes) -> None:
        first = write.sink_rows is not None
        tokens, sink, rows = self._parts(data, len(write.tokens) // TOKEN_BYTES, first)
        tokens[:] = np.frombuffer(write.tokens, dtype=np.uint8)
        if write.sink_rows is not None:
            sink[:] = write.sink_rows.contiguous().view(torch.uint8).flatten(-2).numpy()
        rows[:] = self._rows[write.extent, :, :, : rows.shape[2]]

    def _parts(self, data: Bytes, tokens: int, first: bool) -> tuple[Any, Any, Any]:
        """Return the parts of a file's tensors: tokens; rows of the sink, and the others, [layers, G, n, bytes of a row]."""
        shape, sizes = self.folder.shape, [size for *_, size in self.folder.shape.parts(tokens, first)]
        ends = np.cumsum(sizes)
        packed, *rows = np.split(data, ends[:-1])
        places = [part.reshape(shape.layers, shape.kv_heads, -1, shape.row_bytes) for part in rows]
        return packed, places[0], places[-1]

    def _warn(self, error: OSError) -> None:
        """Log that a file was not written, but do not fill the log."""
        now = time.perf_counter()
        if now - self._warned_at > WARN_SECONDS:
            self._warned_at = now
            logger.warning("prefixes are not written to %s: %s; metrics count them", self.folder.path, error)

    def _load(self, load: Load) -> None:
        load.vacant()
        for match, extent in zip(load.matches, load.extents, strict=True):
            entry = match.entry
            data = self._buffer[: entry.size - entry.data_start]
            if load.cancelled or not self._read(entry, data):
                return
            with self._pool:
                if load.cancelled:
                    return
                self._copy_in(load, entry, extent, data)
                load.loaded += 1
                self.counts.loaded += 1
                load.progress_at = self._busy_since = time.perf_counter()

    def _copy_in(self, load: Load, entry: Entry, extent: int, data: Bytes) -> None:
        _, sink, rows = self._parts(data, entry.token_count, entry.first)
        self._rows[extent, :, :, : rows.shape[2]] = rows
        if entry.first:
            packed = torch.from_numpy(sink.copy()).view(self._dtype)
            sink_rows = packed.reshape(*packed.shape[:-1], 2, self.folder.shape.head_dim)
            load.sink_rows = sink_rows.pin_memory() if self._device.type == "cuda" else sink_rows

    def _read(self, entry: Entry, data: Bytes) -> bool:
        """Read a file into the buffer; returns whether its rows may be used."""
        try:
            read_data(entry, data.data, self._pause)
        except DamagedFileError as error:
            self.folder.refuse(entry, error)
        except OSError as error:
            logger.warning("%s cannot be read: %s; prompts that begin with it are read", entry.path, error)
            self.folder.forget(entry)
        else:
            return True
        return False


LEAST_TOKENS = 64  # fewer are read in about the time that it takes to load the file in which they are


class PrefixLoader:
    """Loads the beginning of a prompt into the extents of its slot, in the background, for the engine's thread.

    Rows that were loaded are treated like others that a request copies: their index entries are made from the keys while the
    prompt is read, layer by layer, and others may share their extents when it has been read. So files need no index entries, and
    are the same for all methods.

    Parameters
    ----------
    make_room : callable
        Takes a slot and a number of places; gives the slot extents for so many, as far as there are any that nobody uses.
    """

    def __init__(self, cache: Cache, store: PrefixStore, make_room: Callable[[int, int], int]) -> None:
        self._cache, self._store, self._make_room = cache, store, make_room
        self._loads: dict[int, Load] = {}
        self._loaded: dict[int, list[bytes]] = {}  # by slot: keys of the files whose rows it has got

    def loads(self, slot: int) -> bool:
        """Whether a slot waits for rows."""
        return slot in self._loads

    def load(self, slot: int, tokens: bytes, salt: str | None, patience: float) -> int | None:
        """Add to the slot's prefix what the disk has of `tokens`, the prompt's first, behind it; returns the number of tokens.

        None: it is not all there yet, after `patience` seconds. Call this again; the prompt must not be read before.
        """
        load = self._loads.get(slot) or self._begin(slot, tokens, salt)
        if load is None:
            return 0
        self._loads[slot] = load
        if not load.ended.wait(patience):
            if not self._store.stalls(load):
                return None
            self._store.cancel(load)  # what has come is used
        del self._loads[slot]
        return self._take(slot, load) if load.loaded else 0

    def keys(self, slot: int) -> list[bytes]:
        """Return the keys of the files whose rows a slot has got."""
        return self._loaded.get(slot, [])

    def cancel(self, slot: int) -> None:
        """Write nothing more to the extents of a slot that is about to be closed."""
        self._loaded.pop(slot, None)
        if (load := self._loads.pop(slot, None)) is not None:
            self._store.cancel(load)

    def _begin(self, slot: int, tokens: bytes, salt: str | None) -> Load | None:
        """Begin to load the files that follow the whole extents of the slot's prefix; None: there is nothing to load.

        A slot has extents for all places that its prompt will have, but not for the last tokens, which stay in its window. For
        their rows it takes one more if there is one.
        """
        matches = self._matches(slot, tokens, salt)
        if not matches:
            return None
        self._make_room(slot, matches[-1].stop - self._cache.config.sink)
        extents = self._cache.extents.of_slot(slot)[self._whole(slot) :]
        count = min(len(matches), len(extents))
        return self._store.load(matches[:count], extents[:count]) if count else None

    def _matches(self, slot: int, tokens: bytes, salt: str | None) -> list[Match]:
        """Find the files, without a last one that would add too little."""
        matches = self._store.folder.match(salt, tokens, self._whole(slot))
        while matches:
            before = max([self._tokens(slot), *(match.stop for match in matches[-2:-1])])
            if matches[-1].stop - before >= LEAST_TOKENS:
                break
            matches.pop()
        return matches

    def _take(self, slot: int, load: Load) -> int:
        """Put the rows that were loaded into the slot's prefix, and return the number of tokens that it has more."""
        prefix, have = self._cache.prefixes.get(slot), self._tokens(slot)
        before = () if prefix is None else prefix.extents[: self._whole(slot)]
        sink_rows = load.sink_rows
        if sink_rows is None:
            assert prefix is not None, "what is loaded follows whole extents of the slot's prefix"
            sink_rows = prefix.sink_rows
        self._loaded.setdefault(slot, []).extend(match.entry.key for match in load.matches[: load.loaded])
        tokens = load.matches[load.loaded - 1].stop
        extents = (*before, *load.extents[: load.loaded])
        self._cache.prefixes[slot] = Prefix(
            tokens, extents, 0 if prefix is None else prefix.shared, sink_rows=sink_rows
        )
        self._store.counts.loaded_tokens += tokens - have
        return tokens - have

    def _tokens(self, slot: int) -> int:
        """Return the tokens of the slot's prefix."""
        return self._cache.prefixes[slot].tokens if slot in self._cache.prefixes else 0

    def _whole(self, slot: int) -> int:
        """Return the number of extents that the slot's prefix has to their ends."""
        return max(0, self._tokens(slot) - self._cache.config.sink) // EXTENT_TOKENS
