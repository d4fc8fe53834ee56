"""Loads the beginning of a prompt from disk into the extents of its slot, before the prompt is read.

Rows that were loaded are treated like others that a request copies (prefix_cache.py): their index entries are made from the
keys while the prompt is read, layer by layer, and others may share their extents when it has been read. So files need no
index entries, and are the same for all methods.
"""

from __future__ import annotations

from collections.abc import Callable

from kvseek.core.config import EXTENT_TOKENS
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.prefix import Prefix

from .folder import Match
from .store import Load, PrefixStore

LEAST_TOKENS = 64  # fewer are read in about the time that it takes to load the file in which they are


class PrefixLoader:
    """Loads in the background, for the engine's thread.

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
