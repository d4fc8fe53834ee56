"""Log probabilities and logits of prompts, and the logits of generated tokens, against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.device_stand_ins import make_decoder
from tests.support.prefill import run_to_end
from torch import Tensor

from kvseek.core.errors import RequestError
from kvseek.core.request import FinishReason, LogProbs, Request, SamplingConfig, StepOutput
from kvseek.engine.engine import Engine
from kvseek.engine.model import prefill
from kvseek.engine.schedule.sequence import PromptScores

WINDOW = ("--cache.sink", "4", "--cache.local", "60", "--cache.update", "8", "--cache.full_threshold", "40")
LIMITS = ("--max_batch_size", "5", "--max_seq_len", "600", "--max_input_len", "500", "--prefill_chunk_tokens", "150")
NUMBERS = torch.arange(400).mul(7).remainder(100).tolist()
VOCABULARY = 384
MAX_DIFFERENCE = 2e-4
ALL = SamplingConfig(prompt_logprobs=3, return_context_logits=True, return_generation_logits=True)


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("llama")


@pytest.fixture(scope="module")
def directory(model: Path, build_engine: BuildEngine) -> Path:
    return build_engine(model, "flat", *WINDOW, *LIMITS, "--flat.top_k", "12", "--kernels", "reference")


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(params=[7, 10_000])
def rows_at_once(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Most rows of logits that one unit computes: prompts in one piece and in several."""
    monkeypatch.setattr(prefill, "PIECE_LOGITS", request.param * VOCABULARY)
    return int(request.param)


@torch.inference_mode()
def expected_logits(reference: Any, ids: list[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


def logits_in(parts: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(parts), np.float32).reshape(-1, VOCABULARY).copy())


def check_prompt(outputs: list[StepOutput], prompt: list[int], expected: Tensor) -> None:
    found = logits_in([output.context_logits for output in outputs])
    assert found.shape == (len(prompt), VOCABULARY)
    assert (found - expected).abs().max() <= MAX_DIFFERENCE
    told = [each for output in outputs for each in output.prompt_logprobs]
    check_logprobs(told, prompt, expected)


def check_logprobs(told: list[LogProbs], prompt: list[int], expected: Tensor) -> None:
    values = expected.log_softmax(dim=1)
    assert len(told) == len(prompt) - 1, "nothing precedes the first token"
    for position, each in enumerate(told):
        assert each.token == pytest.approx(float(values[position, prompt[position + 1]]), abs=MAX_DIFFERENCE)
        assert [value for _, value in each.top] == pytest.approx(values[position].topk(3).values.tolist(), abs=1e-3)
        assert [float(values[position, token]) for token, _ in each.top] == pytest.approx(
            [value for _, value in each.top], abs=MAX_DIFFERENCE
        )


def of(outputs: list[StepOutput], request_id: int) -> list[StepOutput]:
    return [output for output in outputs if output.request_id == request_id]


@pytest.mark.parametrize("tokens", [1, 40, 400], ids=["one token", "one chunk", "three chunks"])
def test_logits_and_log_probabilities_of_a_prompt(
    tokens: int, directory: Path, reference: Any, rows_at_once: int
) -> None:
    """Also beyond the window, where the generated tokens attend to few rows: prompts are read densely."""
    engine, prompt = Engine.load(directory), NUMBERS[:tokens]
    engine.submit(Request(tuple(prompt), 4, ALL))
    outputs = run_to_end(engine)
    check_prompt(outputs, prompt, expected_logits(reference, prompt))
    pieces = [output for output in outputs if output.context_logits]
    assert max(len(piece.context_logits) for piece in pieces) <= 4 * VOCABULARY * rows_at_once
    assert all(piece.token_id is None for piece in pieces)
    progress = [output.prefill_progress for output in outputs]
    assert progress == sorted(progress)
    drawn = [output.token_id for output in outputs if output.token_id is not None]
    assert len(drawn) == 4
    assert drawn == logits_in([output.generation_logits for output in outputs]).argmax(dim=1).tolist()


def test_generation_logits_are_those_before_penalties(directory: Path, reference: Any) -> None:
    engine, prompt = Engine.load(directory), NUMBERS[:20]
    params = SamplingConfig(return_generation_logits=True, logit_bias=((7, 100.0),), temperature=1.0)
    engine.submit(Request(tuple(prompt), 3, params))
    outputs = run_to_end(engine)
    assert [output.token_id for output in outputs if output.token_id is not None] == [7, 7, 7]
    expected = expected_logits(reference, [*prompt, 7, 7])[-3:]
    assert (logits_in([output.generation_logits for output in outputs]) - expected).abs().max() <= MAX_DIFFERENCE
    assert not any(output.context_logits or output.prompt_logprobs for output in outputs)


@pytest.mark.usefixtures("rows_at_once")
def test_packed_prompts_have_their_own(directory: Path, reference: Any) -> None:
    """One of them asks for nothing, another for log probabilities alone."""
    engine = Engine.load(directory)
    prompts = [NUMBERS[:40], NUMBERS[5:6], NUMBERS[9:70], NUMBERS[50:70]]
    asked = [ALL, ALL, SamplingConfig(), SamplingConfig(prompt_logprobs=3)]
    ids = [engine.submit(Request(tuple(p), 2, own)) for p, own in zip(prompts, asked, strict=True)]
    outputs = engine.step()
    while not any(output.token_id is not None for output in outputs):
        outputs += engine.step()
    first = {output.request_id for output in outputs if output.token_id is not None}
    assert first == set(ids), "one pack"
    outputs += run_to_end(engine)
    for number in (0, 1):
        check_prompt(of(outputs, ids[number]), prompts[number], expected_logits(reference, prompts[number]))
    assert not any(o.context_logits or o.prompt_logprobs for o in of(outputs, ids[2]))
    told = [each for output in of(outputs, ids[3]) for each in output.prompt_logprobs]
    check_logprobs(told, prompts[3], expected_logits(reference, prompts[3]))
    assert not any(output.context_logits for output in of(outputs, ids[3]))


@pytest.mark.usefixtures("rows_at_once")
def test_beside_a_stream(directory: Path, reference: Any) -> None:
    engine = Engine.load(directory)
    engine.submit(Request(tuple(NUMBERS[:30]), 200))
    for _ in range(8):
        engine.step()
    long, short = (engine.submit(Request(tuple(NUMBERS[:n]), 1, ALL)) for n in (300, 50))
    outputs = run_to_end(engine)
    for request_id, tokens in ((long, 300), (short, 50)):
        prompt = NUMBERS[:tokens]
        check_prompt(of(outputs, request_id), prompt, expected_logits(reference, prompt))


def test_the_gpus_model_gives_the_same(directory: Path, reference: Any) -> None:
    """KernelModel, with PyTorch in place of its kernels."""
    decoder: Any = make_decoder(directory)
    prompts, found = {3: NUMBERS[:40], 0: NUMBERS[5:6], 4: NUMBERS[9:70]}, dict[int, list[Tensor]]()
    for slot, prompt in prompts.items():
        decoder.cache.open(slot, len(prompt) + 1)
        found[slot] = []

    def taker(slot: int) -> Any:
        def take(start: int, logits: Tensor) -> None:
            assert start == sum(part.shape[0] for part in found[slot])
            found[slot].append(logits)

        return take

    read = decoder.prefill(list(prompts.items()), {slot: taker(slot) for slot in (3, 4)})
    while read.progress < 1:
        read.advance(150)
    read.finish()
    assert found[0] == []
    for slot in (3, 4):
        assert (torch.cat(found[slot]) - expected_logits(reference, prompts[slot])).abs().max() <= MAX_DIFFERENCE


@pytest.mark.usefixtures("rows_at_once")
def test_nothing_is_generated_with_max_tokens_0(directory: Path, reference: Any) -> None:
    engine, prompt = Engine.load(directory), NUMBERS[:500]
    (request_id,) = [engine.submit(Request(tuple(prompt), 0, ALL))]
    outputs = run_to_end(engine)
    check_prompt(outputs, prompt, expected_logits(reference, prompt))
    assert [output.token_id for output in outputs if output.token_id is not None] == []
    assert (outputs[-1].request_id, outputs[-1].finish_reason) == (request_id, FinishReason.LENGTH)
    assert engine._cache.extents.used == 0


@pytest.mark.usefixtures("rows_at_once")
def test_a_pack_that_failed_is_told_once(directory: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt's logits are not finite: it ends with an error, and those that have begun go on where they were."""
    engine, take = Engine.load(directory), PromptScores.take
    prompts = [NUMBERS[:30], NUMBERS[3:20], NUMBERS[7:40]]

    def spoilt(self: PromptScores, start: int, logits: Tensor) -> None:
        take(self, start, logits * torch.nan if self._ids == tuple(prompts[1]) else logits)

    monkeypatch.setattr(PromptScores, "take", spoilt)
    ids = [engine.submit(Request(tuple(prompt), 2, ALL)) for prompt in prompts]
    outputs = run_to_end(engine)
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    assert ends[ids[1]].finish_reason is FinishReason.ERROR
    assert "logits: the largest is not finite" in ends[ids[1]].error
    for number in (0, 2):
        assert ends[ids[number]].finish_reason is FinishReason.LENGTH
        check_prompt(of(outputs, ids[number]), prompts[number], expected_logits(reference, prompts[number]))


@pytest.mark.usefixtures("rows_at_once")
def test_a_request_that_is_cancelled_while_it_is_scored_leaves_the_others(directory: Path, reference: Any) -> None:
    engine = Engine.load(directory, max_num_tokens=100)
    prompts = [NUMBERS[:45], NUMBERS[3:48]]
    ids = [engine.submit(Request(tuple(prompt), 2, ALL)) for prompt in prompts]
    outputs = engine.step()
    cancelled = engine.cancel(ids[0])
    assert cancelled is None or cancelled.finish_reason is FinishReason.CANCELLED
    outputs += run_to_end(engine)
    check_prompt(of(outputs, ids[1]), prompts[1], expected_logits(reference, prompts[1]))


def test_the_end_token_has_log_probabilities_and_no_logits(directory: Path) -> None:
    engine = Engine.load(directory)
    (greedy,) = engine.generate([Request(tuple(NUMBERS[:9]), 1)])
    params = SamplingConfig(logprobs=0, return_generation_logits=True)
    engine.submit(Request(tuple(NUMBERS[:9]), 5, params, end_ids=tuple(greedy)))
    last = run_to_end(engine)[-1]
    assert (last.finish_reason, last.token_id, last.end_id) == (FinishReason.END_ID, None, greedy[0])
    assert last.logprobs is not None
    assert last.generation_logits == b""


def test_what_plans_do_not_compute_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(directory)
    monkeypatch.setattr(type(engine.decoder.model), "scores_prompts", False)
    for params in (SamplingConfig(prompt_logprobs=0), SamplingConfig(return_context_logits=True)):
        with pytest.raises(RequestError, match=r"(prompt_logprobs|return_context_logits): an engine of runtime"):
            engine.submit(Request((1, 2), 1, params))
    engine.submit(Request((1, 2), 1, SamplingConfig(return_generation_logits=True)))
    with pytest.raises(RequestError, match=r"prompt_logprobs = 21: must be in \[0, 20\]"):
        SamplingConfig(prompt_logprobs=21)
