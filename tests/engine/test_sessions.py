"""Sessions in an engine: what they pin, in which order kept extents make room, and what the end of a session frees."""

from __future__ import annotations

import pytest
from tests.engine.test_prefix_reuse import EXTENT_BYTES, SINK, Load, ask, load, model
from tests.support.prefill import run_to_end

from kvseek.core.errors import RequestError
from kvseek.core.request import EndedSession, FinishReason, Request, Session, read_session
from kvseek.engine.cache.prefixes import tree
from kvseek.engine.cache.prefixes.tree import Sessions
from kvseek.engine.engine import Engine

__all__ = ["load", "model"]  # fixtures
ROOM = 6  # extents; a conversation of 2,200 tokens takes three


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(load: Load, clock: Clock) -> Engine:
    engine = load(kv_cache_host_memory_bytes=ROOM * EXTENT_BYTES)
    engine._prefixes.sessions = Sessions(clock)
    return engine


def text(first: int, tokens: int = 2200) -> tuple[int, ...]:
    """Tokens of a conversation, which differ from those of others from the first on."""
    return (first, *(i * i * 13 % 379 + 3 for i in range(tokens - 1)))


def read(engine: Engine, prompt: tuple[int, ...], session: Session | None = None, salt: str | None = None) -> int:
    """Ask, and return how many tokens of the prompt were reused."""
    ((_, statistics),) = ask(engine, Request(prompt, 3, session=session, cache_salt=salt))
    return statistics.reused_tokens


def test_what_a_session_pins_stays_longest(engine: Engine) -> None:
    read(engine, text(3), Session("a"))
    for first in (4, 5, 6, 7):  # each needs the room of the one before
        read(engine, text(first))
    usage = engine.cache_usage
    assert (usage.sessions, usage.pinned_extents) == (1, 3)
    assert usage.reuse.evicted_extents == 9
    assert read(engine, text(4)) == 0
    assert read(engine, text(3), Session("a")) == 2199


def test_what_a_request_leaves_takes_no_room_from_what_counts_more(load: Load) -> None:
    """The window of the second request would fill an extent of its own, which only a session's could make room for."""
    for session, pinned in ((None, 3), (Session("b", 60), 5), (Session("b", 80), 5)):
        engine = load(kv_cache_host_memory_bytes=5 * EXTENT_BYTES)
        read(engine, text(3), Session("a"))
        read(engine, text(4, 2048 + SINK + 10), session)
        assert engine.cache_usage.pinned_extents == pinned
        lower = session is None or session.retention_priority < 70
        assert (read(engine, text(3)[:2150], Session("a")) > 2100) == lower


def test_methods_that_copy_rows_have_sessions_too(load: Load) -> None:
    engine = load("prkv", kv_cache_host_memory_bytes=9 * EXTENT_BYTES)
    read(engine, text(3), Session("a"))
    for first in (4, 5, 6, 7):
        read(engine, text(first))
    assert engine.cache_usage.pinned_extents == 3
    assert read(engine, text(3), Session("a")) > 2100, "its index needs the last queries"
    assert engine.end_session("a") == EndedSession(3, 2202)


@pytest.mark.parametrize(("one", "other", "kept"), [(80, 60, 3), (60, 80, 4), (60, 60, 4), (10, 0, 3)])
def test_the_lower_priority_makes_room_first(engine: Engine, one: int, other: int, kept: int) -> None:
    """Of equal priorities the least recently used."""
    read(engine, text(3), Session("a", one))
    read(engine, text(4), Session("b", other))
    read(engine, text(5), Session("c", 90))
    assert read(engine, text(kept), Session("d", 100)) == 2199


@pytest.mark.parametrize("session", [None, Session("system", 100)])
def test_a_beginning_has_a_priority_of_its_own(engine: Engine, session: Session | None) -> None:
    """A system prompt stays, which was asked once with a session, when all conversations behind it have made room."""
    system = text(3, 1100)
    read(engine, system, session)
    for first in (4, 5, 6):
        assert read(engine, (*system, *text(first, 1000))) == 1100
    for first in (7, 8):
        read(engine, text(first))
    assert read(engine, (*system, *text(5, 20))) == (0 if session is None else 1100)


def test_a_priority_lapses(engine: Engine, clock: Clock) -> None:
    read(engine, text(3), Session("a", 90, retention_seconds=60))
    read(engine, text(4))
    clock.now += 59
    assert engine.cache_usage.pinned_extents == 3
    read(engine, text(4))
    clock.now += 1
    usage = engine.cache_usage
    assert (usage.sessions, usage.pinned_extents) == (1, 0), "it can still be ended"
    read(engine, text(5))
    assert read(engine, text(4)) == 2199, "used after the session was"
    assert read(engine, text(3), Session("a")) == 0


def test_a_low_priority_lapses_too(engine: Engine, clock: Clock) -> None:
    read(engine, text(4))
    read(engine, text(3), Session("a", 10, retention_seconds=60))
    clock.now += 60
    read(engine, text(5))
    assert read(engine, text(3)) == 2199


def test_every_turn_renews_the_priority(engine: Engine, clock: Clock) -> None:
    for _ in range(3):
        read(engine, text(3), Session("a", retention_seconds=60))
        clock.now += 59
        for first in (4, 5):
            read(engine, text(first))
    assert read(engine, text(3), Session("a", retention_seconds=60)) == 2199


def test_what_an_edited_history_no_longer_begins_with_makes_room_first(engine: Engine) -> None:
    """A conversation of two extents is edited in the first: its old end goes, before a more recent request without a session."""
    read(engine, text(3, 1900), Session("a"))
    assert engine.cache_usage.pinned_extents == 2
    assert read(engine, (*text(3, 900), *text(8, 600)), Session("a")) == 900
    usage = engine.cache_usage
    assert (usage.extents_kept, usage.pinned_extents) == (4, 2)
    read(engine, text(4, 1900))
    read(engine, text(5, 1900))
    assert read(engine, text(3, 1900)[:1000], None) == 900, "of its new course alone"
    assert read(engine, text(4, 1900)) > 0


def test_a_history_that_was_edited_and_comes_back_is_pinned_again(engine: Engine) -> None:
    old, new = text(3, 1900), (*text(3, 900), *text(8, 600))
    for prompt, reused in ((old, 0), (new, 900), (old, 1899)):
        assert read(engine, prompt, Session("a")) == reused
    read(engine, text(4, 1900))
    read(engine, text(5, 1900))
    assert read(engine, old, Session("a")) == 1899


def test_the_end_of_a_session_frees_what_only_it_has_used(engine: Engine) -> None:
    read(engine, text(3), Session("a"))
    read(engine, (*text(3, 1100), *text(8, 900)), Session("b"))
    kept = engine.cache_usage.extents_kept
    assert kept == 4, "the first extent is of both"
    assert engine.end_session("a") == EndedSession(2, 2202 - 1024 - SINK)
    assert engine.end_session("a") is None
    assert engine.cache_usage.extents_kept == kept - 2
    assert read(engine, text(3)) == 1100
    assert engine.end_session("b") == EndedSession(1, 2002 - 1024 - SINK), "the first is now used without a session too"
    assert engine.cache_usage.sessions == 0


def test_the_end_of_a_session_frees_its_earlier_courses(engine: Engine) -> None:
    read(engine, text(3, 1900), Session("a"))
    read(engine, (*text(3, 900), *text(8, 600)), Session("a"))
    assert engine.end_session("a") == EndedSession(4, 1902 + 1502)
    assert engine.cache_usage.extents_kept == 0


def test_a_running_request_takes_what_it_leaves_with_its_session(engine: Engine) -> None:
    number = engine.submit(Request(text(3), 40, session=Session("a")))
    while not engine.step()[-1].token_id:
        pass
    assert engine.end_session("a") == EndedSession(0, 0)
    outputs = run_to_end(engine)
    assert outputs[-1].request_id == number
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert engine.end_session("a") is None
    assert engine.cache_usage.extents_kept == 0, "what it has left went with its session"


def test_a_waiting_request_leaves_nothing_to_a_session_that_has_ended(engine: Engine) -> None:
    read(engine, text(3, 1500), Session("a"), "x")
    for salt in ("x", "y"):
        engine.submit(Request(text(3), 3, session=Session("a"), cache_salt=salt))
    assert engine.end_session("a", "x") == EndedSession(2, 1502)
    assert engine.end_session("a", "y") == EndedSession(0, 0), "it has a request, though nothing is kept yet"
    run_to_end(engine)
    usage = engine.cache_usage
    assert (usage.sessions, usage.extents_kept) == (0, 0)


def test_a_longer_text_takes_over_what_is_pinned(engine: Engine) -> None:
    """A request without a session continues a session's last, partial extent, whose tokens are in its own then."""
    read(engine, text(3), Session("a"))
    read(engine, (*text(3, 2202), 9, 9, 9))
    assert engine.cache_usage.pinned_extents in (2, 3)
    for first in (4, 5):
        read(engine, text(first))
    assert read(engine, text(3), Session("a")) == 2199


def test_sessions_of_other_salts_are_others(engine: Engine) -> None:
    for salt in ("x", "y"):
        assert read(engine, text(3), Session("a"), salt) == 0
    assert engine.cache_usage.sessions == 2
    assert engine.end_session("a") is None
    assert engine.end_session("a", "z") is None
    assert engine.end_session("a", "x") == EndedSession(3, 2202)
    assert read(engine, text(3), Session("a"), "y") == 2199


def test_short_requests_have_sessions_without_extents(engine: Engine) -> None:
    read(engine, text(3, 15), Session("a"))
    assert engine.end_session("a") == EndedSession(0, 0)


def test_the_least_recently_used_session_is_forgotten(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_SESSIONS", 3)
    for name in ("a", "b", "c", "a", "d"):
        read(engine, text(3, 1500), Session(name))
    assert engine.cache_usage.sessions == 3
    assert [engine.end_session(name) is not None for name in "abcd"] == [True, False, True, True]
    assert engine.cache_usage.extents_kept == 0


def test_an_engine_that_keeps_nothing_refuses_sessions(load: Load) -> None:
    engine = load(reuse=False)
    why = r".*; the engine was built with cache\.reuse = False: leave it out, or build with --cache\.reuse true"
    with pytest.raises(RequestError, match=f"session_id: this engine keeps nothing of prompts{why}"):
        engine.check(Request(text(3), 3, session=Session("a")))
    assert engine.end_session("a") is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", None, None), "session_id has 0 characters: must be 1 to 256; leave it out"),
        (("a" * 257, None, None), "session_id has 257 characters: must be 1 to 256"),
        (("\ud800", None, None), "session_id: character 0 is half of a surrogate pair"),
        (("a", 101, None), r"retention_priority = 101: must be in \[0, 100\]; 70 is a session's default"),
        (("a", -1, None), r"retention_priority = -1: must be in \[0, 100\]"),
        (("a", None, 0.0), "retention_seconds = 0.0: must be > 0 and <= 604800 s, a week"),
        (("a", None, float("nan")), "retention_seconds = nan: must be > 0"),
        (("a", None, 1e6), "retention_seconds = 1000000.0: must be > 0"),
        ((None, 50, None), "retention_priority = 50: is for requests of a session; send session_id too"),
        ((None, None, 5.0), "retention_seconds = 5.0: is for requests of a session"),
    ],
)
def test_fields_out_of_range_are_refused(fields: tuple[str | None, int | None, float | None], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_session(*fields)


def test_fields_that_are_absent_have_defaults() -> None:
    assert read_session(None, None, None) is None
    assert read_session("a", None, None) == Session("a", 70, 3600.0)
    assert read_session("a", 0, 1.5) == Session("a", 0, 1.5)


def test_a_salt_that_cannot_be_encoded_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="cache_salt: character 1 is half of a surrogate pair"):
        engine.check(Request(text(3), 3, cache_salt="a\udc00"))
