"""The tree of kept prefixes, against a dictionary of token tuples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvseek.engine.cache.prefixes import tree as prefix_tree
from kvseek.engine.cache.prefixes.tree import TOKEN_BYTES, PrefixTree, common_tokens, pack_tokens

SINK, EXTENT = 1, 2
TOKENS = st.lists(st.integers(0, 1), min_size=SINK + 1, max_size=9)
SALTS = st.sampled_from([None, "a", "salt a"])
Kept = tuple[str | None, tuple[int, ...]]  # a salt, and all tokens up to an extent's last


def ends_of(tokens: Sequence[int]) -> list[int]:
    """Where the extents of a sequence end."""
    return [*range(SINK + EXTENT, len(tokens), EXTENT), len(tokens)]


class TreeMachine(RuleBasedStateMachine):
    """Extents of two tokens behind a sink of one; `kept` says what a tree of them is to know."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(prefix_tree, "EXTENT_TOKENS", EXTENT)
        self.patch.start()
        self.users: Counter[int] = Counter()
        self.held: list[list[int]] = []
        self.tree = PrefixTree(SINK, lambda extent: self.users[extent] > 0)
        self.kept: dict[Kept, int] = {}  # extents, least recently used first
        self.next_extent = 0

    def teardown(self) -> None:
        self.patch.stop()

    def best(self, salt: str | None, tokens: tuple[int, ...]) -> int:
        """How many first tokens of a sequence some kept one has too."""
        common = [common_tokens(pack_tokens(own), pack_tokens(tokens)) for other, own in self.kept if other == salt]
        return max(common, default=0)

    def touch(self, path: Sequence[Kept]) -> None:
        for key in reversed(path):
            self.kept[key] = self.kept.pop(key)

    def in_the_same_place(self, key: Kept, start: int) -> list[Kept]:
        """Kept keys whose last extent begins where that of `key` does, behind the same tokens."""
        salt, own = key
        return [
            k for k in self.kept if k[0] == salt and k[1][:start] == own[:start] and [0, *ends_of(k[1])][-2] == start
        ]

    @rule(salt=SALTS, tokens=TOKENS)
    def insert(self, salt: str | None, tokens: list[int]) -> None:
        own, ends, path = tuple(tokens), ends_of(tokens), list[Kept]()
        extents = list(range(self.next_extent, self.next_extent + len(ends)))
        self.next_extent += len(ends)
        added, removed = list[int](), list[int]()
        for start, end, extent in zip([0, *ends[:-1]], ends, extents, strict=True):
            key, whole = (salt, own[:end]), end == SINK + EXTENT * (len(path) + 1)
            if not (whole and key in self.kept):
                others = self.in_the_same_place(key, start)
                if any(other[:end] == own[:end] for _, other in others):
                    break
                for other in others:
                    if own[: len(other[1])] == other[1] and not self.users[self.kept[other]]:
                        removed.append(self.kept.pop(other))
                self.kept[key] = extent
                added.append(extent)
            path.append(key)
        self.touch(path)
        found = self.tree.insert(salt, pack_tokens(own), extents)
        assert [node.extent for node in found[0]] == added
        assert sorted(node.extent for node in found[1]) == sorted(removed)
        assert all(new.tokens.startswith(old.tokens) and new in found[0] for old, new in found[1].items())

    def has_children(self, key: Kept) -> bool:
        inner = len(key[1])
        return any(k[0] == key[0] and k[1][:inner] == key[1] and inner in ends_of(k[1])[:-1] for k in self.kept)

    @rule(salt=SALTS, tokens=TOKENS, hold=st.booleans())
    def match(self, salt: str | None, tokens: list[int], hold: bool) -> None:
        own = tuple(tokens)
        match = self.tree.match(salt, pack_tokens(own))
        assert match.tokens == self.best(salt, own)
        whole = b"".join(node.tokens for node in match.nodes)
        assert whole[: match.tokens * TOKEN_BYTES] == pack_tokens(own[: match.tokens])
        path, end = list[Kept](), 0
        for node in match.nodes:
            end += len(node.tokens) // TOKEN_BYTES
            path.append((salt, tuple(memoryview(whole).cast("i")[:end])))
        assert [self.kept[key] for key in path] == [node.extent for node in match.nodes]
        if hold and path:
            self.held.append([node.extent for node in match.nodes])
            self.users.update(self.held[-1])
            self.tree.touch(match.nodes)
            self.touch(path)

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        self.users.subtract(self.held.pop(0))

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        expected = []
        for _ in range(count):
            leaves = [key for key, one in self.kept.items() if not self.users[one] and not self.has_children(key)]
            if leaves:
                expected.append(self.kept.pop(leaves[0]))
        assert [node.extent for node in self.tree.evict(count)] == expected

    def level(self, key: Kept, priorities: Sequence[int]) -> int:
        """The highest priority of an extent and of all that continue it; each has that of the last digit of its number."""
        salt, own = key
        later = [one for (other, tokens), one in self.kept.items() if other == salt and tokens[: len(own)] == own]
        whole = len(own) in ends_of((*own, 0))[:-1]  # else nothing continues it, only others begin alike
        return max(priorities[one % 10] for one in (later if whole else [self.kept[key]]))

    @rule(count=st.integers(0, 3), priorities=st.lists(st.sampled_from([0, 35, 70]), min_size=10, max_size=10))
    def evict_by_priority(self, count: int, priorities: list[int]) -> None:
        unused = [key for key, one in self.kept.items() if not self.users[one]]
        first = sorted(unused, key=lambda key: self.level(key, priorities))[:count]
        expected = [self.kept[key] for key in first]
        evicted = self.tree.evict(count, lambda node: priorities[node.extent % 10])
        assert [node.extent for node in evicted] == expected
        for key in first:
            assert not self.has_children(key)
            del self.kept[key]

    @invariant()
    def both_keep_the_same(self) -> None:
        assert [node.extent for node in self.tree] == list(self.kept.values())
        assert len(self.tree) == len(self.kept)


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestTree = TreeMachine.TestCase


def test_tokens_in_common() -> None:
    one = pack_tokens([1, 2, 3], [4])
    assert [common_tokens(one, pack_tokens(other)) for other in ([], [9], [1, 2, 9, 4], [1, 2, 3, 4, 5])] == [
        0,
        0,
        2,
        4,
    ]


def test_a_sequence_is_found_under_its_own_salt_alone() -> None:
    tree = PrefixTree(SINK, lambda extent: False)
    tokens = pack_tokens(range(3000))
    tree.insert("a", tokens, [0, 1, 2])
    assert tree.match("a", tokens).tokens == 3000
    assert tree.match(None, tokens).tokens == tree.match("b", tokens).tokens == 0
    tree.insert(None, tokens, [3, 4, 5])
    assert [node.extent for node in tree.match(None, tokens).nodes] == [3, 4, 5]
    assert len(tree.evict(9)) == 6
    assert len(tree) == 0
