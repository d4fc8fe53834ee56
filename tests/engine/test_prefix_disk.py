"""Prefixes that outlive their engine on disk: what is found again, what is refused, and that answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_prefix_reuse import LIMITS, ask, may_reuse
from tests.plugins.cases import CASES, method_flags
from tests.support.long_prompts import DOCUMENT, HEADS, SHAPE, SINK, WINDOW, Plain, known_answers
from tests.support.waiting import wait_for

from kvseek import LLM, SamplingParams
from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.engine.loading.prefixes import DiskSettings, check_disk, digest
from kvseek.plugins.registry import METHODS

Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Directory:
    """An engine directory of a method that attends to everything."""
    model = random_model("llama", **SHAPE, **HEADS)

    def make(method: str) -> Path:
        return build_engine(model, method, *WINDOW, *LIMITS, *method_flags(method, CASES[method].everything))

    return make


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_is_not_read_again_after_a_restart(method: str, directory: Directory, tmp_path: Path) -> None:
    plain = known_answers(Engine.load(directory(method)))
    check_restarts(lambda: Engine.load(directory(method), disk=DiskSettings(tmp_path)), plain)


def check_restarts(load: Callable[[], Engine], plain: Plain) -> None:
    """Each engine finds on disk what the one before has read, and answers what one does that keeps nothing."""
    for number, (prompt, reused) in enumerate(
        (
            (DOCUMENT, 0),
            (DOCUMENT + (5,) * 40, len(DOCUMENT)),
            (DOCUMENT + (5,) * 40, len(DOCUMENT) + 39),
            (DOCUMENT[:1500] + (7,) * 40, 1500),  # in the middle of an extent
            (DOCUMENT[: 1024 + SINK] + (9,) * 70, 1024 + SINK),  # at the end of one
        )
    ):
        engine = load()
        ((tokens, statistics),) = ask(engine, request := Request(prompt, 12))
        assert (tokens, statistics.reused_tokens) == (plain(request), may_reuse(engine, prompt, reused)), number
        engine.close()


def test_requests_about_one_document_load_it_once(directory: Directory, tmp_path: Path) -> None:
    engine = Engine.load(directory("pariskv"), disk=DiskSettings(tmp_path))
    ask(engine, Request(DOCUMENT, 2))
    engine.close()
    engine = Engine.load(directory("pariskv"), disk=DiskSettings(tmp_path))
    answers = ask(engine, *(Request(DOCUMENT + (number,) * 9, 5) for number in range(6)))
    assert [statistics.reused_tokens for _, statistics in answers] == [len(DOCUMENT)] * 6
    assert [statistics.shared_extents for _, statistics in answers] == [0] + [2] * 5
    usage = engine.cache_usage
    assert usage.disk.counts.loaded == 3 + 5, "each loads what it will write to itself, the last extent"
    assert usage.reuse.reused_tokens == sum(statistics.reused_tokens for _, statistics in answers)
    engine.close()


def test_what_memory_has_lost_is_loaded_while_others_decode(directory: Directory, tmp_path: Path) -> None:
    engine = Engine.load(directory("nested"), disk=DiskSettings(tmp_path))
    request, plain = Request(DOCUMENT + (5,) * 40, 12), Engine.load(directory("nested"))
    ask(engine, Request(DOCUMENT, 2), Request(DOCUMENT, 2, cache_salt="other"))
    wait_for(lambda: not engine.cache_usage.disk.waiting)
    engine._prefixes._evict(engine._cache.extents.capacity)
    salted = Request(DOCUMENT + (5,) * 40, 12, cache_salt="a third")
    running = Request(DOCUMENT[:100], 200)
    (own, _), (tokens, statistics), (same, fresh) = ask(engine, running, request, salted)
    assert [own, tokens, same] == [plain.generate([one])[0] for one in (running, request, request)]
    assert (statistics.reused_tokens, fresh.reused_tokens) == (len(DOCUMENT), 0)
    engine.close()


def test_a_cancelled_request_leaves_its_extents(directory: Directory, tmp_path: Path) -> None:
    engine = Engine.load(directory("full"), disk=DiskSettings(tmp_path))
    ask(engine, Request(DOCUMENT, 2))
    wait_for(lambda: not engine.cache_usage.disk.waiting)
    engine._prefixes._evict(engine._cache.extents.capacity)
    with engine._prefixes.store._pool:  # nothing can be loaded meanwhile
        number = engine.submit(Request(DOCUMENT, 2))
        for _ in range(3):
            engine.step()
        assert engine._prefixes.loads(0)
    engine.cancel(number)
    usage = engine.cache_usage
    assert (usage.extents_used, usage.extents_kept) == (0, 0)
    ((_, statistics),) = ask(engine, Request(DOCUMENT, 2))
    assert statistics.reused_tokens == len(DOCUMENT) - 1
    engine.close()


def test_engines_of_other_rows_share_nothing(directory: Directory, tmp_path: Path) -> None:
    for method in ("full", "pariskv"):
        engine = Engine.load(directory(method), disk=DiskSettings(tmp_path))
        ((_, statistics),) = ask(engine, Request(DOCUMENT, 2))
        assert statistics.reused_tokens == 0
        engine.close()
    assert len(list(tmp_path.iterdir())) == 2
    config = read_config(directory("full"))
    engine_dir = directory("full")
    same = [replace(config, max_batch_size=1), replace(config, cache=replace(config.cache, reuse_host_bytes=1 << 30))]
    others = [replace(config, dtype="bfloat16"), replace(config, cache=replace(config.cache, local=17))]
    assert {digest(engine_dir, one) for one in same} == {digest(engine_dir, config)}
    assert digest(engine_dir, config) not in {digest(engine_dir, one) for one in others}


def test_the_python_api_finds_what_another_process_has_read(directory: Directory, tmp_path: Path) -> None:
    for reused in (0, len(DOCUMENT)):
        with LLM(directory("pariskv"), disk_dir=tmp_path / "prefixes", disk_bytes=1 << 24) as llm:
            (output,) = llm.generate([list(DOCUMENT) + [reused % 300 + 3] * 70], SamplingParams(max_tokens=2))
            assert output.reused_tokens == reused
            with pytest.raises(ConfigError, match=r"disk_dir = .* is in use by another process"):
                LLM(directory("pariskv"), disk_dir=tmp_path / "prefixes")


def test_what_cannot_be_is_refused_by_name(directory: Directory, tmp_path: Path) -> None:
    engine_dir, config = directory("full"), read_config(directory("full"))
    with pytest.raises(ConfigError, match="disk_bytes = 5: must be left out without disk_dir"):
        DiskSettings(None, 5)
    with pytest.raises(ConfigError, match="disk_bytes = 0: must be > 0"):
        DiskSettings(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"disk_bytes = 5: must be at least \d+, the rows of one extent"):
        Engine.load(engine_dir, disk=DiskSettings(tmp_path, 5))
    unkept = replace(config, cache=replace(config.cache, reuse=False))
    why = "the engine was built with {} = {}: leave it out, or build with --{} {}"
    for config_of, causes in (
        (unkept, ("cache.reuse", "False", "cache.reuse", "true")),
        (
            replace(config, device="cuda", kernels="native", runtime="tensorrt"),
            ("runtime", "'tensorrt'", "runtime", "torch"),
        ),
    ):
        with pytest.raises(ConfigError, match=f"disk_dir = .* keeps no prefixes; {why.format(*causes)}"):
            check_disk(config_of, DiskSettings(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_closing_waits_for_what_is_to_be_written(directory: Directory, tmp_path: Path) -> None:
    engine = Engine.load(directory("full"), disk=DiskSettings(tmp_path))
    store = engine._prefixes.store
    assert store is not None
    ask(engine, Request(DOCUMENT, 2))
    engine.close()
    engine.close()
    assert (store.usage().files, store.usage().waiting) == (3, 0)
