"""What an error inside a step ends: the requests that it concerns, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.prefill import run_to_end

from kvseek.core.errors import CapacityError, ErrorCode
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine.draws.sampling import overflow_remedy
from kvseek.engine.engine import Engine

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
LIMITS = ("--max_batch_size", "2", "--max_seq_len", "400", "--max_input_len", "300", "--prefill_chunk_tokens", "64")
PROMPT = tuple(i * 13 % 101 for i in range(120))


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("llama")
    return build_engine(model, "flat", *WINDOW, *LIMITS, "--flat.top_k", "12")


@pytest.fixture
def engine(directory: Path) -> Engine:
    return Engine.load(directory)


def end_of(outputs: list[StepOutput], request: int) -> StepOutput:
    (end,) = [output for output in outputs if output.request_id == request and output.finish_reason is not None]
    assert [output for output in outputs if output.request_id == request][-1] is end
    return end


def tokens_of(outputs: list[StepOutput], request: int) -> list[int | None]:
    return [output.token_id for output in outputs if output.request_id == request and output.token_id is not None]


def assert_everything_came_back(engine: Engine) -> None:
    assert engine._cache.extents.used == 0
    assert sorted(engine._scheduler._free_slots) == list(range(engine.config.max_batch_size))
    assert engine._cache.tokens == [0] * engine.config.max_batch_size


def failing_once(function: Any, error: Exception, number: int = 1) -> Any:
    """`function`, but its call of this number raises."""
    calls = []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == number:
            raise error
        return function(*arguments)

    return call


@pytest.mark.parametrize("method", ["select", "refresh"])
def test_an_index_that_fails_ends_the_requests_of_the_step(
    method: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests decode; a third waits for a slot. After the failure it gets one, and the tokens that it should."""
    (expected,) = engine.generate([Request(PROMPT[7:], 10)])
    error = RuntimeError("a row is missing")
    index = engine.decoder.retrieval.indexes[1]
    failed, outputs = [engine.submit(Request(PROMPT, 200)), engine.submit(Request(PROMPT[3:], 200))], list[StepOutput]()
    waiting = engine.submit(Request(PROMPT[7:], 10))
    while len(engine._scheduler.decoding()) < 2:
        outputs += engine.step()
    monkeypatch.setattr(index, method, failing_once(getattr(index, method), error, 4))
    outputs += run_to_end(engine)
    for request in failed:
        end = end_of(outputs, request)
        assert (end.finish_reason, end.code) == (FinishReason.ERROR, ErrorCode.INTERNAL)
        assert end.error == "RuntimeError: a row is missing"
    assert tokens_of(outputs, waiting) == expected
    assert_everything_came_back(engine)


def test_a_failing_step_spares_the_prompt_that_is_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = engine.generate([Request(PROMPT * 2, 10)])
    first, outputs = engine.submit(Request(PROMPT, 300 - 20)), list[StepOutput]()
    while not any(output.token_id is not None for output in outputs):
        outputs += engine.step()
    reading = engine.submit(Request(PROMPT * 2, 10))
    while not any(output.request_id == reading and output.prefill_progress < 1 for output in outputs):
        outputs += engine.step()
    index = engine.decoder.retrieval.indexes[0]
    monkeypatch.setattr(index, "select", failing_once(index.select, RuntimeError("lost")))
    outputs += run_to_end(engine)
    assert end_of(outputs, first).finish_reason is FinishReason.ERROR
    assert tokens_of(outputs, reading) == expected
    assert_everything_came_back(engine)


@pytest.mark.parametrize(
    ("owner", "name", "error", "message"),
    [
        ("cache", "open", CapacityError("120 tokens need 1 more extents"), "120 tokens need 1 more extents"),
        ("extents", "_upload", RuntimeError("CUDA error: out of memory"), "RuntimeError: CUDA error: out of memory"),
    ],
)
def test_an_admission_that_fails_ends_alone(
    owner: str, name: str, error: Exception, message: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the scheduler said that it fits."""
    (expected,) = engine.generate([Request(PROMPT, 10)])
    target = {"cache": engine._cache, "extents": engine._cache.extents}[owner]
    monkeypatch.setattr(target, name, failing_once(getattr(target, name), error))
    refused, served = engine.submit(Request(PROMPT, 20)), engine.submit(Request(PROMPT, 10))
    outputs = run_to_end(engine)
    end = end_of(outputs, refused)
    assert (end.finish_reason, end.code, end.error) == (FinishReason.ERROR, ErrorCode.INTERNAL, message)
    assert tokens_of(outputs, served) == expected
    assert_everything_came_back(engine)


@pytest.mark.parametrize(
    "error", [CapacityError("its prefill needs 9 bytes"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")]
)
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_running_out_of_memory_is_no_fault_of_the_client(
    step: str, error: Exception, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder: Any = engine.decoder
    owner, name = (decoder.retrieval, "store_layer") if step == "prefill" else (decoder, "launch")
    monkeypatch.setattr(owner, name, failing_once(getattr(owner, name), error))
    request = engine.submit(Request(PROMPT, 10))
    end = end_of(run_to_end(engine), request)
    assert (end.finish_reason, end.code) == (FinishReason.ERROR, ErrorCode.UNAVAILABLE)
    assert_everything_came_back(engine)


def test_a_step_that_fails_reports_no_upkeep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.submit(Request(PROMPT, 20))
    while not engine.step_report.refresh_seconds:
        engine.step()
    monkeypatch.setattr(engine.decoder, "launch", failing_once(None, RuntimeError("lost")))
    engine.step()
    assert (engine.step_report.decode_batch, engine.step_report.refresh_seconds) == (1, 0.0), (
        "not that of the step before"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("after", ["prefill", "decode"])
def test_logits_that_are_no_numbers_end_their_request(
    after: str, temperature: float, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in the logits of a prompt's last token, or in those of one request of a step."""
    (expected,) = engine.generate([Request(PROMPT[:50], 12)])
    decoder: Any = engine.decoder
    head = decoder.model.head

    class Head:
        def __call__(self, x: torch.Tensor, *, prompt: bool = False) -> torch.Tensor:
            logits: torch.Tensor = head(x, prompt=prompt)
            if after == "decode" and x.shape[0] == 2:
                logits[0] = torch.nan
            if after == "prefill" and decoder.cache.tokens[0] == 70 and x.shape[0] == 1 and not done:
                done.append(True)
                logits[:] = torch.nan
            return logits

    done: list[bool] = []
    monkeypatch.setattr(decoder.model, "head", Head())
    # Long enough to be running still when the other's prompt has been read, however slow the machine is.
    bad = engine.submit(Request(PROMPT[:70], 300, SamplingConfig(temperature=temperature)))
    good = engine.submit(Request(PROMPT[:50], 12))
    outputs = run_to_end(engine)
    end = end_of(outputs, bad)
    assert (end.finish_reason, end.code) == (FinishReason.ERROR, ErrorCode.INTERNAL), "no client can have caused it"
    assert end.error.endswith("must be finite; " + overflow_remedy("float32"))
    assert tokens_of(outputs, good) == expected
    assert_everything_came_back(engine)


def test_a_slot_that_cannot_be_freed_fails_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a CUDA error no call succeeds: requests are not ended one by one as if the next could go on."""
    dead = RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(*arguments: Any) -> Any:
        raise dead

    engine.submit(Request(PROMPT, 20))
    while not engine._scheduler.decoding():
        engine.step()
    monkeypatch.setattr(engine.decoder, "launch", fail)
    monkeypatch.setattr(engine._cache, "close", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        engine.step()


def test_cancelling_and_timing_out_while_prompts_are_read(engine: Engine) -> None:
    """A prompt that ends half-way frees its slot, and the next request in it gets the tokens that it should."""
    (expected,) = engine.generate([Request(PROMPT[5:], 10)])
    first, outputs = engine.submit(Request(PROMPT, 200)), list[StepOutput]()
    while not any(output.token_id is not None for output in outputs):
        outputs += engine.step()
    for limit in (None, 1e-3):
        reading = engine.submit(Request(PROMPT * 2, 10, timeout_seconds=None))
        while not any(output.request_id == reading and output.prefill_progress < 1 for output in outputs):
            outputs += engine.step()
        if limit is None:
            end = engine.cancel(reading)
            assert end.finish_reason is FinishReason.CANCELLED
        else:
            (sequence,) = [one for one in engine._scheduler.running if one.request_id == reading]
            sequence.statistics.submitted_at -= 1000.0
            object.__setattr__(sequence.request, "timeout_seconds", limit)
            outputs += engine.step()
            assert end_of(outputs, reading).finish_reason is FinishReason.TIMEOUT
        late = engine.submit(Request(PROMPT[5:], 10))
        while not any(output.request_id == late and output.finish_reason for output in outputs):
            outputs += engine.step()
        assert tokens_of(outputs, late) == expected
    engine.cancel(first)
    assert_everything_came_back(engine)
