"""Which prefixes of token sequences are kept, in which extents, and for whom: a tree of extents, without their rows.

A *node* is one extent. It stands for the tokens of that extent that follow its parent's; the first node of a sequence also
stands for the tokens of the sink, which lie in no extent. A node with all tokens that an extent has room for may have
children; one with fewer is a leaf. A node is known by a chained hash of a salt and of all tokens up to its last one, so a
whole extent is found in one look-up, whatever the length of the sequence. Sequences of different salts never meet.

Tokens are given as bytes, a 32-bit number each, so that spans are hashed and compared without a loop over tokens.

A *session* (docs/conversations.md) pins the node in which its latest request ends. It need not pin those before, each of which
counts as much as the highest of those that continue it (PrefixTree.evict). So however many sessions share a document, an
eviction looks at each once. Only the engine's thread changes sessions; any thread may count them.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.request import DEFAULT_RETENTION_PRIORITY, Session

if TYPE_CHECKING:  # `kvseek serve` looks at folders of prefixes without PyTorch
    from kvseek.engine.cache.states import Snapshot

TOKEN_BYTES = 4
KEY_BYTES = 16
TOKENS = attrgetter("tokens")
MAX_SESSIONS = 4096
# Priority of what only sessions have used that have ended, or whose conversations have taken another course.
LEFT_BEHIND = 0


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
        insort(self._ordered, node, key=TOKENS)

    def remove(self, node: Node) -> None:
        del self._by_key[node.key], self._ordered[bisect_left(self._ordered, node.tokens, key=TOKENS)]

    def closest(self, tokens: bytes) -> tuple[Node | None, int]:
        """Find the node that has most tokens in common with `tokens`, and how many; None if no node has any."""
        place = bisect_left(self._ordered, tokens, key=TOKENS)
        beside = self._ordered[max(0, place - 1) : place + 1]
        common, best = max(
            ((common_tokens(one.tokens, tokens), one) for one in beside), key=itemgetter(0), default=(0, None)
        )
        return (best, common) if common else (None, 0)

    def continues(self, tokens: bytes) -> bool:
        """Whether a node begins with `tokens`."""
        place = bisect_left(self._ordered, tokens, key=TOKENS)
        return place < len(self._ordered) and self._ordered[place].tokens.startswith(tokens)

    def beginnings(self, tokens: bytes) -> list[Node]:
        """Find the nodes whose tokens `tokens` begin with."""
        found, place = list[Node](), bisect_right(self._ordered, tokens, key=TOKENS)
        while place:
            before = self._ordered[place - 1].tokens
            if tokens.startswith(before):
                found.append(self._ordered[place - 1])
                place -= 1
            else:  # what is shorter lies before all that differ from `tokens` as early as this one
                common = common_tokens(before, tokens) * TOKEN_BYTES
                place = bisect_right(self._ordered, tokens[:common], 0, place - 1, key=TOKENS)
        return found


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
    states : dict of int to Snapshot
        Of a hybrid, by how many of these tokens lie before.
    """

    key: bytes
    salt: str | None
    parent: Node | None
    extent: int
    tokens: bytes
    children: Siblings = field(default_factory=Siblings, repr=False)
    states: dict[int, Snapshot] = field(default_factory=dict, repr=False)

    @property
    def before(self) -> bytes:
        """The key of the parent, or the root key of a first node."""
        return root_key(self.salt) if self.parent is None else self.parent.key


@dataclass(frozen=True)
class Match:
    """The longest beginning of a sequence that is kept: its first `tokens` tokens, the last of them in the last node."""

    nodes: tuple[Node, ...] = ()
    tokens: int = 0

    def latest_state(self) -> Snapshot | None:
        """Return the snapshot of most of these tokens."""
        last = self.tokens
        for node in reversed(self.nodes):
            first = self._before(node)
            if fitting := [place for place in node.states if first + place <= last]:
                return node.states[max(fitting)]
        return None

    def node_of(self, place: int) -> tuple[Node, int] | None:
        """Return the node that has the token before a place of the sequence, and how many of its tokens lie before the place."""
        for node in self.nodes:
            if place * TOKEN_BYTES <= len(node.tokens):
                return node, place
            place -= len(node.tokens) // TOKEN_BYTES
        return None

    def _before(self, node: Node) -> int:
        return sum(len(one.tokens) for one in self.nodes[: self.nodes.index(node)]) // TOKEN_BYTES


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
            key = chained_key(root_key(salt) if parent is None else parent.key, span)
            node = Node(key, salt, parent, extents[len(nodes)], span)
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
        nodes, siblings, position, before = list[Node](), self._first.get(salt, Siblings()), 0, root_key(salt)
        while len(span := tokens[position : position + self._span_bytes(len(nodes))]) == self._span_bytes(len(nodes)):
            node = siblings.get(chained_key(before, span))
            if node is None:
                break
            nodes.append(node)
            position, siblings, before = position + len(span), node.children, node.key
        return nodes, siblings


@dataclass(eq=False)
class KeptSession:
    """A session that the engine knows.

    Attributes
    ----------
    key : (str or None, str)
        Salt and id.
    expires_at : float or None
        When its priority lapses, in seconds of the clock; None: never.
    nodes : set of Node
        All kept nodes that its requests have used.
    end : Node or None
        The last of those that its latest request goes through.
    """

    key: tuple[str | None, str]
    priority: int = 0
    expires_at: float | None = None
    nodes: set[Node] = field(default_factory=set)
    end: Node | None = None

    def priority_at(self, now: float) -> int:
        """Return the priority of the nodes that its latest request goes through."""
        return self.priority if self.lives(now) else DEFAULT_RETENTION_PRIORITY

    def lives(self, now: float) -> bool:
        """Whether its time to live has not passed."""
        return self.expires_at is None or now < self.expires_at


@dataclass
class Uses:
    """Who has used a node: sessions, those of them whose latest request ends in it, and requests without a session."""

    sessions: set[KeptSession] = field(default_factory=set)
    ends: set[KeptSession] = field(default_factory=set)
    anonymous: bool = False


class Sessions:
    """The sessions that are known, at most MAX_SESSIONS: the least recently used one is forgotten for a new one.

    Parameters
    ----------
    clock : callable
        Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[tuple[str | None, str], KeptSession] = OrderedDict()  # by their last use
        self._uses: dict[Node, Uses] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def pinned(self) -> int:
        """Count the extents that live sessions pin."""
        now, pinned = self._clock(), set[Node]()
        for session in tuple(self._sessions.values()):  # a copy, as the engine's thread goes on meanwhile
            node = session.end if session.lives(now) else None
            while node is not None and node not in pinned:
                pinned.add(node)
                node = node.parent
        return len(pinned)

    def use(self, session: Session | None, salt: str | None, nodes: Sequence[Node], last: Node | None = None) -> None:
        """Note that a request uses kept nodes. What its session has used before and does not use now is no longer pinned.

        Parameters
        ----------
        nodes : sequence of Node
            Those whose tokens the request begins with, in order.
        last : Node, optional
            The next node, of whose tokens the request has only the first. It matters to the session whose own it is.
        """
        if session is None:
            for node in nodes:
                self._uses.setdefault(node, Uses()).anonymous = True
            return
        kept = self._kept(session, salt)
        for node in nodes:
            self._uses.setdefault(node, Uses()).sessions.add(kept)
        kept.nodes.update(nodes)
        self._end_in(last if last in kept.nodes else nodes[-1] if nodes else None, kept)

    def priority(self) -> Callable[[Node], int]:
        """Return a function that tells the present priority of a node, apart from those that continue it."""
        now = self._clock()

        def of_node(node: Node) -> int:
            uses = self._uses.get(node)
            if uses is None:
                return DEFAULT_RETENTION_PRIORITY
            found = [session.priority_at(now) for session in uses.ends]
            return max([*found, DEFAULT_RETENTION_PRIORITY] if uses.anonymous else found, default=LEFT_BEHIND)

        return of_node

    def replace(self, old: Node, new: Node) -> None:
        """Give a node the uses of one that it replaces, because it has all of that one's tokens."""
        theirs, own = self._uses.get(old, Uses()), self._uses.setdefault(new, Uses())
        own.anonymous |= theirs.anonymous
        own.sessions |= theirs.sessions
        for session in theirs.sessions:
            session.nodes.add(new)
        for session in tuple(theirs.ends):
            self._end_in(new, session)

    def forget(self, node: Node) -> None:
        """Forget a node that is kept no longer."""
        uses = self._uses.get(node, Uses())
        for session in tuple(uses.ends):
            self._end_in(node.parent, session)
        for session in uses.sessions:
            session.nodes.remove(node)
        self._uses.pop(node, None)

    def end(self, salt: str | None, session_id: str) -> set[Node] | None:
        """Forget a session; returns the nodes that only it has used, None if it is not known."""
        session = self._sessions.pop((salt, session_id), None)
        if session is None:
            return None
        self._end_in(None, session)
        for node in session.nodes:
            self._uses[node].sessions.remove(session)
        return {node for node in session.nodes if not self._uses[node].sessions and not self._uses[node].anonymous}

    def _end_in(self, node: Node | None, session: KeptSession) -> None:
        if session.end is not None:
            self._uses[session.end].ends.remove(session)
        session.end = node
        if node is not None:
            self._uses[node].ends.add(session)

    def _kept(self, session: Session, salt: str | None) -> KeptSession:
        """Find a session or begin it, with the priority and the time to live of its latest request."""
        key = (salt, session.id)
        if key not in self._sessions:
            if len(self._sessions) >= MAX_SESSIONS:
                self.end(*next(iter(self._sessions)))
            self._sessions[key] = KeptSession(key)
        self._sessions.move_to_end(key)
        kept = self._sessions[key]
        kept.priority = session.retention_priority
        seconds = session.retention_seconds
        kept.expires_at = None if seconds is None else self._clock() + seconds
        return kept
