"""Prefix reuse in an engine of two ranks: the same tokens, reused tokens and evictions as in an engine of one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.engine import test_preemption as preemption
from tests.engine.leading.test_ranks import REUSING, loaded
from tests.engine.number_faults import broken_activations
from tests.plugins.cases import CASES, method_flags
from tests.support.long_prompts import DOCUMENT, SHAPE, WINDOW
from tests.support.prefill import run_to_end

from kvseek.core.errors import ConfigError
from kvseek.core.request import FinishReason, Request, Session
from kvseek.engine.engine import Engine
from kvseek.engine.leading.followers import RankError
from kvseek.engine.loading.prefixes import DiskSettings

pytestmark = pytest.mark.usefixtures("forked_ranks")

EXTENT_BYTES = 2 * 2 * 1024 * 2 * 32 * 4  # of two layers and two KV heads of 32 channels
LIMITS = ("--max_batch_size", "4", "--max_seq_len", "3200", "--prefill_chunk_tokens", "512")
POOL = ("--cache.kv_cache_host_memory_bytes", str(6 * EXTENT_BYTES))
Build = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def build(random_model: RandomModel, build_engine: BuildEngine) -> Build:
    """An engine of one rank and one of two."""
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=32, **SHAPE)

    def make(method: str, *flags: str) -> tuple[Path, Path]:
        flags = (*WINDOW, *LIMITS, *flags)
        return build_engine(model, method, *flags), build_engine(model, method, *flags, "--tp_size", "2")

    return make


def ask(engine: Engine, request: Request) -> tuple[list[int], int, int]:
    """Tokens, and how many tokens of the prompt and extents were reused."""
    number = engine.submit(request)
    outputs = [output for output in run_to_end(engine) if output.request_id == number]
    statistics = outputs[-1].statistics
    assert engine._cache.extents.used == 0
    tokens = [output.token_id for output in outputs if output.token_id is not None]
    return tokens, statistics.reused_tokens, statistics.reused_extents


def conversation(engine: Engine) -> list[object]:
    """Requests one after the other: prompts that begin alike in every way, evictions, one that fails, the end of a session."""
    session, found = Session("one", retention_priority=90), list[object]()
    for prompt, more, salt, kept in (
        (DOCUMENT, 12, None, session),
        (DOCUMENT, 3, None, None),
        (DOCUMENT + (5,) * 40, 12, None, session),
        (DOCUMENT[:1500] + (7,) * 40, 12, None, None),
        (DOCUMENT[: 1024 + 4] + (9,) * 30, 12, None, None),
        (DOCUMENT[:3] + (11,) * 60, 12, None, None),  # in the sink
        (DOCUMENT[:1500], 12, "other", None),
        (DOCUMENT[::-1], 30, None, None),  # evicts
        (DOCUMENT[:1500] + (7,) * 40 + (6,) * 900, 12, None, None),
        (DOCUMENT + (5,) * 41, 12, None, session),
    ):
        found.append(ask(engine, Request(prompt, more, cache_salt=salt, session=kept)))
    with broken_activations(engine, 8):  # in the last token alone, so that every rank has a part in the rest
        found.append(ask(engine, Request(DOCUMENT + (5,) * 30 + (8,), 12)))
    found += [engine.unsound, ask(engine, Request(DOCUMENT + (5,) * 40, 12))]
    given_up = engine.submit(Request(DOCUMENT[:1200] + (8,) * 1200, 500))
    while not any(output.token_id is not None for output in engine.step()):
        pass  # a prompt that is given up earlier leaves what has been read of it, which depends on time
    assert engine.cancel(given_up) is not None
    found += [ask(engine, Request(DOCUMENT[:2000], 12)), engine.end_session("one"), ask(engine, Request(DOCUMENT, 12))]
    usage = engine.cache_usage
    return [*found, usage.reuse, usage.extents_kept, usage.extents_free, usage.host_extent_bytes, usage.host_rows]


@pytest.mark.parametrize("method", REUSING)
def test_two_ranks_reuse_what_one_reuses(method: str, build: Build) -> None:
    found = []
    for directory in build(method, *POOL, *method_flags(method, CASES[method].sparse)):
        with loaded(directory) as engine:
            found.append(conversation(engine))
            counts = engine.cache_usage.reuse
            assert counts.reused_tokens > 4000
            assert counts.evicted_extents > 0
            assert counts.discarded_extents > 0
    assert found[0] == found[1]


def test_the_rest_of_a_prompt_is_read_sparsely_by_two_ranks_too(build: Build) -> None:
    found = []
    flags = method_flags("nested", CASES["nested"].sparse)
    for directory in build("nested", *POOL, "--cache.cached_prefill", "sparse", *flags):
        with loaded(directory) as engine:
            found.append(conversation(engine))
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["nested", "clusterkv", "prkv"])
def test_random_requests_in_company(method: str, build: Build) -> None:
    """Shared prompts, cancellations and sessions in a short pool; each step compares what the ranks hold where."""
    flags = method_flags(method, CASES[method].everything)
    alone, several = build(method, *POOL, *flags)
    chance, answers, ended = random.Random(7), dict[int, list[int]](), set[int]()
    requests = dict[int, Request]()
    with loaded(several) as engine:
        for _ in range(110):
            action = chance.random()
            if action < 0.25 and len(requests) - len(ended) < 5:
                prompt = DOCUMENT[: chance.choice((900, 1100, 2060))] + (chance.randrange(3, 6),) * chance.choice(
                    (1, 40)
                )
                session = Session(chance.choice("ab")) if chance.random() < 0.3 else None
                request = Request(prompt, chance.choice((1, 8, 30)), session=session)
                number = engine.submit(request)
                requests[number], answers[number] = request, []
                continue
            alive = sorted(set(requests) - ended)
            outputs = [engine.cancel(chance.choice(alive))] if action < 0.3 and alive else engine.step()
            if action > 0.98:
                engine.end_session("a")
            for output in outputs:
                assert output is not None
                if output.token_id is not None:
                    answers[output.request_id].append(output.token_id)
                if output.finish_reason is not None:
                    assert output.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED), output.error
                    ended.add(output.request_id)
        for output in run_to_end(engine):
            if output.token_id is not None:
                answers[output.request_id].append(output.token_id)
        usage = engine.cache_usage
        assert usage.extents_used == 0
        assert usage.reuse.reused_tokens > 0
    with loaded(alone) as engine:
        for number, request in requests.items():
            fresh = dataclasses.replace(request, session=None, cache_salt=str(number))
            assert answers[number] == engine.generate([fresh])[0][: len(answers[number])]
            assert number in ended or len(answers[number]) == request.max_tokens


@pytest.mark.parametrize("method", ["prkv"])
def test_requests_of_two_ranks_make_room_for_each_other(method: str, build: Build) -> None:
    """Requests grow, are preempted and go on: with rows that are kept, and computed again."""
    (_, large), (_, small) = (build(method, *pool, *method_flags(method, CASES[method].sparse)) for pool in ((), POOL))
    found, counts = [], []
    for directory, share in ((large, 0.0), (large, 0.1), (small, 0.0)):
        with loaded(directory) as engine:
            answers, preemptions = preemption.ask(engine, preemption.REQUESTS[:4], share)
            found.append(answers)
            counts.append(sum(preemptions))
    assert found[0] == found[1] == found[2]
    assert counts[0] == 0 < min(counts[1:])


@pytest.mark.parametrize("difference", ["free", "kept"])
def test_ranks_that_would_give_other_extents_away_end_the_engine(difference: str, build: Build) -> None:
    _, directory = build("full", *POOL)
    with loaded(directory) as engine:
        ask(engine, Request(DOCUMENT, 3))
        extents = engine._cache.extents
        if difference == "free":
            extents._free.reverse()
        else:
            extents._kept.pop()
        engine.submit(Request((5, 6, 7), 3))
        with pytest.raises(RankError, match="rank 1: RuntimeError: checksum of the cache's state = "):
            run_to_end(engine)


def test_a_share_of_the_budget_is_each_ranks(build: Build) -> None:
    found = []
    for directory in build("full", "--cache.reuse_host_bytes", str(2 * EXTENT_BYTES)):
        with loaded(directory) as engine:
            ask(engine, Request(DOCUMENT, 3))
            found.append((engine.cache_usage.extents_kept, engine.cache_usage.reuse))
    assert found[0] == found[1]
    assert found[0][0] == 2


def test_ranks_keep_nothing_on_disk(build: Build, tmp_path: Path) -> None:
    _, directory = build("full", *POOL)
    with pytest.raises(ConfigError, match=r"disk_dir = '.*': must be left out with tp_size = 2"):
        Engine.load(directory, disk=DiskSettings(tmp_path))
