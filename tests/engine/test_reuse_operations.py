"""Random operations on engines that keep prefixes, in memory and on disk, against a model that a person can read.

The model knows what was said under each salt, and what an engine answers that keeps nothing. So each request must find no more
than what its own salt has said, and answer what a fresh prompt is answered.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.conftest import BuildEngine
from tests.engine.test_prefix_reuse import (
    DOCUMENT,
    EXTENT_BYTES,
    LIMITS,
    NAMES,
    WINDOW,
    KeptRows,
    Plain,
    load,
    model,
    plain,
)
from tests.plugins.cases import CASES, method_flags
from tests.support.waiting import wait_for

from kvseek.core.request import FinishReason, Request, Session, StepOutput
from kvseek.engine.cache.prefixes.tree import common_tokens, pack_tokens
from kvseek.engine.engine import Engine
from kvseek.engine.loading.prefixes import DiskSettings

__all__ = ["load", "model", "plain"]  # fixtures
ROOM = 6  # extents; six requests would like to have up to three each
MOST_RUNNING, LONGEST, MOST_TOKENS = 6, 2800, 60
SALTS, SESSIONS = st.sampled_from([None, None, "other"]), st.sampled_from([None, "a", "b"])
# Of two documents; they end in the window, in the first extent, in the second, and in the third.
BEGINNINGS = [text[:length] for length in (30, 900, 1100, 2060) for text in (DOCUMENT, DOCUMENT[::-1])]
STEPS = st.sampled_from([0, 1, 5, 80])  # that follow an operation


@dataclasses.dataclass
class Asked:
    """A request and what it has been answered so far."""

    request: Request
    tokens: list[int]

    @property
    def said(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.request.prompt_ids, *self.tokens)


class ReuseMachine(RuleBasedStateMachine):
    """Conversations with an engine that has too few extents for them.

    Attributes
    ----------
    start : callable
        Loads the engine; what is on disk in the folder that it is given outlives it.
    restarts : bool
        If not, `start` may give the same engine again, which has come back to its beginning.
    plain : callable
        What an engine answers that keeps nothing.
    totals : dict
        What all runs have done.
    """

    start: Callable[[Path], Engine]
    restarts: bool
    plain: Plain
    totals: dict[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.ended = list[Asked]()
        self.begin()

    def begin(self) -> None:
        self.engine, self.running = type(self).start(self.folder), dict[int, Asked]()
        self.kept_rows, self.room = KeptRows(self.engine), self.engine._cache.extents.capacity

    # Operations.

    @precondition(lambda self: len(self.running) < MOST_RUNNING)
    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        own=st.integers(3, 5),
        count=st.sampled_from([1, 30, 300]),
        most=st.sampled_from([1, 12, MOST_TOKENS]),
        salt=SALTS,
        session=SESSIONS,
        steps=STEPS,
    )
    def submit(
        self,
        beginning: tuple[int, ...],
        own: int,
        count: int,
        most: int,
        salt: str | None,
        session: str | None,
        steps: int,
    ) -> None:
        """A prompt that begins like others, which may share its beginning with them."""
        self.ask(beginning + (own,) * count, most, salt, session)
        self.step(steps)

    @precondition(lambda self: self.ended and len(self.running) < MOST_RUNNING)
    @rule(number=st.integers(0, 9), own=st.integers(3, 5), session=SESSIONS, steps=STEPS)
    def extend(self, number: int, own: int, session: str | None, steps: int) -> None:
        """The next turn of a conversation."""
        last = self.ended[-1 - number % len(self.ended)]
        self.ask(last.said[:LONGEST] + (own,) * 20, 12, last.request.cache_salt, session)
        self.step(steps)

    def ask(self, prompt: tuple[int, ...], most: int, salt: str | None, session: str | None) -> None:
        request = Request(prompt, most, cache_salt=salt, session=None if session is None else Session(session))
        self.running[self.engine.submit(request)] = Asked(request, [])

    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())
            if (loader := self.engine._prefixes._loader) is not None:
                for waited in loader._loads.values():  # so that what follows does not depend on the disk's pace
                    waited.ended.wait()

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, MOST_RUNNING - 1), steps=STEPS)
    def cancel(self, number: int, steps: int) -> None:
        self.step(steps)
        if not self.running:
            return
        output = self.engine.cancel(list(self.running)[number % len(self.running)])
        assert output is not None
        self.take([output])

    @rule(count=st.integers(1, ROOM))
    def evict(self, count: int) -> None:
        self.settle()
        self.engine._prefixes._evict(count)

    @rule(salt=SALTS, session=st.sampled_from("ab"))
    def end_session(self, salt: str | None, session: str) -> None:
        self.engine.end_session(session, salt)

    @precondition(lambda self: self.restarts)
    @rule()
    def restart(self) -> None:
        """Memory is lost, and with it all running requests."""
        self.settle()
        self.count()
        self.engine.close()
        self.begin()

    def settle(self) -> None:
        """Wait for what is to be written to disk."""
        wait_for(lambda: not self.engine.cache_usage.disk.waiting)

    # What must hold.

    def take(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            one = self.running[output.request_id]
            if output.token_id is not None:
                one.tokens.append(output.token_id)
            if output.finish_reason is None:
                continue
            del self.running[output.request_id]
            request, answer = one.request, type(self).plain(Request(one.request.prompt_ids, MOST_TOKENS))
            assert output.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
            assert one.tokens == answer[: len(one.tokens)]
            assert output.finish_reason is FinishReason.CANCELLED or len(one.tokens) == request.max_tokens
            self.totals["reused"] += (reused := output.statistics.reused_tokens)
            assert reused <= self.common(one)
            self.ended.append(one)

    def common(self, one: Asked) -> int:
        """How many first tokens of a prompt others of its salt have said too."""
        others = (other for other in (*self.ended, *self.running.values()) if other is not one)
        same = (other.said for other in others if other.request.cache_salt == one.request.cache_salt)
        prompt = pack_tokens(one.request.prompt_ids)
        return max((common_tokens(pack_tokens(said), prompt) for said in same), default=0)

    @invariant()
    def no_extent_is_lost(self) -> None:
        usage = self.engine.cache_usage
        assert usage.extents_used + usage.extents_kept + usage.extents_free == self.room

    @invariant()
    def rows_stay_until_their_extent_is_given_away(self) -> None:
        """After that nobody may read them: an answer would show it."""
        self.kept_rows.check()
        rows = self.engine._cache.rows
        for pool in (rows.device_rows, rows.pool.rows):
            pool[self.engine._cache.extents._free] = torch.nan

    def count(self) -> None:
        usage = self.engine.cache_usage
        self.totals["evicted"] += usage.reuse.evicted_extents
        self.totals["loaded"] += usage.disk.counts.loaded

    def teardown(self) -> None:
        while self.running:
            self.step(1)
        self.count()
        prefixes, usage = self.engine._prefixes, self.engine.cache_usage
        assert usage.extents_used == 0
        for salt in (None, "other"):
            for session in "ab":
                self.engine.end_session(session, salt)
        prefixes._evict(self.room)
        usage = self.engine.cache_usage
        assert (usage.extents_free, usage.sessions) == (self.room, 0)
        assert not prefixes.rows.sink_rows
        assert not set(prefixes._tree)
        self.engine.close()
        shutil.rmtree(self.folder)


def check_operations(
    start: Callable[[Path], Engine],
    plain: Plain,
    *,
    restarts: bool,
    examples: int,
) -> dict[str, int]:
    """Run random operations, 50 an example; returns what they have done."""
    totals = dict.fromkeys(("reused", "evicted", "loaded"), 0)
    members = {"start": staticmethod(start), "plain": staticmethod(plain), "restarts": restarts, "totals": totals}
    machine = type("Operations", (ReuseMachine,), members)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=50, deadline=None))
    return totals


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("flat", "pariskv")]
)  # whose entries are as nested's
def test_answers_are_those_without_reuse(
    name: str,
    model: Path,
    build_engine: BuildEngine,
    plain: Plain,
) -> None:
    """250 operations a method."""
    method, own = NAMES[name]
    room = ("--cache.kv_cache_host_memory_bytes", str(ROOM * EXTENT_BYTES))
    everything = method_flags(method, CASES[method].everything)
    directory = build_engine(model, method, *WINDOW, *LIMITS, *everything, *own, *room)

    def start(folder: Path) -> Engine:
        return Engine.load(directory, disk=DiskSettings(folder))

    totals = check_operations(start, plain, restarts=True, examples=3)
    assert min(totals.values()) > 0, "tokens were reused, extents made room, and files were loaded"
