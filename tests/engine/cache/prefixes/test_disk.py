"""Random requests, restarts and damage over prefixes on disk: what is found is what the directory's files stand for."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from safetensors.torch import load_file
from tests.engine.cache.prefixes.test_cache import LAYERS, SINK, SLOTS, CacheMachine, Running, make, rows_of

from kvseek.core.config import EXTENT_TOKENS
from kvseek.engine.cache.prefix import Prefix
from kvseek.engine.cache.prefixes.cache import PrefixCache
from kvseek.engine.cache.prefixes.file import HEADER_BYTES, Origin, RowShape, file_name
from kvseek.engine.cache.prefixes.folder import open_folder
from kvseek.engine.cache.prefixes.store import LEAST_TOKENS, PrefixStore
from kvseek.engine.cache.prefixes.tree import chained_key, pack_tokens, root_key

SHAPE = RowShape(LAYERS, 1, 2, "float32", 2 * 2 * 4, SINK)
ORIGIN = Origin("0" * 32, "tiny", "full")
MOST_BYTES = 8 * (HEADER_BYTES + SHAPE.data_bytes(SINK + EXTENT_TOKENS, first=True))
Stored = tuple[str | None, list[int]]  # what a file stands for: a salt, and all tokens up to the file's last


def ends_of(tokens: int) -> list[int]:
    """Where the extents of a sequence end."""
    return [*range(SINK + EXTENT_TOKENS, tokens, EXTENT_TOKENS), tokens]


def name_of(salt: str | None, tokens: list[int]) -> str:
    key, start = root_key(salt), 0
    for end in ends_of(len(tokens)):
        key, start = chained_key(key, pack_tokens(tokens[start:end])), end
    return file_name(key)


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def bytes_in(folder: Path) -> int:
    """Bytes of a folder's files, some of which the store's thread may be removing."""
    found = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


class DiskMachine(CacheMachine):
    """The requests of CacheMachine; `kept` says what each file stands for that requests may have left."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.kept: dict[str, Stored] = {}
        self.damaged: set[str] = (
            set()
        )  # names of files that are not what was written, or are gone, and nobody has noticed
        self.start()

    def start(self) -> None:
        prefixes, self.retrieval = make(form=self.form)
        self.cache, self.extents = prefixes.cache, prefixes.cache.extents
        folder = open_folder(self.directory, MOST_BYTES, ORIGIN, SHAPE)
        self.folder, self.store = folder.path, PrefixStore(folder, self.cache.rows.pool.rows, self.cache.window.device)
        self.prefixes = PrefixCache(prefixes.rows, prefixes._traits, enabled=True, store=self.store)
        self.settle()

    def files(self) -> set[str]:
        return {path.name for path in self.directory.glob("*/*")}

    def settle(self, slow: bool = False) -> None:
        """Wait until everything that can be written is, unless the disk is to be `slow`."""
        if slow:
            return
        while not self.idle():
            time.sleep(0.0002)
        self.forget_damage()

    def forget_damage(self) -> None:
        """Files that the store has found to be damaged are no longer there for it."""
        self.damaged &= self.files() | {file_name(key) for key in self.store.folder._entries}

    def idle(self) -> bool:
        """Whether the store's thread waits for work."""
        store = self.store
        with store._work:
            return not (store._erasures or store._loads or store._writes or store._busy_since is not None)

    def look_up(self, slot: int, one: Running) -> Prefix | None:
        self.settle()
        prefix = super().look_up(slot, one)
        # Extents that sessions pin make no room for what only saves reading.
        pinned = self.prefixes.sessions.pinned if self.prefixes.sessions else 0
        have, room = 0 if prefix is None else prefix.tokens, self.extents.free + self.extents.idle > pinned
        least, most = self.findable(one, have)
        while not self.prefixes.load(slot, pack_tokens(one.tokens), one.salt, patience=1.0):
            pass
        self.forget_damage()
        prefix = self.cache.prefixes.get(slot)
        found = 0 if prefix is None else prefix.tokens
        assert (least if room else have) <= found <= most
        return prefix

    def findable(self, one: Running, have: int) -> tuple[int, int]:
        """How many first tokens of a prompt are in memory or on disk, if memory has `have`; two numbers if that is open."""
        files, tokens, stop = self.files() | self.damaged, one.tokens[:-1], have
        start = SINK + max(0, have - SINK) // EXTENT_TOKENS * EXTENT_TOKENS
        start = 0 if start == SINK else start
        while True:
            end = (start or SINK) + EXTENT_TOKENS
            name = name_of(one.salt, tokens[:end])
            if end > len(tokens) or name not in files:
                break
            following = name_of(one.salt, tokens[: end + EXTENT_TOKENS])
            if end - stop < LEAST_TOKENS and not (end + EXTENT_TOKENS <= len(tokens) and following in files):
                return stop, max(stop, end)
            if name in self.damaged:
                return stop, stop
            start = stop = end
        siblings = {
            name: common(own, tokens)
            for name, (salt, own) in self.kept.items()
            if name in files and salt == one.salt and own[:start] == tokens[:start]
            if len(own) > start and start == [0, *ends_of(len(own))][-2]
        }
        best = max(siblings.values(), default=0)
        if best - stop < LEAST_TOKENS:
            return stop, stop
        damaged = any(name in self.damaged for name, length in siblings.items() if length == best)
        return stop if damaged else best, best

    def end(self, slot: int, failed: bool) -> None:
        self.end_at_once(slot, failed)
        self.settle()

    def end_at_once(self, slot: int, failed: bool) -> None:
        self.leave(self.running[slot], ends_of(self.cache.tokens[slot]))
        super().end(slot, failed)

    def read_first(self, layers: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """While it runs, others may end that have used its whole extents, which are then written."""
        one = next(one for one in self.running.values() if not one.read)
        self.leave(one, ends_of(len(one.tokens))[:-1])
        super().read_first(layers, meanwhile)

    def leave(self, one: Running, ends: list[int]) -> None:
        for end in ends:
            self.kept[name_of(one.salt, one.tokens[:end])] = (one.salt, one.tokens[:end])

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(
        salt=st.sampled_from([None, "other"]),
        document=st.integers(0, 1),
        start=st.sampled_from([700, 1028, 1500, 2052, 2900]),
        own=st.sampled_from([1, 70, 900]),
        steps=st.sampled_from([1, 750]),
        slow=st.booleans(),
        evicts=st.booleans(),
        restarts=st.booleans(),
    )
    def answer(
        self,
        salt: str | None,
        document: int,
        start: int,
        own: int,
        steps: int,
        slow: bool,
        evicts: bool,
        restarts: bool,
    ) -> None:
        """All that a request needs, which single rules rarely come to; then perhaps nothing of it is in memory."""
        before = set(self.running)
        tokens = [document] * start + [2 + own % 3] * own
        self.begin(salt, tokens, len(tokens) + steps)
        for slot in set(self.running) - before:
            while not self.running[slot].read:
                self.read_first(LAYERS)
            self.decode_all(steps, document)
            if evicts:
                self.end_one_and_evict(list(self.running).index(slot), 9, slow)
            else:
                self.end(slot, failed=False)
        if restarts:
            self.restart()

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 2), count=st.integers(1, 9), slow=st.booleans())
    def end_one_and_evict(self, number: int, count: int, slow: bool) -> None:
        """Its extents get other rows after they are written; `slow`: before. The order is the same in every run."""
        self.settle()
        with self.store._work if slow else contextlib.nullcontext():
            self.end_at_once(list(self.running)[number % len(self.running)], failed=False)
            self.settle(slow)
            self.evict_and_overwrite(count)

    def evict_and_overwrite(self, count: int) -> None:
        self.prefixes._evict(count)
        for extent in self.extents._free:
            self.cache.rows.pool.rows[extent] = torch.nan

    @precondition(lambda self: any(not one.read for one in self.running.values()))
    @rule(slow=st.booleans())
    def cancel_while_rows_are_loaded(self, slow: bool) -> None:
        """The request ends after they have come; `slow`: before."""
        slot, one = next((slot, one) for slot, one in self.running.items() if not one.read)
        prompt = pack_tokens(one.tokens)
        self.prefixes.find_more(slot, prompt, one.salt, one.limit)
        with self.store._work if slow else contextlib.nullcontext():
            self.prefixes.load(slot, prompt, one.salt)
            if not slow and (load := self.prefixes._loader._loads.get(slot)) is not None:
                load.ended.wait()
            super().end(slot, failed=False)
            self.evict_and_overwrite(0)

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        self.prefixes._evict(count)

    @precondition(lambda self: self.kept)
    @rule()
    def restart(self) -> None:
        self.running.clear()
        self.store.close(seconds=60)
        self.start()

    @precondition(lambda self: self.kept)
    @rule(number=st.integers(0, 99), how=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, number: int, how: str) -> None:
        whole = sorted(self.files() - self.damaged)
        if not whole:
            return
        path = self.folder / whole[number % len(whole)]
        contents, used_at = bytearray(path.read_bytes()), path.stat().st_mtime_ns
        contents[-1] ^= 1
        self.damaged.add(path.name)
        if how == "delete":
            path.unlink()
        else:
            path.write_bytes(contents[: -1 if how == "cut" else None])
            os.utime(path, ns=(used_at, used_at))  # files go in the order of their use

    @invariant()
    def the_disk_has_what_requests_have_left(self) -> None:
        self.settle()
        assert self.files() <= set(self.kept)
        assert bytes_in(self.folder) <= self.store.folder.bytes <= MOST_BYTES

    def teardown(self) -> None:
        super().teardown()
        self.store.close()
        for name in self.files() - self.damaged:
            tokens = self.kept[name][1]
            first = [0, *ends_of(len(tokens))][-2]
            rows = torch.stack([rows_of(tokens, layer) for layer in range(LAYERS)])
            tensors = load_file(self.folder / name)
            assert tensors.pop("tokens").tolist() == tokens[first:]
            assert torch.equal(tensors.pop("rows"), rows[:, :, first or SINK :])
            assert all(torch.equal(sink, rows[:, :, :SINK]) for sink in tensors.values())
        shutil.rmtree(self.directory)


DiskMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestPrefixesOnDisk = DiskMachine.TestCase


class CopiesMachine(DiskMachine):
    """The same with a method whose requests copy rows."""

    form = "copies"


CopiesMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestPrefixesOnDiskThatAreCopied = CopiesMachine.TestCase
