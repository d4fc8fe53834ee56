"""Sessions: which kept extents belong to which conversations, and which extents make room first (docs/conversations.md).

A session pins the node in which its latest request ends. It need not pin those before, each of which counts as much as the
highest of those that continue it (PrefixTree.evict). So however many sessions share a document, an eviction looks at each once.

Only the engine's thread changes anything here; any thread may count.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvseek.core.request import DEFAULT_RETENTION_PRIORITY, Session

from .tree import Node

MAX_SESSIONS = 4096
# Priority of what only sessions have used that have ended, or whose conversations have taken another course.
LEFT_BEHIND = 0


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
