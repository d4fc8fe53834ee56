"""The engine: how requests begin, share the machine and end, and what it reports about them."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.prefill import run_to_end
from tests.support.random_models import save_random_model
from torch.multiprocessing.reductions import StorageWeakRef

from kvseek.core.config import read_config
from kvseek.core.errors import CapacityError, QueueFullError, RequestError
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine.cache.memory_layout import layer_extent_bytes
from kvseek.engine.engine import Engine
from kvseek.engine.model import prefill as prefill_module
from kvseek.engine.retrieval import Retrieval

PROMPT = tuple(i * 13 % 101 for i in range(120))
WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("llama")
    limits = ("--max_batch_size", "2", "--max_seq_len", "400", "--max_input_len", "300", "--prefill_chunk_tokens", "64")
    return build_engine(model, "pariskv", *WINDOW, *limits, "--pariskv.top_k", "20")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return Engine.load(directory)


def test_a_request_from_start_to_end(engine: Engine) -> None:
    request_id = engine.submit(Request(PROMPT, 30))
    outputs = run_to_end(engine)
    assert {output.request_id for output in outputs} == {request_id}
    progress = [output.prefill_progress for output in outputs if output.token_id is None]
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    tokens = [output for output in outputs if output.token_id is not None]
    assert len(tokens) == 30
    last = tokens[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.cached_tokens == 120 + 29, "the last token drawn is not cached yet"
    assert 20 + 4 + 16 <= last.attended_tokens <= 20 + 4 + 16 + 8
    assert (last.statistics.prompt_tokens, last.statistics.generated_tokens) == (120, 30)
    assert last.statistics.ttft_seconds > 0
    assert last.statistics.tpot_seconds > 0
    assert 0.2 < last.statistics.attended_share < 0.5


def test_a_stop_word_ends_with_the_word(engine: Engine) -> None:
    (tokens,) = engine.generate([Request(PROMPT, 30)])
    word = tuple(tokens[9:12])
    engine.submit(Request(PROMPT, 30, stop_words=((99, 98, 97), word)))
    outputs = run_to_end(engine)
    found = [o.token_id for o in outputs if o.token_id is not None]
    assert tuple(found[-3:]) == word
    assert len(found) <= 12
    assert outputs[-1].finish_reason is FinishReason.STOP_WORD


@pytest.mark.parametrize("end", ["length", "end_id", "stop_word", "cancelled", "error"])
def test_tokens_that_nobody_watches_come_with_the_end(
    end: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tokens,) = engine.generate([Request(PROMPT, 30)])
    ends = (tokens[11],) if end == "end_id" else ()
    request = Request(PROMPT, 30, end_ids=ends, stop_words=(tuple(tokens[9:12]),) if end == "stop_word" else ())
    sequence = engine.prepare(request)
    engine.enqueue(sequence, whole=True)
    outputs = list[StepOutput]()
    while engine.has_work:
        outputs += engine.step()
        if len(sequence.generated) == 12 and end == "cancelled":
            outputs.append(engine.cancel(sequence.request_id))
        elif len(sequence.generated) == 12 and end == "error":
            monkeypatch.setattr(engine.decoder, "launch", lambda *step: 1 // 0)
    (last,) = outputs
    assert last.finish_reason == end
    given = [*last.earlier, *([] if last.token_id is None else [last.token_id])]
    first = tokens.index(tokens[11]) if end == "end_id" else 30 if end == "length" else 12
    assert given == tokens[:first]
    assert last.statistics.generated_tokens == first + (end == "end_id")
    assert last.statistics.cached_token_steps == sum(range(121, 120 + last.statistics.generated_tokens))


def test_what_comes_with_each_token_comes_with_it(engine: Engine) -> None:
    engine.enqueue(engine.prepare(Request(PROMPT, 5, SamplingConfig(logprobs=0))), whole=True)
    found = [output for output in run_to_end(engine) if output.logprobs is not None]
    assert len(found) == 5
    assert not found[-1].earlier


def test_decoding_goes_on_during_a_prefill(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = itertools.count()  # how much a step reads depends on the time that reading took
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments) * 1e-4)
    engine = Engine.load(directory)
    first = engine.submit(Request(PROMPT[:10], 390))
    while not any(output.token_id is not None for output in engine.step()):
        pass
    second = engine.submit(Request(PROMPT * 2, 2))
    steps_that_read = 0
    while steps_that_read < 4:  # others measure how long a step without reading takes
        outputs = engine.step()
        assert any(output.request_id == first and output.token_id is not None for output in outputs)
        steps_that_read += any(output.request_id == second and output.prefill_progress < 1 for output in outputs)
    assert all(output.request_id != second or output.token_id is None for output in outputs)
    run_to_end(engine)


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_cancelling_frees_what_a_request_held(engine: Engine, steps: int) -> None:
    expected = engine.generate([Request(PROMPT, 10)])
    other = engine.submit(Request(PROMPT, 10))
    cancelled = engine.submit(Request(PROMPT[5:], 50))
    outputs = [output for _ in range(steps) for output in engine.step()]
    end = engine.cancel(cancelled)
    assert end.finish_reason is FinishReason.CANCELLED
    assert engine.cancel(cancelled) is None
    outputs += run_to_end(engine)
    assert [[o.token_id for o in outputs if o.request_id == other and o.token_id is not None]] == expected
    assert engine._cache.extents.used == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 5), "input_ids = '0 tokens': must be at least one token"),
        (Request((1,) * 301, 5), "input_ids = '301 tokens': must be <= max_input_len = 300"),
        (Request((1,), 0), r"max_tokens = 0: must be >= 1"),
        (Request((1,) * 300, 101), r"max_tokens = 101: must be <= max_seq_len = 400"),
        (Request((1, 5000), 5), "input_ids = 5000: must be in [0, "),
        (Request((-1,), 5), "input_ids = -1: must be in [0, "),
        (Request((1,), 5, end_ids=(-3,)), "end_id = -3: must be in [0, "),
        (Request((1,), 5, stop_words=((1, 99999),)), "stop_words_list = 99999: must be in [0, "),
        (Request((1,), 5, timeout_seconds=0.0), "timeout = 0.0: must be > 0 and <= 604800 s, a week; leave it out"),
        (Request((1,), 5, timeout_seconds=1e10), "timeout = 10000000000.0: must be > 0 and <= 604800 s"),
        (Request((1,), 5, timeout_seconds=float("nan")), "timeout = nan: must be > 0 and <= 604800 s"),
    ],
)
def test_bad_requests_name_field_and_limit(engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit(request_)
    assert message in str(caught.value)
    assert not engine.has_work


def test_a_request_that_never_fits_is_refused_with_the_numbers(tmp_path: Path, build_engine: BuildEngine) -> None:
    model = save_random_model(tmp_path / "model", "llama", max_position_embeddings=2048)
    flags = (*WINDOW, "--max_seq_len", "2048", "--max_input_len", "2000")
    config = read_config(build_engine(model, "full", *flags))
    extent = config.model.num_layers * layer_extent_bytes(config, torch.float32)
    engine = Engine.load(build_engine(model, "full", "--cache.kv_cache_host_memory_bytes", str(extent), *flags))
    refusal = (
        "max_tokens = 40: needs 2 extents of the row pool together with the prompt of 1500 tokens, it has 1; shorten"
    )
    with pytest.raises(CapacityError, match=refusal):
        engine.submit(Request((1,) * 1500, 40))
    assert len(engine.generate([Request((1,) * 15, 5)])[0]) == 5, "a request that stays in the window needs no extent"
    (tokens,) = engine.generate([Request((1,) * 1000, 1048, max_tokens_by_default=True)])
    assert len(tokens) == engine._cache.most_tokens(1) - 1000 < 100, "a default is what there is room for"
    whole = Request((1,) * 2000, 0, SamplingConfig(prompt_logprobs=0), max_tokens_by_default=True)
    assert engine.fitted(whole).max_tokens == 0, "a prompt that is only scored draws nothing"
    with pytest.raises(CapacityError, match="needs 2 extents"):
        engine.submit(Request((1,) * 1000, len(tokens) + 1))


def test_slots_without_extents_are_no_room_in_the_queue(tmp_path: Path, build_engine: BuildEngine) -> None:
    """Slots count as room while the queue's head can get one, and not while it waits for extents."""
    model = save_random_model(tmp_path / "model", "llama")
    engine = Engine.load(build_engine(model, "full", *WINDOW, "--max_batch_size", "4"), max_queue_size=2)
    while engine._cache.extents.free > 1:
        engine._cache.extents._free.pop()
    running = engine.submit(Request(PROMPT, 20))
    waiting = [engine.submit(Request(PROMPT, 20))]
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)
    waiting.append(engine.submit(Request(PROMPT, 20)))
    with pytest.raises(QueueFullError, match="2 requests wait for a slot"):
        engine.submit(Request(PROMPT, 20))
    for request in waiting:
        engine.cancel(request)
    engine.cancel(running)
    for _ in range(6):  # there is nobody else: four slots, and room for two that wait
        engine.submit(Request(PROMPT, 2))
    with pytest.raises(QueueFullError, match="2 requests wait for a slot"):
        engine.submit(Request(PROMPT, 2))
    assert len([o for o in run_to_end(engine) if o.finish_reason is FinishReason.LENGTH]) == 6


def test_a_prefill_keeps_no_more_than_it_needs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that the index does not want, and a layer's keys and values, are gone before the next are made."""
    decoder: Any = engine.decoder
    unwanted: list[StorageWeakRef] = []
    rows: list[StorageWeakRef] = []
    stored: list[int] = []
    model, retrieval = decoder.model, decoder.retrieval
    read_chunk, new_rows, store_layer = model.read_chunk, prefill_module.new_rows, retrieval.store_layer

    def chunk(number: int, prompt: object, start: int, stop: int, *arguments: Any) -> torch.Tensor:
        assert all(queries.expired() for queries in unwanted)
        queries: torch.Tensor = read_chunk(number, prompt, start, stop, *arguments)
        if stop <= 240 - 70:
            unwanted.append(StorageWeakRef(queries.untyped_storage()))
        return queries

    def allocate(over: Retrieval, tokens: int) -> torch.Tensor:
        assert all(old.expired() for old in rows[: len(rows) // 2 * 2]), "of the layers before"
        new: torch.Tensor = new_rows(over, tokens)
        rows.append(StorageWeakRef(new.untyped_storage()))
        return new

    def store(number: int, slot: int, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor) -> None:
        stored.append(queries.shape[1])
        store_layer(number, slot, keys, values, queries)

    monkeypatch.setattr(prefill_module, "LAST_QUERIES", 70)
    monkeypatch.setattr(model, "read_chunk", chunk)
    monkeypatch.setattr(prefill_module, "new_rows", allocate)
    monkeypatch.setattr(retrieval, "store_layer", store)
    engine.generate([Request(PROMPT[::-1] * 2, 1)])  # which no other test has read
    layers = engine.config.model.num_layers
    assert len(unwanted) == 2 * layers, "of 240 tokens in chunks of 64, two chunks end before the last 70"
    assert len(rows) == 2 * layers
    assert stored == [70] * layers
