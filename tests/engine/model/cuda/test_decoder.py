"""The GPU's decoder on the CPU: PyTorch stands in for its kernels, and the CPU's decoder says what is right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.device_stand_ins import CPU, make_decoder
from tests.support.prefill import check_agreement, run_prefill, run_to_end
from tests.support.random_models import ARCHITECTURES
from torch import Tensor

from kvseek.core.batch import LATEST, Batch, RequestState, bucket_of, buckets_for, pack
from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.model_config import ModelConfig
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine.draws.sampling import NO_TOKEN, Drawn, Launched, Sampler
from kvseek.engine.engine import Engine
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.model.activation_memory import decode_bytes, prefill_bytes, work_bytes
from kvseek.engine.model.cuda.steps import DecodeStep, KernelModel, StepResult
from kvseek.engine.model.library_attention import causal_attention_device
from kvseek.engine.model.reference import causal_attention
from kvseek.engine.row_recorder import Wanted
from kvseek.kernels.cuda.layer.layer import LayerKernels

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "40")
LIMITS = ("--max_batch_size", "3", "--max_seq_len", "400", "--max_input_len", "300", "--prefill_chunk_tokens", "50")
PROMPT = torch.arange(180).mul(7).remainder(100).tolist()
MAX_DIFFERENCE = 2e-4


@pytest.fixture(scope="module")
def directories(random_model: RandomModel, build_engine: BuildEngine) -> dict[tuple[str, str], Path]:
    """CPU engines by architecture and method; flat keeps few rows, so that selections matter."""
    built = {}
    for architecture in (*ARCHITECTURES, "qwen3_5"):
        model = random_model(architecture)
        for method, flags in (("full", ()), ("flat", ("--flat.top_k", "12"))):
            flags = (*WINDOW, *LIMITS, *flags, "--kernels", "reference")
            built[architecture, method] = build_engine(model, method, *flags)
    return built


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen3_5"])
@pytest.mark.parametrize(("method", "offload"), [("full", "always"), ("flat", "never")])
def test_logits_are_those_of_the_cpu(
    architecture: str, method: str, offload: str, directories: dict[tuple[str, str], Path]
) -> None:
    directory = directories[architecture, method]
    ours, reference = make_decoder(directory, offload), Engine.load(directory).decoder
    prompts = {0: PROMPT, 2: PROMPT[:25], 1: PROMPT[30:130]}  # one below full_threshold, evictions at different steps
    check_agreement(ours, reference, prompts, 30, room=40, most=MAX_DIFFERENCE)


def test_requests_get_tokens_and_logits(directories: dict[tuple[str, str], Path]) -> None:
    directory = directories["llama", "flat"]
    ours, twin = make_decoder(directory), make_decoder(directory)
    for decoder in (ours, twin):
        for slot in range(3):
            run_prefill(decoder, slot, PROMPT[slot:], 10)
    sampler = Sampler(Request((1,), 5, SamplingConfig(return_generation_logits=True)), 100)
    launched = ours.launch([5, 6, 7], [0, 1, 2], [None, sampler, None])
    (drawn,) = launched.collect()
    logits, expected_attended = twin.decode([5, 6, 7], [0, 1, 2])
    assert drawn[0] == int(logits[0].argmax())
    assert drawn[1] == Drawn(int(logits[1].argmax()), logits=logits[1].numpy().tobytes())
    assert drawn[2] == int(logits[2].argmax())
    assert launched.attended == expected_attended


@pytest.mark.parametrize(("architecture", "method"), [("llama", "full"), ("llama", "flat"), ("qwen3_5", "flat")])
def test_steps_at_once_are_steps_one_by_one(
    architecture: str, method: str, directories: dict[tuple[str, str], Path]
) -> None:
    """Greedy and drawn tokens, with a penalty that counts those of the steps before; selected rows too."""
    ours, twin = (make_decoder(directories[architecture, method]) for _ in range(2))
    found, read, at_once = [list[list[int]]() for _ in range(2)], [list[list[float]]() for _ in range(2)], set[int]()
    for decoder, own, seen in zip((ours, twin), found, read, strict=True):
        params = SamplingConfig(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=5)
        slots, size = [0, 2, 1], decoder.config.model.vocab_size
        sampler = Sampler(Request((1,), 60, params), size)
        for slot, length in ((0, 180), (1, 30), (2, 70)):
            run_prefill(decoder, slot, PROMPT[:length], 60)
        tokens = [5, 6, 7]
        while len(own) < 40:
            alike = min(decoder.cache.alike_steps(slot) for slot in slots)
            steps = min(alike, 40 - len(own)) if decoder is ours else 1
            at_once.add(steps)
            launched = decoder.launch(tokens, slots, [None, sampler, None], steps=steps)
            drawn = launched.collect()
            sampler.generated += [step[1] for step in drawn]  # type: ignore[misc]
            own += drawn  # type: ignore[arg-type]
            seen += [[count - before for count in launched.attended] for before in reversed(range(steps))]
            tokens = [LATEST] * 3
    assert found[0] == found[1]
    assert read[0] == read[1]
    assert max(at_once) > 2


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_an_engine_draws_the_same_tokens_on_both(architecture: str, directories: dict[tuple[str, str], Path]) -> None:
    directory = directories[architecture, "flat"]
    reference = Engine.load(directory)
    engine = Engine(reference.config, make_decoder(directory), reference.tokenizer)
    requests = [
        Request(tuple(PROMPT[i:]), 20 + i, SamplingConfig(**values))
        for i, values in enumerate(({}, {"temperature": 0.7, "seed": 3}, {"repetition_penalty": 1.3}, {}, {}))
    ]
    assert engine.generate(requests) == reference.generate(requests)
    assert engine.index_bytes_per_token == reference.index_bytes_per_token
    assert engine.index_bytes_per_token == len(engine.config.model.row_layers) * 2 * 32 * 4
    assert engine._cache.extents.used == 0


def test_running_out_of_memory_ends_one_request_with_the_numbers(
    directories: dict[tuple[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directories["llama", "full"]
    reference = Engine.load(directory)
    decoder = make_decoder(directory)
    engine = Engine(reference.config, decoder, reference.tokenizer)
    assert isinstance(decoder.model, KernelModel)
    silu_mul = decoder.model.ops.silu_mul

    def fail_for_long(gate_up: Tensor) -> Tensor:
        if gate_up.shape[0] >= 16:  # a chunk of the long prompt, while the short one decodes
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return silu_mul(gate_up)

    for name, value in (("mem_get_info", (70, 100)), ("memory_reserved", 5), ("memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    short, outputs = engine.submit(Request(tuple(PROMPT[:60]), 12)), list[StepOutput]()
    while not any(output.token_id is not None for output in outputs):
        outputs += engine.step()
    monkeypatch.setattr(decoder.model.ops, "silu_mul", fail_for_long)
    long = engine.submit(Request(tuple(PROMPT[:150]), 12))
    outputs += run_to_end(engine)
    (failed,) = [output for output in outputs if output.request_id == long and output.finish_reason]
    assert failed.finish_reason is FinishReason.ERROR
    need = prefill_bytes(decoder.config, torch.float32, 150)
    assert f"input_ids has 150 tokens: its prefill needs about {need:,} bytes" in failed.error
    assert "72 are free" in failed.error
    tokens = [output.token_id for output in outputs if output.request_id == short and output.token_id is not None]
    assert [tokens] == reference.generate([Request(tuple(PROMPT[:60]), 12)])


def test_buckets() -> None:
    assert buckets_for(1) == (1,)
    assert buckets_for(3) == (1, 2, 4)
    assert buckets_for(4) == (1, 2, 4)
    assert buckets_for(9) == (1, 2, 4, 8, 12)
    assert buckets_for(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    assert [bucket_of(batch) for batch in (1, 2, 3, 4, 5, 17, 64)] == [1, 2, 4, 4, 8, 24, 64]
    with pytest.raises(ConfigError, match="max_batch_size = 65: must be <= 64"):
        buckets_for(65)


def test_a_step_is_padded_to_its_bucket() -> None:
    padding = RequestState(slot=9, sink_rows=1, length=0, dense=True)
    seen: list[list[int]] = []

    def run(batch: Batch) -> StepResult:
        seen.append(batch.column("slot").tolist())
        return StepResult(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int32))

    step = DecodeStep(4, padding, torch.zeros(10, 1, dtype=torch.int32), run)
    step.launch()
    step.load(pack([dataclasses.replace(padding, slot=slot) for slot in (3, 1, 2)]))
    step.launch()
    step.load(pack([dataclasses.replace(padding, slot=5)]))
    step.launch()
    step.load(pack([]))
    step.launch()
    assert seen == [[9, 9, 9, 9], [3, 1, 2, 9], [5, 9, 9, 9], [9, 9, 9, 9]]
    assert step.batch.requests.tolist() == [list(padding.packed())] * 4


@pytest.mark.parametrize(("q", "n"), [(7, 7), (5, 23), (1, 9), (16, 16)])
def test_prefill_attention_of_the_gpu_is_that_of_the_cpu(q: int, n: int) -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(6, q, 16), torch.randn(2, n, 16), torch.randn(2, n, 16)
    found = causal_attention_device(queries, keys, values, 0.25)
    assert found.shape == (q, 6, 16)
    torch.testing.assert_close(found, causal_attention(queries, keys, values, 0.25), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 100, "hidden_size = 100: must be a multiple of 8"),
        ("intermediate_size", 12, "intermediate_size = 12: must be a multiple of 8"),
        ("hidden_size", 16392, "hidden_size = 16392: must be <= 16384"),
    ],
)
def test_sizes_that_the_kernels_lack_are_refused(field: str, value: int, message: str) -> None:
    model = ModelConfig("llama", 16, 64, 64, 2, 2, 1, 32, 1e-5, 1e4, 1024)
    with pytest.raises(ConfigError, match=message):
        LayerKernels(None, dataclasses.replace(model, **{field: value}), torch.float32, CPU, 4)  # type: ignore[arg-type]


def test_kernels_refuse_what_they_would_misread() -> None:
    model = ModelConfig("llama", 16, 64, 64, 2, 2, 1, 32, 1e-5, 1e4, 1024)
    ops = LayerKernels(None, model, torch.float32, CPU, 4)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=r"x: torch.float64 on cpu.*must be contiguous torch.float32"):
        ops.add_rms_norm(torch.zeros(2, 64, dtype=torch.float64), None, torch.ones(64))
    with pytest.raises(KernelError, match=r"gate_up: .*strides \(1, 2\): must be contiguous"):
        ops.silu_mul(torch.zeros(64, 2).T)
    with pytest.raises(KernelError, match="batch = 5: must be <= 4"):
        ops.argmax(torch.zeros(5, 16))


def test_work_space_grows_with_what_it_serves(directories: dict[tuple[str, str], Path]) -> None:
    config = read_config(directories["llama", "full"])
    least = prefill_bytes(config, torch.bfloat16, 1)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, reuse=False))
    # Residual stream; keys and values of a layer, and twice its rows, for each further token beyond a chunk.
    per_token = 2 * (96 + 2 * 64 + 2 * 2 * 64)
    assert prefill_bytes(config, torch.bfloat16, 5000) - prefill_bytes(config, torch.bfloat16, 4000) == 1000 * per_token
    reusing = dataclasses.replace(config, cache=dataclasses.replace(config.cache, reuse=True))
    # Keys and values of the next layer too, and 16 extents of a layer on their way to it.
    more = [
        prefill_bytes(reusing, torch.bfloat16, n) - prefill_bytes(config, torch.bfloat16, n) for n in (40_000, 41_000)
    ]
    assert more == [2 * 2 * 64 * (n + 16 * 1024) for n in (40_000, 41_000)]
    assert least < prefill_bytes(config, torch.bfloat16, 50) < prefill_bytes(config, torch.float32, 50)
    longer = dataclasses.replace(config, max_input_len=400)
    assert work_bytes(longer, torch.bfloat16) > work_bytes(config, torch.bfloat16)
    wider = dataclasses.replace(config, cache=dataclasses.replace(config.cache, update=config.cache.update + 1))
    evicted = 3 * 2 * 32 * 3  # layers, KV heads, D; key, value, and the key once more
    assert decode_bytes(wider, torch.bfloat16) - decode_bytes(config, torch.bfloat16) == 2 * evicted


def test_no_token_is_an_error_of_its_request_alone(
    directories: dict[tuple[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(directories["llama", "full"])
    original = engine.decoder.launch

    def spoil(
        tokens: list[int], slots: list[int], samplers: list[Sampler | None], wanted: Wanted, steps: int
    ) -> Launched:
        launched = original(tokens, slots, samplers, wanted, steps)
        (drawn,) = launched.collect()
        return Launched(
            launched.attended,
            lambda: [[NO_TOKEN if slot == 0 else one for one, slot in zip(drawn, slots, strict=True)]],
        )

    monkeypatch.setattr(engine.decoder, "launch", spoil)
    bad, good = engine.submit(Request(tuple(PROMPT), 5)), engine.submit(Request(tuple(PROMPT[:9]), 5))
    ends = {}
    while engine.has_work:
        ends.update({o.request_id: o for o in engine.step() if o.finish_reason})
    assert ends[bad].finish_reason is FinishReason.ERROR
    assert "logits: the largest is not finite, must be finite" in ends[bad].error
    assert ends[good].finish_reason is FinishReason.LENGTH


def test_a_gpu_engine_without_a_gpu_says_so(directories: dict[tuple[str, str], Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    directory = directories["llama", "full"]
    config = dataclasses.replace(read_config(directory), device="cuda", kernels="native")
    with pytest.raises(KernelError, match="no CUDA device"):
        load_decoder(directory, config)


def test_append_refuses_what_its_kernel_would_misread() -> None:
    model = ModelConfig("llama", 16, 64, 64, 2, 2, 1, 32, 1e-5, 1e4, 1024)
    ops = LayerKernels(None, model, torch.float32, CPU, 4)  # type: ignore[arg-type]
    batch = Batch.of(
        [RequestState(slot=0, sink_rows=1, length=0, dense=True)] * 2, torch.zeros(1, 1, dtype=torch.int32)
    )
    rows, window, memory = torch.zeros(2, 1, 32), torch.zeros(1, 1, 4, 2, 32), torch.zeros(2 * 32 + 1)
    with pytest.raises(
        KernelError, match=r"append: shape of values, .* = \(\(2, 2, 16\), 0\): must be \(\(2, 1, 32\), 0"
    ):
        ops.append(rows, torch.zeros(2, 2, 16), batch, window)
    with pytest.raises(KernelError, match=r"append: shape of keys, bytes beyond .* = \(\(2, 1, 32\), 4\): must be"):
        ops.append(memory[1:].view(2, 1, 32), rows, batch, window)
    with pytest.raises(KernelError, match=r"values: torch.float64 on cpu"):
        ops.append(rows, rows.double(), batch, window)
