"""Prefix reuse: requests leave their rows in extents, and later ones whose prompts begin alike do not read them again.

docs/conversations.md says what is kept, shared and copied, and why. Only the engine's thread uses a PrefixCache; any thread may
read its counts. Of an engine of several ranks rank 0 alone has one and decides. What it decides all ranks do, by PrefixRows, each
with the rows and the index entries of its own KV heads (engine/parallel/).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.extents import extents_for
from kvseek.core.model_config import MOST_POSITIONS
from kvseek.core.request import DEFAULT_RETENTION_PRIORITY, EndedSession, Session
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.prefix import Prefix
from kvseek.engine.cache.states import Snapshot
from kvseek.plugins.contract import Index, Traits

from .store import PrefixLoader, PrefixStore
from .tree import TOKEN_BYTES, Node, PrefixTree, Sessions


class PrefixRows:
    """Keeps the extents of slots for later requests, and what belongs to them.

    Parameters
    ----------
    indexes : sequence of Index
        The index of each layer.
    shares_entries : bool
        Whether index entries of whole extents are kept with them (Traits.prefix_reuse).

    Attributes
    ----------
    sink_rows : dict of int to Tensor [layers, G, sink, 2, D], in host memory
        Rows of the sink of each kept sequence, by its first extent. Pinned, if the engine computes on a GPU.
    """

    def __init__(self, cache: Cache, indexes: Sequence[Index], shares_entries: bool) -> None:
        self.cache, self.indexes, self.shares_entries = cache, indexes, shares_entries
        self.sink_rows: dict[int, Tensor] = {}

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a slot that has extents those of `tokens` retrieval tokens; see ExtentTable.reserve."""
        self.cache.extents.reserve(slot, tokens)

    @torch.inference_mode()
    def complete(self, slot: int, kept: int, places: int) -> None:
        """Put the rows of a slot's first `places` tokens behind the sink into its extents, and index the whole ones.

        Parameters
        ----------
        kept : int
            Places that are kept already, in whole extents: those of the slot may be other ones, and are not written.
        """
        self.cache.write_ring(slot, max(kept, self.cache.lengths[slot]), places)
        if self.shares_entries:
            self._index(slot, max(kept, self.cache.lengths[slot]), places // EXTENT_TOKENS * EXTENT_TOKENS)

    def keep(self, slot: int, extents: Sequence[int], begins: bool) -> None:
        """Keep these extents of a slot; `begins`: a sequence begins with the first of them."""
        for extent in extents:
            self.cache.extents.keep(extent)
        if begins:
            sink_rows = self.cache.window[:, slot, :, : self.cache.config.sink].clone()
            if sink_rows.is_cuda:  # many sequences would take much of its memory, and use it seldom
                sink_rows = sink_rows.to("cpu", non_blocking=True)
            self.sink_rows[extents[0]] = sink_rows

    def forget(self, extents: Sequence[int]) -> None:
        """Keep these extents no longer."""
        for extent in extents:
            self.cache.extents.forget(extent)
            self.sink_rows.pop(extent, None)

    def _index(self, slot: int, start: int, stop: int) -> None:
        """Index a slot's places from `start` to `stop`, the end of an extent, whose rows lie in the pool."""
        if stop <= start:
            return
        spans = self.cache.extents.spans(slot, start, stop)
        for layer, index in enumerate(self.indexes):
            blocks = self.cache.rows.blocks(layer, [one[0] for one in spans])
            for block, (_, inside, source) in zip(blocks, spans, strict=True):
                index.append(slot, start + source.start, block[:, inside, 0].contiguous())


logger = logging.getLogger(__name__)


@dataclass
class ReuseCounts:
    """Tokens of the prompts that were looked up, those of them that were not read, and extents that are kept no longer.

    `evicted_extents` made room for others; `discarded_extents` had been used by requests that failed.
    """

    queried_tokens: int = 0
    reused_tokens: int = 0
    evicted_extents: int = 0
    discarded_extents: int = 0


@dataclass(frozen=True)
class LeftRows:
    """What a request has left that was preempted: tokens that had rows, packed, and those of their nodes that were its own."""

    tokens: bytes
    nodes: frozenset[Node]


class PrefixCache:
    """Finds the prefix of a prompt among what earlier requests have left, and keeps what a request leaves.

    Parameters
    ----------
    rows : PrefixRows
        Rows and extents, of all ranks.
    traits : Traits
        Of the method.
    enabled : bool
        If not, nothing is kept and nothing found.
    selects : callable
        Whether a decode step after so many tokens attends to selected rows (Retrieval.selects).
    reach : int
        Tokens of the longest requests that find something and leave something (ModelConfig.short_reach): longrope rotates the
        keys of longer ones by other factors.
    store : PrefixStore, optional
        Prefixes on disk; only if `enabled`.

    Attributes
    ----------
    counts : ReuseCounts
    sessions : Sessions
        The sessions that are known.
    """

    def __init__(
        self,
        rows: PrefixRows,
        traits: Traits,
        *,
        enabled: bool,
        selects: Callable[[int], bool] = lambda tokens: False,
        reach: int = MOST_POSITIONS,
        store: PrefixStore | None = None,
    ) -> None:
        self.rows, self.cache, self.enabled, self.counts, self.store = rows, rows.cache, enabled, ReuseCounts(), store
        self._traits, self._extents, self._selects, self._reach = traits, self.cache.extents, selects, reach
        cache = self.cache
        self._tree = PrefixTree(cache.config.sink, cache.extents.in_use)
        self.sessions = Sessions()
        self._read: set[int] = set()  # slots whose prompt has been read to its end
        self._used: dict[int, set[Node]] = {}  # by slot: kept nodes whose rows it has read or left
        self._doubtful: set[int] = set()  # slots with rows of nodes that were discarded
        # Of a hybrid: where each snapshot is kept, least recently used first: nowhere, as long as it is pending.
        self._snapshots: OrderedDict[Snapshot, dict[Node, int]] = OrderedDict()
        self._loader = None if store is None else PrefixLoader(cache, store, self._make_room)
        layout, most = cache.rows.layout, cache.config.reuse_host_bytes
        self._most = layout.capacity
        if most is not None and layout.host_layers:
            self._most = most // (layout.host_layers * layout.layer_bytes)

    @property
    def _rounds_apart(self) -> bool:
        """Whether last bits of a prompt's rows depend on how it was read (docs/conversations.md)."""
        return self.cache.window.dtype == torch.float32

    # A request begins: `find` and `fits` while it waits, `open` when it is admitted, `find_more` and `load` when its prompt is
    # about to be read.

    def find(self, tokens: bytes, salt: str | None, before: int | None = None) -> Prefix | None:
        """Find the longest kept beginning of a prompt, given as tree.pack_tokens packs it; None if there is none.

        The result holds until extents are evicted; `open` makes it hold for as long as the slot needs it. Prompts that stay in
        the window find nothing: they have no extents, and are read together with others.

        Parameters
        ----------
        before : int, optional
            Of a prompt that is read again after a preemption: the tokens that were reused when it was read first. In float32,
            where last bits depend on how a prompt is read, no more are found.
        """
        match = self._tree.match(salt, self._reusable(tokens, before))
        state = None
        if self.cache.states is not None:  # a hybrid goes on where there are states
            state = match.latest_state()
            match = self._tree.match(salt, tokens[: 0 if state is None else state.tokens * TOKEN_BYTES])
        if not match.tokens:
            return None
        if state is not None:
            self._snapshots.move_to_end(state)
        places = self.cache.retrieval_tokens(len(tokens) // TOKEN_BYTES)
        found = max(0, match.tokens - self.cache.config.sink)
        extents = tuple(node.extent for node in match.nodes)[: max(1, extents_for(found))]
        sparse = self.cache.config.cached_prefill == "sparse" and self._selects(match.tokens)
        if sparse:  # the slot begins with the prefix alone, the last of which lies in the window
            places = self.cache.retrieval_tokens(match.tokens)
        shared = 0 if self._traits.prefix_reuse == "copies" else min(found, places) // EXTENT_TOKENS
        return Prefix(match.tokens, extents, shared, sparse, sink_rows=self.rows.sink_rows[extents[0]], state=state)

    def _reusable(self, prompt: bytes, before: int | None) -> bytes:
        """Return the part of a prompt that need not be read if it is kept."""
        count = len(prompt) // TOKEN_BYTES
        places = self.cache.retrieval_tokens(count)
        if not self.enabled or not places or count > self._reach:
            return b""
        most = max(0, count - max(1, self._traits.last_queries(places)))
        if before is not None and self._rounds_apart:
            most = min(most, before)
        return prompt[: most * TOKEN_BYTES]

    def shorten(self, prefix: Prefix | None, tokens: int) -> Prefix | None:
        """Shorten a prefix to the extents that can stay while others are evicted for a request of up to `tokens` tokens."""
        if prefix is None:
            return None
        room = self._extents.free + self._extents.idle - self.cache.extents_needed(tokens) + prefix.shared
        taken = accumulate(
            not self._extents.in_use(extent) for extent in prefix.extents
        )  # which could be evicted otherwise
        stay = bisect_right(list(taken), room)
        if stay == len(prefix.extents):
            return prefix
        if prefix.state is not None:  # whose states are those of all of its tokens
            return None
        if stay == 0 or stay < prefix.shared:  # the latter only if the request does not fit at all
            return None
        left = self.cache.config.sink + stay * EXTENT_TOKENS
        sparse = (
            prefix.sparse and self._selects(left) and self.cache.retrieval_tokens(left) >= prefix.shared * EXTENT_TOKENS
        )
        return replace(prefix, tokens=left, extents=prefix.extents[:stay], sparse=sparse)

    def fits(self, tokens: int, prefix: Prefix | None, spare: int = 0) -> bool:
        """Whether a request can get all extents that it needs to grow to `tokens` tokens, if others are evicted for it.

        If it takes any, so many more must be to be had, as a `spare`.
        """
        needed, kept = self.cache.extents_needed(tokens), self._extents.idle
        if prefix is not None:
            needed -= prefix.shared
            held = [not self._extents.in_use(extent) for extent in prefix.extents]
            kept -= sum(held)
            spare -= sum(held[prefix.shared :])  # which nobody uses again once they have been copied
        return needed <= 0 or needed + max(0, spare) <= self._extents.free + kept

    def open(self, slot: int, tokens: int, prefix: Prefix | None) -> None:
        """Open a slot of the cache for a request of up to `tokens` tokens, and evict what it takes; raises CapacityError."""
        held = () if prefix is None else prefix.extents
        self._extents.hold(held)
        try:
            shared = 0 if prefix is None else prefix.shared
            self._evict(self.cache.extents_needed(tokens) - shared - self._extents.free)
            self.cache.open(slot, tokens, prefix)
        finally:
            self._extents.let_go(held)

    def find_more(
        self,
        slot: int,
        prompt: bytes,
        salt: str | None,
        tokens: int,
        session: Session | None = None,
        before: int | None = None,
    ) -> Prefix | None:
        """Look a prompt up again that is about to be read, as others have been read since its admission.

        Returns the prefix that need not be read. What the request's session has pinned and the prompt does not begin with is no
        longer pinned. `tokens` is that of `open`, `before` that of `find`: a prompt that is read again is not counted.
        """
        prefix, found = self.cache.prefixes.get(slot), self.find(prompt, salt, before)
        if found is not None and (prefix is None or found.tokens > prefix.tokens):
            # The slot gives all its extents back first, so there is room: it shares more of them than before.
            self.cache.close(slot)
            self.open(slot, tokens, found)
            self._doubtful.discard(slot)
            prefix = found
        if prefix is not None:
            nodes = self._tree.match(salt, prompt[: prefix.tokens * TOKEN_BYTES]).nodes
            self._tree.touch(nodes)
            self._used[slot] = set(nodes)
            self.counts.reused_tokens += prefix.tokens if before is None else 0
        if self.enabled:
            self.counts.queried_tokens += len(prompt) // TOKEN_BYTES if before is None else 0
            self._note_use(prompt, salt, session)
        return prefix

    def loads(self, slot: int) -> bool:
        """Whether rows of a slot's prompt are on their way from disk."""
        return self._loader is not None and self._loader.loads(slot)

    def load(
        self, slot: int, prompt: bytes, salt: str | None, patience: float = 0.0, before: int | None = None
    ) -> bool:
        """Load what the disk has of a prompt behind what `find_more` has found; returns whether that has ended.

        If not, the prompt must not be read yet: call this again, between other work, or let it wait up to `patience` seconds.
        """
        gained = 0 if self._loader is None else self._loader.load(slot, self._reusable(prompt, before), salt, patience)
        self.counts.reused_tokens += (gained or 0) if before is None else 0
        return gained is not None

    def begin_states(self, slot: int, tokens: int) -> None:
        """Make the snapshots of a hybrid's prompt of so many tokens, which is about to be read alone, in place of others."""
        if self.cache.states is not None:
            self._release_pending(slot)
            prefix = self.cache.prefixes.get(slot)
            self.cache.states.begin_snapshots(slot, 0 if prefix is None else prefix.tokens, tokens)
            self._hold_pending(slot)

    # A request grows. If there is no room, one is closed, and goes on later with the rows that it has left.

    def grow(self, slot: int, tokens: int) -> None:
        """Give a running request the extents that it needs to grow to `tokens` tokens, for which `has_room` must be true."""
        self._evict(self.missing(slot, tokens) - self._extents.free)
        self.rows.reserve(slot, self.cache.retrieval_tokens(tokens))

    def has_room(self, slot: int, tokens: int) -> bool:
        """Whether a running request can grow to `tokens` tokens, if others are evicted for it."""
        return self.missing(slot, tokens) <= self._extents.free + self._extents.idle

    def missing(self, slot: int, tokens: int) -> int:
        """Count the extents that a running request lacks to grow to `tokens` tokens; negative if it has more."""
        return self.cache.extents_needed(tokens) - len(self._extents.of_slot(slot))

    def left_in(
        self, extents: Sequence[int], tokens: bytes, salt: str | None, before: frozenset[Node] = frozenset()
    ) -> LeftRows:
        """Find what is kept of the tokens of a slot that has been closed, and had these extents; `before`: other own nodes."""
        nodes = self._tree.match(salt, tokens).nodes
        own = (node for node, extent in zip(nodes, extents, strict=False) if node.extent == extent)
        return LeftRows(tokens, before.union(own))

    def find_left(self, left: LeftRows, prompt: int, salt: str | None) -> Prefix | None:
        """Find the rows with which a request goes on; None: its prompt of `prompt` bytes must be read again.

        It must be where rows of the prompt are missing, and where an index is made of a prompt as a whole. What steps have
        written comes from the request's own nodes alone: another prompt with the same tokens may have other rows of them.
        """
        if self._traits.prefix_reuse != "entries" or not left.nodes or self.cache.states is not None:
            return None
        sink, match = self.cache.config.sink, self._tree.match(salt, left.tokens)
        # Nodes of the prompt alone, which may be another request's where equal tokens have equal rows.
        read = 0 if self._rounds_apart else max(0, prompt // TOKEN_BYTES - sink) // EXTENT_TOKENS
        nodes = (*match.nodes[:read], *takewhile(left.nodes.__contains__, match.nodes[read:]))
        found = min(match.tokens, sink + len(nodes) * EXTENT_TOKENS)
        places = self.cache.retrieval_tokens(found)
        if found * TOKEN_BYTES < prompt or not places:
            return None
        extents = tuple(node.extent for node in nodes)
        return Prefix(found, extents, places // EXTENT_TOKENS, sink_rows=self.rows.sink_rows[extents[0]])

    def resumed(self, slot: int, left: LeftRows, salt: str | None) -> None:
        """Note that a slot has begun with all tokens of its prefix, which `find_left` has found."""
        nodes = self._tree.match(salt, left.tokens[: self.cache.prefixes[slot].tokens * TOKEN_BYTES]).nodes
        self._tree.touch(nodes)
        self._used[slot] = set(nodes)
        self._read.add(slot)

    # A request's prompt has been read, and it ends.

    def share(self, slot: int, prompt: bytes, salt: str | None) -> None:
        """Let others use the whole extents of a running request, whose prompt has been read and whose logits are finite."""
        self._read.add(slot)
        whole = self.cache.lengths[slot] // EXTENT_TOKENS
        if not self.enabled or not whole or self.cache.tokens[slot] > self._reach:
            return
        if slot in self._doubtful:
            return
        tokens = prompt[: (self.cache.config.sink + whole * EXTENT_TOKENS) * TOKEN_BYTES]
        extents, nodes = self._extents.of_slot(slot), self._tree.whole_nodes(salt, tokens)
        # Whoever uses an extent uses all before it (PrefixTree): a request that has its own copy of one that is kept waits.
        if all(node.extent == extent for node, extent in zip(nodes, extents, strict=False)):
            self._insert(slot, tokens, salt, extents)
            self._used.setdefault(slot, set()).update(self._tree.whole_nodes(salt, tokens))
        self._keep_states(slot, tokens, salt)

    def discard(self, slot: int) -> None:
        """Keep nothing any longer that a slot's request has used or left, nor what continues it, in memory and on disk.

        Call it before `close` for a request that failed without a known reason. All of it may be at fault, and would fail every
        later request that begins alike. Other running requests that use it go on, and leave nothing.
        """
        used = self._used.get(slot, set())
        removed = self._tree.cut(used)
        extents = {node.extent for node in removed}
        for other in range(len(self.cache.tokens)):
            prefix = self.cache.prefixes.get(other)
            own = (*self._extents.of_slot(other), *(() if prefix is None else prefix.extents))
            if not extents.isdisjoint(own):
                self._doubtful.add(other)
        self.counts.discarded_extents += len(removed)
        self._forget(removed)
        if self.store is not None and self._loader is not None:
            self.store.erase([*self._loader.keys(slot), *(node.key for node in used)], continued=True)

    def close(
        self, slot: int, tokens: bytes | None = None, salt: str | None = None, session: Session | None = None
    ) -> None:
        """Close a slot of the cache, and keep its rows for later requests.

        `tokens` are prompt and generated tokens that the slot has rows of; None: the request has failed, so that nothing more of
        it is kept. The slot may have more rows, of steps that were launched ahead; they are not kept.
        """
        if self.enabled and tokens is not None and slot in self._read - self._doubtful:
            count = len(tokens) // TOKEN_BYTES
            leaves_window = self.cache.retrieval_tokens(count) > 0
            try:
                if leaves_window and count <= self._reach:
                    self._keep(slot, tokens, salt, session)
                    if self.cache.states is not None and self.cache.tokens[slot] == count:
                        self.cache.states.take(slot, count)
                    self._keep_states(slot, tokens, salt)
                    self._write(tokens, salt)
            except (MemoryError, RuntimeError) as error:  # the request has ended well, and the others go on
                logger.warning("the rows of a request are not kept for later ones: %s", str(error).splitlines()[0])
            # A request in the window alone uses no extents, but its session goes on with it.
            self._note_use(tokens if leaves_window else b"", salt, session)
        self._read.discard(slot)
        self._doubtful.discard(slot)
        self._used.pop(slot, None)
        if self._loader is not None:
            self._loader.cancel(slot)
        self._release_pending(slot)
        self.cache.close(slot)
        self._evict(self._extents.idle - self._most)

    def end_session(self, salt: str | None, session_id: str) -> EndedSession | None:
        """Forget a session, and free the extents that only it has used and that nobody uses now; None if it is not known.

        Their files on disk are removed, too.
        """
        own = self.sessions.end(salt, session_id)
        if own is None:
            return None
        freed = list[Node]()
        for node in [node for node in self._tree if node in own]:  # those that continue a node come before it
            if not node.children and not self._extents.in_use(node.extent):
                self._tree.remove(node)
                freed.append(node)
        self._forget(freed)
        if self.store is not None:
            self.store.erase([node.key for node in freed], continued=False)
        return EndedSession(len(freed), sum(len(node.tokens) for node in freed) // TOKEN_BYTES)

    def _write(self, tokens: bytes, salt: str | None) -> None:
        """Have what is kept of a sequence written to disk."""
        if self.store is not None and (nodes := self._tree.match(salt, tokens).nodes):
            self.store.keep(nodes, self.rows.sink_rows[nodes[0].extent])

    def _note_use(self, tokens: bytes, salt: str | None, session: Session | None) -> None:
        """Note whose the nodes of these tokens are, for the order of eviction and for the end of sessions."""
        match = self._tree.match(salt, tokens)
        nodes, found = match.nodes, sum(len(node.tokens) for node in match.nodes)
        if found == match.tokens * TOKEN_BYTES or match.tokens * TOKEN_BYTES == len(tokens):
            self.sessions.use(session, salt, nodes)
        else:  # the request goes on in another way than the last node
            self.sessions.use(session, salt, nodes[:-1], nodes[-1])

    def _keep(self, slot: int, tokens: bytes, salt: str | None, session: Session | None) -> None:
        """Put all rows of a slot into extents and its extents into the tree; the slot must be closed next."""
        match = self._tree.match(salt, tokens)
        self._tree.touch(match.nodes)
        if match.tokens * TOKEN_BYTES == len(tokens):
            return
        self.cache.settle(slot)  # what is being written belongs to places that are kept
        sink = self.cache.config.sink
        places = self._make_room(slot, len(tokens) // TOKEN_BYTES - sink, session)
        tokens = tokens[: (sink + places) * TOKEN_BYTES]
        nodes = self._tree.whole_nodes(salt, tokens)  # fewer than before, if room was short
        self.rows.complete(slot, len(nodes) * EXTENT_TOKENS, places)
        self._insert(slot, tokens, salt, self._extents.of_slot(slot))

    def _keep_states(self, slot: int, tokens: bytes, salt: str | None) -> None:
        """Keep a hybrid's snapshots of a slot with the nodes of its tokens, as far as there are such."""
        if self.cache.states is None:
            return
        self._hold_pending(slot)
        pending, match = self.cache.states.pending.get(slot, {}), self._tree.match(salt, tokens)
        made, prefix = dict(pending), self.cache.prefixes.get(slot)
        if prefix is not None and prefix.state is not None:  # by which whoever continues this sequence finds it, too
            made[prefix.tokens] = prefix.state
        for place, snapshot in made.items():
            found = match.node_of(place) if place <= match.tokens else None
            if found is None:
                continue
            (node, within), was_pending = found, pending.pop(place, None) is snapshot
            if node.states.setdefault(within, snapshot) is snapshot:
                self._snapshots.setdefault(snapshot, {})[node] = within
            elif was_pending:  # another request's does
                self._snapshots.pop(snapshot, None)
        self._hold_pending(slot)

    def _hold_pending(self, slot: int) -> None:
        """Count a slot's pending snapshots, and forget the least recently used of all that there is no room for."""
        states = self.cache.states
        assert states is not None, "a hybrid has states"
        for snapshot in states.pending.get(slot, {}).values():
            self._snapshots.setdefault(snapshot, {})
        while len(self._snapshots) > states.most_snapshots:
            oldest, places = self._snapshots.popitem(last=False)
            states.drop(oldest)
            for node, within in places.items():
                del node.states[within]

    def _release_pending(self, slot: int) -> None:
        """Count the snapshots no longer that are pending of a slot, which gives them up."""
        if self.cache.states is not None:
            for snapshot in self.cache.states.pending.get(slot, {}).values():
                self._snapshots.pop(snapshot, None)

    def _make_room(self, slot: int, places: int, session: Session | None = None) -> int:
        """Give a slot extents for so many places, as far as nobody uses them; returns the number of places that fit.

        What a request leaves takes no room from what counts more.
        """
        more = extents_for(places) - len(self._extents.of_slot(slot))
        most = DEFAULT_RETENTION_PRIORITY if session is None else session.retention_priority
        self._evict(more - self._extents.free, most)
        room = self._extents.room(slot) + min(max(0, more), self._extents.free) * EXTENT_TOKENS
        self.rows.reserve(slot, room)
        return min(places, room)

    def _insert(self, slot: int, tokens: bytes, salt: str | None, extents: Sequence[int]) -> None:
        added, removed = self._tree.insert(salt, tokens, extents)
        if added:
            self.rows.keep(slot, [node.extent for node in added], added[0].parent is None)
        for old, new in removed.items():
            self.sessions.replace(old, new)
            for within, snapshot in old.states.items():  # the new one begins with the old one's tokens
                new.states.setdefault(within, snapshot)
                self._snapshots[snapshot] |= {new: within} if new.states[within] is snapshot else {}
        self._forget(list(removed))

    def _evict(self, count: int, most: int | None = None) -> None:
        """Evict as many extents that nobody uses, or all of them; those of a priority above `most` stay."""
        evicted = self._tree.evict(max(0, count), self.sessions.priority() if self.sessions else None, most)
        self.counts.evicted_extents += len(evicted)
        unwritten = self._forget(evicted)
        if self.store is not None:
            self.store.counts.dropped["evicted"] += unwritten

    def _forget(self, nodes: Sequence[Node]) -> int:
        """Give up nodes that the tree has no more; returns how many of them were still to be written to disk."""
        unwritten = 0 if self.store is None or not nodes else self.store.forget(nodes)
        if nodes:
            self.rows.forget([node.extent for node in nodes])
        for node in nodes:
            self.sessions.forget(node)
            for snapshot in node.states.values():
                places = self._snapshots[snapshot]
                del places[node]
                if not places:
                    del self._snapshots[snapshot]
        return unwritten
