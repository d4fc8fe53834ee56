"""Packs of short prompts: the logits of prompts that are read alone, and first tokens for all of them at once."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.device_stand_ins import make_decoder
from tests.support.prefill import run_prefill, run_to_end
from tests.support.random_models import ARCHITECTURES, HYBRIDS, MIXTURES, WINDOWS
from torch import Tensor

from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.engine.engine import Engine

WINDOW = ("--cache.sink", "4", "--cache.local", "60", "--cache.update", "8", "--cache.full_threshold", "40")
LIMITS = ("--max_batch_size", "5", "--max_seq_len", "600", "--max_input_len", "500", "--prefill_chunk_tokens", "150")
NUMBERS = torch.arange(400).mul(7).remainder(100).tolist()
PROMPTS = {3: NUMBERS[:40], 0: NUMBERS[5:6], 4: NUMBERS[9:73], 1: NUMBERS[50:70]}  # by slot; 125 tokens
MAX_DIFFERENCE = 2e-4
# A prompt of 64 tokens is long, one of 40 becomes long in the course of the steps, and the others stay short.
LONGROPE = {
    "rope_theta": 10000.0,
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(16)],
    "long_factor": [1.0 + 2 * pair for pair in range(16)],
    "original_max_position_embeddings": 45,
}


@pytest.fixture(scope="module")
def directories(random_model: RandomModel, build_engine: BuildEngine) -> dict[str, Path]:
    built = {}
    biased = random_model("llama", rope_parameters=LONGROPE, mlp_bias=True, attention_bias=True)
    models = {architecture: random_model(architecture) for architecture in (*ARCHITECTURES, *MIXTURES, *HYBRIDS)} | {
        "longrope": biased,
        "windows": random_model("qwen3", **WINDOWS),
        "gemma3": random_model("gemma3"),
    }
    for architecture, model in models.items():
        built[architecture] = build_engine(
            model, "flat", *WINDOW, *LIMITS, "--flat.top_k", "12", "--kernels", "reference"
        )
    return built


def read_pack(decoder: Any, prompts: dict[int, list[int]], dropped: int | None = None) -> dict[int, Tensor]:
    """Logits by slot; one slot is dropped after the first unit."""
    for slot, prompt in prompts.items():
        decoder.cache.open(slot, len(prompt) + 30)
    prefill = decoder.prefill(list(prompts.items()))
    units = 0
    while prefill.progress < 1:
        assert prefill.advance(16) == sum(map(len, prompts.values())), "a pack is one chunk"
        units += 1
        if units == 1 and dropped is not None:
            prefill.drop(dropped)
            decoder.cache.close(dropped)
    assert units == decoder.config.model.num_layers
    return dict(zip(prompts, prefill.finish(), strict=True))


def decode(decoder: Any, slots: list[int]) -> Tensor:
    """Logits of some decode steps, in the course of which tokens leave the window."""
    return torch.stack([decoder.decode([(step * 31 + slot) % 100 for slot in slots], slots)[0] for step in range(20)])


@pytest.mark.parametrize(
    ("architecture", "device"),
    [
        *itertools.product([*ARCHITECTURES, "qwen3_5", "longrope", "windows", "gemma3"], ["cpu", "cuda"]),
        *((mixture, "cpu") for mixture in (*MIXTURES, "qwen3_next", "qwen3_5_moe")),
    ],
)
def test_a_pack_gives_the_logits_of_its_prompts(architecture: str, device: str, directories: dict[str, Path]) -> None:
    """Also of the steps that follow: what the pack left in windows and indexes is that of prompts read alone."""
    directory = directories[architecture]
    ours: Any = make_decoder(directory) if device == "cuda" else Engine.load(directory).decoder
    alone: Any = Engine.load(directory).decoder
    expected = {slot: run_prefill(alone, slot, prompt, 30) for slot, prompt in PROMPTS.items()}
    for slot, logits in read_pack(ours, PROMPTS).items():
        assert (logits - expected[slot]).abs().max() <= MAX_DIFFERENCE
    slots = list(PROMPTS)
    assert (decode(ours, slots) - decode(alone, slots)).abs().max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prompts_beyond_the_window_may_be_packed_too(device: str, directories: dict[str, Path]) -> None:
    """The engine does not, but nothing in a decoder depends on it: rows and index entries are each prompt's own."""
    prompts = {2: NUMBERS[:100], 0: NUMBERS[100:150]}
    directory = directories["qwen3"]
    ours: Any = make_decoder(directory) if device == "cuda" else Engine.load(directory).decoder
    alone: Any = Engine.load(directory).decoder
    expected = {slot: run_prefill(alone, slot, prompt, 30) for slot, prompt in prompts.items()}
    for slot, logits in read_pack(ours, prompts).items():
        assert (logits - expected[slot]).abs().max() <= MAX_DIFFERENCE
    assert (decode(ours, [2, 0]) - decode(alone, [2, 0])).abs().max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("chunk", [16, 48, 150])
def test_chunk_sizes_change_nothing(chunk: int, device: str, directories: dict[str, Path]) -> None:
    decoder: Any = make_decoder(directories["llama"]) if device == "cuda" else Engine.load(directories["llama"]).decoder
    expected = run_prefill(Engine.load(directories["llama"]).decoder, 0, NUMBERS, 1)
    decoder.cache.open(0, 401)
    prefill = decoder.prefill([(0, NUMBERS)])
    sizes = []
    while prefill.progress < 1:
        sizes.append(prefill.advance(chunk if len(sizes) % 3 else 2 * chunk))
    # Units end where chunks of the engine do, too: at 150 and 300 tokens.
    assert sizes[:2] == [min(2 * chunk, 150), min(chunk, 150 - 2 * chunk if 2 * chunk < 150 else 150)]
    assert (prefill.finish()[0] - expected).abs().max() <= MAX_DIFFERENCE


def test_a_prompt_that_leaves_a_pack_writes_nothing_more(directories: dict[str, Path]) -> None:
    decoder: Any = Engine.load(directories["llama"]).decoder
    expected = read_pack(decoder, PROMPTS)
    for slot in PROMPTS:
        decoder.cache.close(slot)
    before = decoder.cache.window[1:, 4].clone()
    found = read_pack(decoder, {**PROMPTS, 4: NUMBERS[100:164]}, dropped=4)
    assert torch.equal(decoder.cache.window[1:, 4], before)
    for slot in (3, 0, 1):
        assert (found[slot] - expected[slot]).abs().max() <= MAX_DIFFERENCE


def first_tokens(outputs: list[StepOutput]) -> set[int]:
    return {output.request_id for output in outputs if output.token_id is not None}


def test_four_short_prompts_get_their_first_tokens_in_one_step(directories: dict[str, Path]) -> None:
    engine = Engine.load(directories["llama"])
    requests = [engine.submit(Request((number, 7), 5)) for number in range(4)]
    assert first_tokens(engine.step()) == set(requests)
    assert engine.step_report.prefill_tokens == 8


def test_short_prompts_are_read_in_one_step_beside_streams_and_a_long_prompt(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = itertools.count()  # what a step reads depends on the time that reading took
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments) * 1e-4)
    engine = Engine.load(directories["llama"], max_num_tokens=400)
    engine.submit(Request(tuple(NUMBERS[:30]), 400))
    for _ in range(8):
        engine.step()
    long = engine.submit(Request(tuple(NUMBERS), 5))
    engine.step()
    short = [engine.submit(Request((number, 7), 5)) for number in range(3)]
    reading, first = [], dict[int, int]()
    for step in range(390):
        outputs = engine.step()
        reading.append(any(output.request_id == long and output.token_id is None for output in outputs))
        first |= {request: step for request in first_tokens(outputs) if request not in first}
        if long in first:
            break
    assert len({first[request] for request in short}) == 1, "one pack"
    assert first[short[0]] <= 2, "one step measures, another reads the long prompt"
    assert first[short[0]] < first[long]
    assert not reading[first[short[0]]], "a step that reads a pack leaves the long prompt alone"
    assert long in first, "the long prompt goes on, once the account is paid"


def test_max_num_tokens_bounds_what_a_step_reads(directories: dict[str, Path]) -> None:
    engine = Engine.load(directories["llama"], max_num_tokens=40)
    engine.submit(Request(tuple(NUMBERS[:120]), 1))
    read = []
    while engine.has_work:
        engine.step()
        read.append(engine.step_report.prefill_tokens)
    assert read == [40, 40, 40]
    with pytest.raises(ValueError, match="max_num_tokens = 0: must be >= 1"):
        Engine.load(directories["llama"], max_num_tokens=0)


def test_a_failing_prompt_ends_alone(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pack that it was in is read again, one prompt at a time."""
    engine = Engine.load(directories["llama"])
    requests = [Request(tuple(NUMBERS[i : 20 + i]), 6) for i in (0, 3, 7)]
    expected = engine.generate(requests)
    decoder: Any = engine.decoder
    index, bad = decoder.retrieval.indexes[1], Request((5,) * 13, 6)
    build = index.build

    def fail_for_one(slot: int, *rest: Any) -> Any:
        if decoder.cache.tokens[slot] == 13:
            raise RuntimeError("an index failed")
        return build(slot, *rest)

    monkeypatch.setattr(index, "build", fail_for_one)
    ids = [engine.submit(request) for request in (*requests[:2], bad, requests[2])]
    outputs = run_to_end(engine)
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    assert [ends[one].finish_reason for one in ids] == [
        FinishReason.ERROR if one == ids[2] else FinishReason.LENGTH for one in ids
    ]
    assert ends[ids[2]].error == "RuntimeError: an index failed"
    found = [[o.token_id for o in outputs if o.request_id == one and o.token_id is not None] for one in ids]
    assert [found[0], found[1], found[3]] == expected
    assert engine._cache.extents.used == 0
    assert sorted(engine._scheduler._free_slots) == list(range(5))
