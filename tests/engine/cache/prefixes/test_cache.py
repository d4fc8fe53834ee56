"""Random requests over a cache that keeps prefixes: each row says which tokens it stands behind, so none can be mistaken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.config import EXTENT_TOKENS, CacheConfig, EngineConfig
from kvseek.core.index_context import IndexContext
from kvseek.core.model_config import ModelConfig
from kvseek.core.request import Session
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import host_rows
from kvseek.engine.cache.prefix import Prefix
from kvseek.engine.cache.prefixes.cache import PrefixCache, PrefixRows
from kvseek.engine.cache.prefixes.tree import pack_tokens
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.reference.attention.attend import window_rows
from kvseek.plugins.contract import Budget, Index
from kvseek.plugins.registry import method_traits

LAYERS, SLOTS, SINK, LOCAL, UPDATE, LONGEST = 2, 3, 4, 40, 512, 5200
CPU = torch.device("cpu")
MODEL = ModelConfig("llama", 16, 8, 8, LAYERS, 2, 1, 2, 1e-5, 1e4, 1 << 20)
PRIME = 8191  # float32 holds such numbers, and 1,024ths of them, exactly


class EntryIndex(Index):
    """Entries are keys less the first key of the block of `update` places that they came in with."""

    bytes_per_token = 8.0

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.entries = torch.full((context.extents.capacity, 1, EXTENT_TOKENS, 1), torch.nan)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        self.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        assert start % UPDATE == keys.shape[1] % UPDATE == 0, "whole blocks"
        self.context.extents.write(self.entries, slot, start, entries_of(keys))

    def adopt(self, slot: int, length: int) -> None:
        assert length % EXTENT_TOKENS == 0

    def budget(self, length: int) -> Budget:
        return Budget(length)

    def select(self, queries: Tensor, batch: Batch) -> None:
        return None


def entries_of(keys: Tensor) -> Tensor:
    """Entries [1, n, 1] of keys [1, n, D] of whole blocks."""
    first = keys[..., :1].unflatten(1, (-1, UPDATE))[:, :, :1].expand(-1, -1, UPDATE, -1).flatten(1, 2)
    return keys[..., :1] - first


class BareIndex(EntryIndex):
    """Keeps nothing: its method shares extents without entries."""

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        pass


# Methods whose requests share entries, rows, and nothing.
FORMS: dict[str, tuple[str, type[EntryIndex]]] = {
    "entries": ("full", EntryIndex),
    "rows": ("ctkvr", BareIndex),
    "copies": ("clusterkv", EntryIndex),
}


def sums_of(tokens: list[int]) -> Tensor:
    """A number for each token that depends on all before it, float32 [n]."""
    value, found = 1, []
    for token in tokens:
        value = (value * 31 + token + 1) % PRIME
        found.append(value)
    return torch.tensor(found, dtype=torch.float32)


def rows_of(tokens: list[int], layer: int) -> Tensor:
    """The rows of a sequence, [1, n, 2, 2]."""
    keys = torch.stack((sums_of(tokens), torch.full((len(tokens),), layer + 0.5)), dim=-1)
    return torch.stack((keys, -keys), dim=1)[None]


@dataclass
class Running:
    """A request with a slot."""

    salt: str | None
    tokens: list[int]
    limit: int
    session: Session | None = None
    read: bool = False
    reused: int = 0


def make(
    reuse_host_bytes: int | None = None, capacity: int = 9, form: str = "entries", slots: int = SLOTS
) -> tuple[PrefixCache, Retrieval]:
    layer_bytes = EXTENT_TOKENS * 2 * 2 * 4
    cache_config = CacheConfig(
        SINK,
        LOCAL,
        UPDATE,
        kv_cache_host_memory_bytes=capacity * LAYERS * layer_bytes,
        reuse_host_bytes=None if reuse_host_bytes is None else reuse_host_bytes * LAYERS * layer_bytes,
    )
    sizes = {"max_batch_size": slots, "max_seq_len": LONGEST, "max_input_len": LONGEST}
    method, index_type = FORMS[form]
    config = EngineConfig(MODEL, method, cache=cache_config, **sizes)
    cache = Cache(config, torch.float32, CPU, RowStorage(config, torch.float32, CPU, host_rows(config, torch.float32)))
    cache.rows.pool.rows.fill_(torch.nan)
    settings_ = (None, {}, cache.extents, cache.lengths, torch.float32, CPU)
    contexts = [IndexContext(i, 2, 1, 2, 1.0, *settings_, rows=cache.rows.of_layer(i)) for i in range(LAYERS)]
    indexes: list[Index] = [index_type(context) for context in contexts]
    unused: Any = []
    traits = method_traits(config)
    rows = PrefixRows(cache, indexes, traits.prefix_reuse == "entries")
    prefixes = PrefixCache(rows, traits, enabled=True)
    return prefixes, Retrieval(config, cache, indexes, unused)


class CacheMachine(RuleBasedStateMachine):
    """Requests about two documents, in company, with fewer extents than they would like to have."""

    form = "entries"

    def __init__(self) -> None:
        super().__init__()
        self.prefixes, self.retrieval = make(form=self.form)
        self.cache, self.extents = self.prefixes.cache, self.prefixes.cache.extents
        self.running: dict[int, Running] = {}
        self.ended: list[list[int]] = []

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(
        salt=st.sampled_from([None, "other"]),
        document=st.integers(0, 1),
        start=st.sampled_from([3, 40, 1028, 1050, 1500, 2052, 2100, 3072 + SINK]),
        own=st.one_of(st.just(0), st.integers(1, 1200)),
        room=st.sampled_from([1, 100, 2500]),
        go_on=st.booleans(),
        session=st.sampled_from([None, None, Session("a"), Session("b", 90), Session("c", 10)]),
    )
    def submit(
        self, salt: str | None, document: int, start: int, own: int, room: int, go_on: bool, session: Session | None
    ) -> None:
        """A prompt that begins like others; `go_on`: like a request that has ended, its output included."""
        beginning = [document] * start
        if go_on and self.ended:
            beginning = self.ended[-1 - document % len(self.ended)][: LONGEST - 1300]
        tokens = beginning + [2 + own % 3] * own
        self.begin(salt, tokens, min(len(tokens) + room, LONGEST), session)

    def begin(self, salt: str | None, tokens: list[int], limit: int, session: Session | None = None) -> None:
        found = self.prefixes.find(pack_tokens(tokens), salt)
        prefix = self.prefixes.shorten(found, limit)
        fits = self.prefixes.fits(limit, prefix)
        assert fits or not self.prefixes.fits(limit, None), "what is shared costs no room"
        if found is not None and fits and prefix != found:
            longer = len(prefix.extents) + 1 if prefix is not None else 1
            assert not self.prefixes.fits(limit, replace(found, extents=found.extents[:longer])), "as long as it can be"
        if fits:
            slot = min(set(range(SLOTS)) - set(self.running))
            self.prefixes.open(slot, limit, prefix)
            self.running[slot] = Running(salt, tokens, limit, session)

    @precondition(lambda self: any(not one.read for one in self.running.values()))
    @rule(layers=st.sampled_from([1, LAYERS, LAYERS]))
    def read(self, layers: int) -> None:
        """Read the first unread prompt, or a part of it, which is then cancelled."""
        self.read_first(layers)

    def read_first(self, layers: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        slot, one = next((slot, one) for slot, one in self.running.items() if not one.read)
        prefix = self.look_up(slot, one)
        n = len(one.tokens)
        one.reused = self.retrieval.reused(slot)
        assert one.reused == (0 if prefix is None else prefix.tokens) < n
        self.retrieval.expect(slot, n)
        for layer in range(layers):
            keys, values = torch.full((1, n, 2), torch.nan), torch.full((1, n, 2), torch.nan)
            rows = rows_of(one.tokens, layer)
            if one.reused:
                self.retrieval.cache.load_prefix(layer, slot, keys, values).wait()
                assert torch.equal(keys[:, : one.reused], rows[:, : one.reused, 0])
                assert torch.equal(values[:, : one.reused], rows[:, : one.reused, 1])
            keys[:, one.reused :], values[:, one.reused :] = rows[:, one.reused :, 0], rows[:, one.reused :, 1]
            self.retrieval.store_layer(layer, slot, keys, values, keys)
        if layers < LAYERS:
            self.end(slot, failed=False)
            return
        meanwhile()
        self.retrieval.finish_rows(slot)
        self.prefixes.share(slot, pack_tokens(one.tokens), one.salt)
        one.read = True

    def look_up(self, slot: int, one: Running) -> Prefix | None:
        return self.prefixes.find_more(slot, pack_tokens(one.tokens), one.salt, one.limit, one.session)

    @precondition(lambda self: any(one.read for one in self.running.values()))
    @rule(steps=st.sampled_from([1, 30, 1100]), token=st.integers(0, 1))
    def decode(self, steps: int, token: int) -> None:
        self.decode_all(steps, token)

    def decode_all(self, steps: int, token: int) -> None:
        for slot, one in self.running.items():
            more = min(steps, one.limit - len(one.tokens)) if one.read else 0
            one.tokens += [token] * more
            rows = torch.stack([rows_of(one.tokens, layer) for layer in range(LAYERS)])
            for position in range(len(one.tokens) - more, len(one.tokens)):
                self.cache.begin_step([slot], self.retrieval.indexes)
                row = self.cache.state(slot, 0, (), dense=True).write_row
                self.cache.window[:, slot, :, row] = rows[:, :, position]
                for index in self.retrieval.indexes:
                    index.refresh([slot])

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, SLOTS - 1), failed=st.sampled_from([False, False, False, True]))
    def end_one(self, number: int, failed: bool) -> None:
        self.end(list(self.running)[number % len(self.running)], failed)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, SLOTS - 1))
    def end_one_unsound(self, number: int) -> None:
        """Nobody finds what it has used; others that run have what they need of it to their ends, and leave nothing of it."""
        slot = list(self.running)[number % len(self.running)]
        used = self.prefixes._used.get(slot, set())
        self.prefixes.discard(slot)
        assert used.isdisjoint(self.prefixes._tree)
        self.end(slot, failed=True)

    def end(self, slot: int, failed: bool) -> None:
        one = self.running.pop(slot)
        if one.read:
            self.ended.append(one.tokens)
        self.prefixes.close(slot, None if failed else pack_tokens(one.tokens), one.salt, one.session)

    @rule(salt=st.sampled_from([None, "other"]), session_id=st.sampled_from("abc"))
    def end_session(self, salt: str | None, session_id: str) -> None:
        known, idle = len(self.prefixes.sessions), self.extents.idle
        ended = self.prefixes.end_session(salt, session_id)
        freed = 0 if ended is None else ended.freed_extents
        assert self.extents.idle == idle - freed
        assert len(self.prefixes.sessions) == known - (ended is not None)

    @invariant()
    def sessions_know_kept_nodes_alone(self) -> None:
        sessions, nodes = self.prefixes.sessions, set(self.prefixes._tree)
        assert set(sessions._uses) <= nodes
        for session in sessions._sessions.values():
            assert session.nodes == {node for node, uses in sessions._uses.items() if session in uses.sessions}
            ends = [node for node, uses in sessions._uses.items() if session in uses.ends]
            assert ends == [] if session.end is None else ends == [session.end]
            node = session.end
            while node is not None:
                assert node in session.nodes, "its latest request has used all nodes before its end"
                node = node.parent

    @invariant()
    def every_request_has_its_own_rows(self) -> None:
        assert self.extents.used + self.extents.idle + self.extents.free == self.extents.capacity
        assert len(set(self.extents._free)) == self.extents.free
        assert self.extents.idle <= self.prefixes._most
        for slot, one in self.running.items():
            if not one.read:
                continue
            n, state = self.cache.lengths[slot], self.cache.state(slot, 0, (), dense=False)
            batch = Batch.of([state], self.extents.table)
            for layer, index in enumerate(self.retrieval.indexes):
                rows = rows_of(one.tokens, layer)
                found = self.extents.read(self.cache.rows.of_layer(layer).pool, slot, n)
                assert torch.equal(found, rows[:, SINK : SINK + n])
                near = torch.cat((rows[:, :SINK], rows[:, SINK + n :]), dim=1)
                assert torch.equal(window_rows(batch, 0, self.cache.window[layer], SINK), near)
                if isinstance(index, BareIndex):
                    continue
                assert isinstance(index, EntryIndex)
                entries = self.extents.read(index.entries, slot, n)
                assert torch.equal(entries, entries_of(rows[:, SINK : SINK + n, 0]))

    def teardown(self) -> None:
        for slot in list(self.running):
            self.end(slot, failed=False)
        assert self.extents.used == 0
        self.prefixes._evict(self.extents.capacity)
        assert self.extents.free == self.extents.capacity
        assert not self.prefixes.rows.sink_rows


class RowsMachine(CacheMachine):
    """The same with shared rows and no entries."""

    form = "rows"


class CopiesMachine(CacheMachine):
    """The same with extents of one's own."""

    form = "copies"


for machine in (CacheMachine, RowsMachine, CopiesMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPrefixCache, TestSharedRows = CacheMachine.TestCase, RowsMachine.TestCase
TestCopiedRows = CopiesMachine.TestCase


def test_the_rows_of_a_window_that_fill_an_extent_are_indexed() -> None:
    """994 of 1,034 places are indexed when the first request ends; the second shares the whole extent."""
    run = CacheMachine()
    run.begin(None, [0] * 1038, 1100)
    run.read(LAYERS)
    run.end(0, failed=False)
    run.begin(None, [0] * 1300, 1300)
    run.read(LAYERS)
    assert (run.running[0].reused, run.cache.prefixes[0].shared) == (1038, 1)
    run.every_request_has_its_own_rows()
    run.teardown()


def test_equal_extents_of_two_requests_are_kept_once() -> None:
    """The first ends while the second is being read, with an own copy of the same extent: that one is not shared."""
    run = CacheMachine()
    run.begin(None, [0] * 40, 3000)
    run.read(LAYERS)
    run.decode(1100, 0)
    run.begin(None, [0] * 2500, 4000)
    run.read_first(LAYERS, meanwhile=lambda: run.end(0, failed=False))
    assert (run.extents.idle, run.extents.used) == (2, 4)
    run.begin(None, [0] * 3000, 3000)
    run.read(LAYERS)
    assert (run.running[0].reused, run.cache.prefixes[0].shared) == (1140, 1)
    run.end(1, failed=False)
    run.every_request_has_its_own_rows()
    run.end(0, failed=False)
    assert run.extents.idle == 3, "one copy of each extent of 3,000 tokens"
    run.teardown()


def test_kept_rows_stay_within_their_bytes() -> None:
    prefixes, _ = make(reuse_host_bytes=2)
    run = CacheMachine()
    run.prefixes, run.cache, run.extents = prefixes, prefixes.cache, prefixes.cache.extents
    run.retrieval = Retrieval(_.config, run.cache, _.indexes, [])
    for salt in ("a", "b", "c"):
        run.begin(salt, [0] * 3000, 3000)
        run.read(LAYERS)
        assert run.extents.used == 3
        run.end(0, failed=False)
        assert run.extents.idle == 2
    run.teardown()
