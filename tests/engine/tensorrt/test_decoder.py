"""Decoders over TensorRT's networks, evaluated in NumPy, against the GPU's decoder with PyTorch in place of kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.tensorrt.numpy_plans import FORMS, is_context, make_tensorrt_decoder, plans_of
from tests.support.device_stand_ins import gpu_config, make_decoder
from tests.support.prefill import check_agreement, run_prefill
from tests.support.random_models import ARCHITECTURES
from torch import Tensor

from kvseek.core.config import EngineConfig, TensorRtConfig, read_config
from kvseek.core.errors import KernelError
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.engine.model.activation_memory import decode_bytes, prefill_bytes

api = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13")

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "40")
LIMITS = ("--max_batch_size", "3", "--max_seq_len", "300", "--max_input_len", "200", "--prefill_chunk_tokens", "50")
PROMPT = torch.arange(120).mul(7).remainder(100).tolist()  # three chunks
MAX_DIFFERENCE = 1e-3
Made = tuple[Path, Path]  # checkpoint, and CPU engine


@pytest.fixture(scope="module")
def made(random_model: RandomModel, build_engine: BuildEngine) -> dict[tuple[str, str], Made]:
    """Engines by architecture and method; flat keeps few rows, so that selections matter."""
    engines = {}
    for architecture in ARCHITECTURES:
        model = random_model(architecture)
        for method, flags in (("full", ()), ("flat", ("--flat.top_k", "12"))):
            flags = (*WINDOW, *LIMITS, *flags, "--kernels", "reference")
            engines[architecture, method] = model, build_engine(model, method, *flags)
    return engines


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("architecture", "method", "offload"),
    [("llama", "full", "never"), ("qwen2", "flat", "always"), ("qwen3", "flat", "always")],
)
def test_logits_are_those_of_the_torch_runtime(
    architecture: str,
    method: str,
    offload: str,
    form: str,
    made: dict[tuple[str, str], Made],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, directory = made[architecture, method]
    ours = make_tensorrt_decoder(api, model, directory, form, monkeypatch, offload)
    reference = make_decoder(directory, offload)
    prompts = {0: PROMPT, 2: PROMPT[:25], 1: PROMPT[30:90]}  # one below full_threshold, evictions at different steps
    check_agreement(ours, reference, prompts, 18, room=20, most=MAX_DIFFERENCE)


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_draws_the_same_tokens(
    form: str, made: dict[tuple[str, str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than slots, so that prompts are read beside decode steps; greedy and sampled."""
    model, directory = made["qwen3", "flat"]
    reference = make_decoder(directory)
    decoder = make_tensorrt_decoder(api, model, directory, form, monkeypatch)
    settings = ({}, {"temperature": 0.7, "seed": 3}, {"repetition_penalty": 1.3}, {})
    requests = [Request(tuple(PROMPT[i:]), 10 + i, SamplingConfig(**values)) for i, values in enumerate(settings)]
    tokenizer = Engine.load(directory).tokenizer
    engines = [Engine(one.config, one, tokenizer) for one in (decoder, reference)]
    ours, expected = (engine.generate(requests) for engine in engines)
    assert ours == expected
    assert all(is_context(number) for plan in plans_of(decoder) for number in plan.contexts)
    assert engines[0]._cache.extents.free == engines[0]._cache.extents.capacity


def test_a_plan_without_attention_is_refused(
    made: dict[tuple[str, str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, directory = made["llama", "full"]
    decoder = make_tensorrt_decoder(api, model, directory, "engine", monkeypatch)
    run_prefill(decoder, 0, PROMPT, 8)
    (plan,) = plans_of(decoder)
    monkeypatch.setattr(plan, "run", lambda inputs, outputs, context: None)
    with pytest.raises(KernelError, match=r"attention layers of the plan = \[\]: must be 0 to 2, in order"):
        decoder.decode([5], [0])


@pytest.mark.parametrize("form", FORMS)
def test_padding_stays_within_the_tables(
    form: str, made: dict[tuple[str, str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests run in a bucket of four: the fourth's token and position are 0, whatever ran before."""
    model, directory = made["qwen2", "full"]
    decoder = make_tensorrt_decoder(api, model, directory, form, monkeypatch)
    for slot in range(3):
        run_prefill(decoder, slot, PROMPT[slot:50], 8)
    seen: list[list[list[int]]] = []
    first = plans_of(decoder)[0]
    run = first.run

    def watch(inputs: dict[str, Tensor], outputs: dict[str, Tensor], context: int) -> None:
        seen.append([inputs[name].tolist() for name in ("ids", "positions")])
        run(inputs, outputs, context)

    monkeypatch.setattr(first, "run", watch)
    decoder.decode([9, 8, 7], [0, 1, 2])
    decoder.decode([6], [1])
    assert seen == [[[9, 8, 7, 0], [50, 49, 48, 0]], [[6], [50]]]
    assert first.contexts[-2:] == [4, 1]


def test_work_space_of_plans(made: dict[tuple[str, str], Made]) -> None:
    """What segments keep of a prompt is counted by the token; one plan keeps it in its own work space."""
    config = gpu_config(read_config(made["llama", "full"][1]), "always")
    segments, whole = (
        dataclasses.replace(config, runtime="tensorrt", tensorrt=TensorRtConfig("tensorrt", form)) for form in FORMS
    )

    def per_token(engine: EngineConfig) -> float:
        return (prefill_bytes(engine, torch.bfloat16, 5000) - prefill_bytes(engine, torch.bfloat16, 4000)) / 1000

    rows = 3 * 2 * 64  # a layer's keys and values, and two layers' on their way to the host
    assert per_token(segments) == 2 * (rows + 96 + 192 + 32) + 8  # hidden, attended, cosines and sines; id and position
    assert per_token(whole) == 2 * (rows + 192) + 8  # attention's output
    assert per_token(config) == 2 * (
        rows + 96 + 2 * 2 * 64
    )  # of a prefix the next layer's rows, and as many on their way
    more = decode_bytes(segments, torch.bfloat16) - decode_bytes(config, torch.bfloat16)
    assert more == 4 * 2 * (32 + 2 * 384 - 2 * 96 - 3 * 160)  # float32 logits of four requests, but no MLP
