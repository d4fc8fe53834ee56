"""Which prefixes of token sequences are kept, in which extents: a tree of extents, without their rows.

A *node* is one extent. It stands for the tokens of that extent that follow its parent's; the first node of a sequence also
stands for the tokens of the sink, which lie in no extent. A node with all tokens that an extent has room for may have
children; one with fewer is a leaf. A node is known by a chained hash of a salt and of all tokens up to its last one, so a
whole extent is found in one look-up, whatever the length of the sequence. Sequences of different salts never meet.

Tokens are given as bytes, a 32-bit number each, so that spans are hashed and compared without a loop over tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvseek.core.config import EXTENT_TOKENS

TOKEN_BYTES = 4
KEY_BYTES = 16


def pack_tokens(*parts: Sequence[int]) -> bytes:
    """Pack token ids as the tree takes them: the parts one after the other, 4 bytes a token."""
    packed = array("i")
    assert packed.itemsize == TOKEN_BYTES
    for part in parts:
        packed.extend(part)
    return packed.tobytes()


def span_bytes(sink: int, depth: int) -> int:
    """Return the bytes of tokens that a whole extent stands for, as the node number `depth` of a sequence."""
    return (EXTENT_TOKENS + (0 if depth else sink)) * TOKEN_BYTES


def common_tokens(one: bytes, other: bytes) -> int:
    """Count the first tokens that two packed sequences have in common."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:  # the first `low` are equal, not the first `high` + 1
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def root_key(salt: str | None) -> bytes:
    """Return what stands in the place of a parent's key for the first nodes of a salt; it does not tell the salt."""
    text = b"" if salt is None else b"salt " + salt.encode()
    return hashlib.blake2b(text, digest_size=KEY_BYTES, person=b"root").digest()


def chained_key(before: bytes, span: bytes) -> bytes:
    """Return the key of a node that stands for the packed tokens `span`; `before` is its parent's key, or a root key."""
    return hashlib.blake2b(before + span, digest_size=KEY_BYTES).digest()


@dataclass(eq=False)
class Node:
    """One extent of a kept sequence.

    Attributes
    ----------
    key : bytes
        Hash of the salt and of all tokens up to the node's last one.
    parent : Node or None
        None: the first node of a sequence.
    tokens : bytes
        The tokens that the node stands for.
    """

    key: bytes
    salt: str | None
    parent: Node | None
    extent: int
    tokens: bytes
    children: Siblings = field(default_factory=lambda: Siblings(), repr=False)

    @property
    def before(self) -> bytes:
        """The key of the parent, or the root key of a first node."""
        return root_key(self.salt) if self.parent is None else self.parent.key


class Siblings:
    """The nodes that continue one sequence, found by their key, or in the order of their tokens by what they begin with."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Node] = {}
        self._ordered: list[Node] = []  # no two have the same tokens

    def __len__(self) -> int:
        return len(self._ordered)

    def get(self, key: bytes) -> Node | None:
        return self._by_key.get(key)

    def add(self, node: Node) -> None:
        self._by_key[node.key] = node
        insort(self._ordered, node, key=_tokens)

    def remove(self, node: Node) -> None:
        del self._by_key[node.key], self._ordered[bisect_left(self._ordered, node.tokens, key=_tokens)]

    def closest(self, tokens: bytes) -> tuple[Node | None, int]:
        """Find the node that has most tokens in common with `tokens`, and how many; None if no node has any."""
        place = bisect_left(self._ordered, tokens, key=_tokens)
        beside = self._ordered[max(0, place - 1) : place + 1]
        common, best = max(((common_tokens(one.tokens, tokens), one) for one in beside), key=_count, default=(0, None))
        return (best, common) if common else (None, 0)

    def continues(self, tokens: bytes) -> bool:
        """Whether a node begins with `tokens`."""
        place = bisect_left(self._ordered, tokens, key=_tokens)
        return place < len(self._ordered) and self._ordered[place].tokens.startswith(tokens)

    def beginnings(self, tokens: bytes) -> list[Node]:
        """Find the nodes whose tokens `tokens` begin with."""
        found, place = list[Node](), bisect_right(self._ordered, tokens, key=_tokens)
        while place:
            before = self._ordered[place - 1].tokens
            if tokens.startswith(before):
                found.append(self._ordered[place - 1])
                place -= 1
            else:  # what is shorter lies before all that differ from `tokens` as early as this one
                common = common_tokens(before, tokens) * TOKEN_BYTES
                place = bisect_right(self._ordered, tokens[:common], 0, place - 1, key=_tokens)
        return found


@dataclass(frozen=True)
class Match:
    """The longest beginning of a sequence that is kept: its first `tokens` tokens, the last of them in the last node."""

    nodes: tuple[Node, ...] = ()
    tokens: int = 0


class PrefixTree:
    """The kept prefixes.

    Parameters
    ----------
    sink : int
        Tokens of the sink, which a sequence's first node stands for beside those of its extent.
    in_use : callable
        Whether anybody uses an extent, given by its number; such extents stay. Whoever uses a node's extent must use those of
        all nodes before it.
    """

    def __init__(self, sink: int, in_use: Callable[[int], bool]) -> None:
        self._sink, self._in_use = sink, in_use
        self._first: dict[str | None, Siblings] = {}  # first nodes by salt
        # By their last use. A node is used whenever one of its descendants is, and counts as used after it: so a node is older
        # than its parent, and the oldest node that nobody uses has no children.
        self._by_use: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_use)

    def match(self, salt: str | None, tokens: bytes) -> Match:
        """Find the longest beginning of `tokens` that is kept, also if it ends in the middle of a node."""
        nodes, siblings = self._walk(salt, tokens)
        found = sum(len(node.tokens) for node in nodes)
        rest = tokens[found : found + self._span_bytes(len(nodes))]
        best, common = siblings.closest(rest)
        if best is not None:
            nodes.append(best)
        return Match(tuple(nodes), found // TOKEN_BYTES + common)

    def whole_nodes(self, salt: str | None, tokens: bytes) -> list[Node]:
        """Find the nodes of whole extents that `tokens` begin with, in order."""
        return self._walk(salt, tokens)[0]

    def insert(self, salt: str | None, tokens: bytes, extents: Sequence[int]) -> tuple[list[Node], dict[Node, Node]]:
        """Keep a sequence, whose tokens behind the sink lie in `extents`, in order.

        Where the tree has an equal extent, or a longer one that begins like the sequence's last, it keeps its own. Leaves that
        nobody uses and that a new node makes superfluous are removed.

        Returns
        -------
        added : list of Node
            The new nodes, in order.
        removed : dict of Node to Node
            The removed nodes, and for each the new one that has its tokens.
        """
        nodes, siblings = self._walk(salt, tokens)
        position = sum(len(node.tokens) for node in nodes)
        added, removed = list[Node](), dict[Node, Node]()
        while position < len(tokens):
            parent = nodes[-1] if nodes else None
            span = tokens[position : position + self._span_bytes(len(nodes))]
            if siblings.continues(span):
                break  # of whole extents there is none, or _walk would have found it
            shorter = [one for one in siblings.beginnings(span) if not self._in_use(one.extent)]
            for old in shorter:
                self.remove(old)
            node = Node(_key(salt, parent, span), salt, parent, extents[len(nodes)], span)
            self._by_use[node] = None
            # Not `siblings`, as `remove` forgets a salt without sequences.
            (self._first.setdefault(salt, Siblings()) if parent is None else parent.children).add(node)
            nodes.append(node)
            added.append(node)
            removed |= dict.fromkeys(shorter, node)
            position, siblings = position + len(span), node.children
        self.touch(nodes)
        return added, removed

    def touch(self, nodes: Sequence[Node]) -> None:
        """Note that a sequence's first nodes, given in order, are used now."""
        for node in reversed(nodes):
            self._by_use.move_to_end(node)

    def evict(self, count: int, priority: Callable[[Node], int] | None = None, most: int | None = None) -> list[Node]:
        """Remove as many of the nodes that nobody uses, least recently used first; fewer if there are not so many.

        With `priority`, those of the lowest priority come first, and those above `most` stay. A node counts as much as the
        highest that continues it.
        """
        order = self._by_use if priority is None or count < 1 else self._by_priority(priority, most)
        oldest = (node for node in order if not self._in_use(node.extent))
        chosen = [node for node, _ in zip(oldest, range(count), strict=False)]
        for node in chosen:
            self.remove(node)
        return chosen

    def _by_priority(self, priority: Callable[[Node], int], most: int | None) -> list[Node]:
        """List the nodes up to a priority, lowest priority first, then least recently used: a node always before its parent."""
        found: dict[Node, int] = {}
        for node in self._by_use:  # all that continue a node come before it
            found[node] = max(priority(node), found.get(node, 0))
            if node.parent is not None:
                found[node.parent] = max(found[node], found.get(node.parent, 0))
        return sorted((node for node in self._by_use if most is None or found[node] <= most), key=found.__getitem__)

    def cut(self, nodes: Collection[Node]) -> list[Node]:
        """Remove these nodes, as far as the tree has them, and all that continue them, also those that somebody uses.

        Returns what was removed, each node before the one that it continues.
        """
        found: dict[Node, None] = {}
        for node in reversed(self._by_use):  # parents come first
            if node in nodes or node.parent in found:
                found[node] = None
        removed = list(reversed(found))
        for node in removed:
            self.remove(node)
        return removed

    def remove(self, node: Node) -> None:
        """Forget a node, which must have no children."""
        assert not node.children, "a sequence has no holes"
        siblings = self._first[node.salt] if node.parent is None else node.parent.children
        siblings.remove(node)
        del self._by_use[node]
        if node.parent is None and not siblings:
            del self._first[node.salt]

    def __iter__(self) -> Iterator[Node]:
        """Iterate over all nodes, least recently used first."""
        return iter(self._by_use)

    def _span_bytes(self, depth: int) -> int:
        return span_bytes(self._sink, depth)

    def _walk(self, salt: str | None, tokens: bytes) -> tuple[list[Node], Siblings]:
        """Find the nodes of whole extents that `tokens` begin with, and the children of the last of them."""
        nodes, siblings, position = list[Node](), self._first.get(salt, Siblings()), 0
        while len(span := tokens[position : position + self._span_bytes(len(nodes))]) == self._span_bytes(len(nodes)):
            node = siblings.get(_key(salt, nodes[-1] if nodes else None, span))
            if node is None:
                break
            nodes.append(node)
            position, siblings = position + len(span), node.children
        return nodes, siblings


def _tokens(node: Node) -> bytes:
    return node.tokens


def _count(found: tuple[int, Node]) -> int:
    return found[0]


def _key(salt: str | None, parent: Node | None, span: bytes) -> bytes:
    return chained_key(root_key(salt) if parent is None else parent.key, span)
