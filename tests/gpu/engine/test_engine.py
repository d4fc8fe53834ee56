"""Engines on the GPU against engines on the CPU: logits, tokens, graphs, memory, and what never waits."""

from __future__ import annotations

import copy
import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine
from tests.gpu.waits import no_host_waits
from tests.support.prefill import run_all, run_prefill, run_to_end
from tests.support.random_models import ARCHITECTURES, save_random_model
from torch import Tensor

from kvseek.core.batch import LATEST, Batch, Selection
from kvseek.core.errors import CapacityError
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.core.selected_rows import RowReport
from kvseek.engine import engine as engine_module
from kvseek.engine.draws.sampling import Drawn, Sampler
from kvseek.engine.engine import Engine
from kvseek.engine.loading.indexes import device_retrieval
from kvseek.engine.model.cuda.steps import GraphDecoder, KernelModel
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.retrieval import OPS, Observer
from kvseek.engine.service import EngineService

pytestmark = pytest.mark.gpu

WINDOW = ("--cache.sink", "4", "--cache.local", "32", "--cache.update", "64", "--cache.full_threshold", "40")
LIMITS = ("--max_batch_size", "3", "--max_seq_len", "1000", "--max_input_len", "900", "--prefill_chunk_tokens", "50")
PROMPT = torch.arange(180).mul(7).remainder(100).tolist()
SLOTS = {0: PROMPT, 2: PROMPT[:25], 1: PROMPT[30:130]}  # one below full_threshold, evictions at different steps
STEPS = 40
ON_CPU = ("--kernels", "reference")  # needs no compiler
MAX_DIFFERENCE = 5e-4  # of float32 logits of size 1: sums in another order
TOKENS = [[(step * 31 + slot * 17) % 100 for slot in SLOTS] for step in range(STEPS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random checkpoints; heads of 64 channels where the architecture lets one choose."""
    sizes: dict[str, dict[str, int]] = {
        "llama": {"head_dim": 64},
        "qwen2": {"hidden_size": 384},
        "qwen3": {"head_dim": 64},
    }
    folder = tmp_path_factory.mktemp("models")
    saved = {name: save_random_model(folder / name, name, **sizes[name]) for name in ARCHITECTURES}
    # Of SLOTS, the prompt of 180 tokens is long, that of 100 becomes long during the steps, and that of 25 stays short.
    longrope = {
        "rope_theta": 10000.0,
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(32)],
        "long_factor": [1.0 + 2 * pair for pair in range(32)],
        "original_max_position_embeddings": 110,
    }
    biases = {"attention_bias": True, "mlp_bias": True}
    saved["longrope"] = save_random_model(folder / "longrope", "llama", head_dim=64, rope_parameters=longrope, **biases)
    return saved


def kernel_model(decoder: Decoder) -> KernelModel:
    """The model of a decoder that runs kvseek's kernels."""
    assert isinstance(decoder.model, KernelModel)
    return decoder.model


def eager(engine: Engine, *, hot_rows: bool) -> Decoder:
    """A second decoder over an engine's weights, cache and indexes, without graphs."""
    old, model = engine.decoder, copy.copy(kernel_model(engine.decoder))
    kernels = model.ops._kernels
    model.retrieval = device_retrieval(old.config, old.cache, list(old.retrieval.indexes), kernels, hot_rows=hot_rows)
    return GraphDecoder(model, model.retrieval, graphs=False)


@pytest.mark.parametrize("offload", ["always", "never", "auto"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "longrope"])
def test_dense_logits_are_those_of_the_cpu(
    architecture: str, offload: str, models: dict[str, Path], build_engine: BuildEngine, on_gpu: BuildEngine
) -> None:
    flags = (*WINDOW, *LIMITS)
    expected, expected_attended = run_all(
        Engine.load(build_engine(models[architecture], "full", *flags, *ON_CPU)).decoder, SLOTS, TOKENS
    )
    engine = Engine.load(on_gpu(models[architecture], "full", *flags, "--cache.offload", offload))
    found, attended = run_all(engine.decoder, SLOTS, TOKENS)
    assert (found - expected).abs().max() <= MAX_DIFFERENCE
    assert attended == [pytest.approx(share) for share in expected_attended]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_hot_rows_change_nothing(dtype: str, models: dict[str, Path], on_gpu: BuildEngine) -> None:
    flags = (*WINDOW, *LIMITS, "--pariskv.top_k", "20", "--dtype", dtype, "--cache.offload", "always")
    engine = Engine.load(on_gpu(models["qwen3"], "pariskv", *flags))
    expected, attended = run_all(engine.decoder, SLOTS, TOKENS)
    assert max(attended[-1]) < 0.8 * len(PROMPT), "rows were selected"
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for hot_rows in (True, False):
        found, found_attended = run_all(eager(engine, hot_rows=hot_rows), SLOTS, TOKENS)
        assert (found - expected).abs().max() <= tolerance
        assert found_attended == attended


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_close(
    dtype: str, models: dict[str, Path], build_engine: BuildEngine, on_gpu: BuildEngine
) -> None:
    flags = (*WINDOW, *LIMITS)
    expected, _ = run_all(Engine.load(build_engine(models["qwen3"], "full", *flags, *ON_CPU)).decoder, SLOTS, TOKENS)
    found, _ = run_all(Engine.load(on_gpu(models["qwen3"], "full", *flags, "--dtype", dtype)).decoder, SLOTS, TOKENS)
    error = (found - expected).norm() / expected.norm()
    assert error <= {"bfloat16": 5e-2, "float16": 1e-2}[dtype]


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], on_gpu: BuildEngine) -> Engine:
    flags = (*WINDOW, *LIMITS, "--pariskv.top_k", "20", "--cache.offload", "always", "--cache.reuse", "false")
    return Engine.load(on_gpu(models["llama"], "pariskv", *flags))


def test_greedy_tokens_are_those_of_the_logits(engine: Engine) -> None:
    decoder = engine.decoder
    for slot, prompt in SLOTS.items():
        run_prefill(decoder, slot, prompt, 10)
    params = SamplingConfig(return_generation_logits=True)
    sampler = Sampler(Request((1,), 5, params), engine.config.model.vocab_size)
    (tokens,) = decoder.launch([1, 2, 3], [0, 1, 2], [None, sampler, None]).collect()
    for slot, prompt in SLOTS.items():
        decoder.cache.close(slot)
        run_prefill(decoder, slot, prompt, 10)
    logits, _ = decoder.decode([1, 2, 3], [0, 1, 2])
    assert tokens[0] == int(logits[0].argmax())
    assert isinstance(tokens[1], Drawn)
    assert tokens[1].token == int(logits[1].argmax())
    found = torch.frombuffer(bytearray(tokens[1].logits), dtype=torch.float32)
    torch.testing.assert_close(found, logits[1], rtol=0, atol=1e-5)
    assert tokens[2] == int(logits[2].argmax())
    for slot in SLOTS:
        decoder.cache.close(slot)


def test_selected_rows_are_reported_and_change_nothing(engine: Engine) -> None:
    """Such a step is launched kernel by kernel, where every layer's kernels write to one buffer of rows."""
    (expected,) = engine.generate([Request(tuple(PROMPT), 12)])
    engine.submit(Request(tuple(PROMPT), 12, SamplingConfig(return_selected_rows=RowReport(block=1))))
    outputs = []
    while engine.has_work:
        outputs += [output for output in engine.step() if output.token_id is not None]
    assert [output.token_id for output in outputs] == expected
    assert outputs[0].selected_rows is None
    for output in outputs[1:]:
        rows = output.selected_rows
        assert rows is not None
        assert rows.cached_tokens == output.cached_tokens
        found = [rows.of(layer, head) for layer in rows.layers for head in rows.kv_heads]
        assert all(own is not None and len(own) == 20 and set(own.values()) == {1} for own in found)
        assert all(rows.start <= place < rows.stop for own in found if own for place in own)
        assert len({tuple(own) for own in found if own}) > len(rows.layers), "layers and heads select rows of their own"
    assert engine.generate([Request(tuple(PROMPT), 12)]) == [expected], "graphs replay as before"


def test_running_out_of_memory_ends_one_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = kernel_model(engine.decoder).ops
    (expected,) = engine.generate([Request(tuple(PROMPT[:60]), 30)])
    silu_mul = ops.silu_mul

    def greedy_for_memory(gate_up: Tensor) -> Tensor:
        if gate_up.shape[0] >= 16:  # a chunk of the long prompt, while the short request decodes
            torch.empty(1 << 50, dtype=torch.uint8, device=gate_up.device)
        return silu_mul(gate_up)

    short, outputs = engine.submit(Request(tuple(PROMPT[:60]), 30)), list[StepOutput]()
    while not any(output.token_id is not None for output in outputs):
        outputs += engine.step()
    monkeypatch.setattr(ops, "silu_mul", greedy_for_memory)
    long = engine.submit(Request(tuple(PROMPT[:150]), 12))
    outputs += run_to_end(engine)
    (failed,) = [output for output in outputs if output.request_id == long and output.finish_reason]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error.startswith("input_ids has 150 tokens: its prefill needs about ")
    assert [o.token_id for o in outputs if o.request_id == short and o.token_id is not None] == expected


def test_requests_get_the_same_from_steps_that_run_ahead(
    models: dict[str, Path], on_gpu: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled, with penalties and with log probabilities, ending by their lengths, end tokens and stop words.

    With numbers of 16 bits, as who shares a step with whom differs: in float32 last bits of the logits would differ with it.
    """
    flags = (*WINDOW, *LIMITS, "--pariskv.top_k", "20", "--cache.offload", "always", "--cache.reuse", "false")
    engine = Engine.load(on_gpu(models["llama"], "pariskv", *flags, "--dtype", "bfloat16"))
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    values: list[dict[str, Any]] = [{}, sampled, sampled | {"repetition_penalty": 1.3, "frequency_penalty": 0.2}]
    values += [sampled | {"logprobs": 3, "min_tokens": 4}, {"logprobs": 2}, sampled | {"bad_words": ((5,), (7, 9))}]
    ends, stops = tuple(range(3, 100, 9)), tuple((token,) for token in range(4, 100, 9))
    requests = [
        Request(
            tuple(PROMPT[number:]), 40, SamplingConfig(**params), ends * (number % 3 == 1), stops * (number % 3 == 2)
        )
        for number, params in enumerate(values * 3)
    ]
    found = list[list[Any]]()
    for ahead in (True, False):
        monkeypatch.setattr(GraphDecoder, "runs_ahead", ahead)
        ids = [engine.submit(request) for request in requests]
        outputs = run_to_end(engine)
        own = [[one for one in outputs if one.request_id == number and one.prefill_progress == 1] for number in ids]
        found.append(
            [[(one.token_id, one.finish_reason, one.logprobs, one.cached_tokens) for one in each] for each in own]
        )
        assert engine._cache.extents.used == engine.preemptions == 0
    for number, (ahead_of_host, usual) in enumerate(zip(*found, strict=True)):
        assert ahead_of_host == usual, f"request {number}"


def test_requests_get_the_same_from_several_steps_at_once(
    models: dict[str, Path], on_gpu: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled and with penalties, ending by their lengths and end tokens."""
    flags = (*WINDOW, *LIMITS, "--pariskv.top_k", "20", "--cache.offload", "always", "--cache.reuse", "false")
    engine = Engine.load(on_gpu(models["llama"], "pariskv", *flags, "--dtype", "bfloat16"))
    monkeypatch.setattr(engine_module, "LAUNCH_SECONDS", 60.0)
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    values: list[dict[str, Any]] = [{}, sampled, sampled | {"repetition_penalty": 1.3, "frequency_penalty": 0.2}]
    ends = tuple(range(3, 100, 9))
    requests = [
        Request(tuple(PROMPT[number:]), 40, SamplingConfig(**params), ends * (number % 2))
        for number, params in enumerate(values * 3)
    ]
    found, at_once, launch = list[list[Any]](), list[int](), engine.decoder.launch

    def note(tokens: Any, slots: Any, samplers: Any, wanted: Any, steps: int) -> Any:
        at_once.append(steps)
        return launch(tokens, slots, samplers, wanted, steps)

    monkeypatch.setattr(engine.decoder, "launch", note)
    for whole in (False, True):
        sequences = [engine.prepare(request) for request in requests]
        for sequence in sequences:
            engine.enqueue(sequence, whole=whole)
        outputs = run_to_end(engine)
        reasons = {one.request_id: one.finish_reason for one in outputs}
        found.append([(sequence.generated, reasons[sequence.request_id]) for sequence in sequences])
        assert engine._cache.extents.used == engine.preemptions == 0
        assert (max(at_once) > 1) == whole
    for number, (one_by_one, together) in enumerate(zip(*found, strict=True)):
        assert together == one_by_one, f"request {number}"


@pytest.mark.parametrize("most", [1, 8])
def test_nothing_waits_for_the_device_but_tokens(most: int, engine: Engine) -> None:
    decoder = engine.decoder
    sampler = Sampler(Request((1,), 60, SamplingConfig(temperature=0.9, top_p=0.9)), engine.config.model.vocab_size)
    decoder.cache.open(0, len(PROMPT) + 60)
    prefill = decoder.prefill([(0, PROMPT)])
    with no_host_waits():
        while prefill.progress < 1:
            prefill.advance(50)
    prefill.finish()
    decoder.draw(torch.zeros(1, engine.config.model.vocab_size), [sampler])  # what it keeps on the device
    before, done = decoder.launch([0], [0], [None]), 1
    with no_host_waits():  # evictions of 16 tokens come and go
        while done < 50:
            steps = min(most, 50 - done, decoder.cache.alike_steps(0))
            launched = decoder.launch([LATEST], [0], [sampler if done > 25 else None], steps=steps)
            before.collect()
            before, done = launched, done + steps
    before.collect()
    decoder.cache.close(0)


def test_prompts_are_scored_as_on_the_cpu(
    models: dict[str, Path], build_engine: BuildEngine, on_gpu: BuildEngine
) -> None:
    """Log probabilities and logits of a long prompt, and of two that are read in one pack."""
    params = SamplingConfig(prompt_logprobs=2, return_context_logits=True, return_generation_logits=True)
    prompts = PROMPT, PROMPT[:25], PROMPT[3:20]
    requests = [Request(tuple(prompt), 3, params) for prompt in prompts]

    def run(directory: Path) -> tuple[Tensor, list[float]]:
        engine = Engine.load(directory)
        for request in requests:
            engine.submit(request)
        outputs = sorted(run_to_end(engine), key=lambda output: output.request_id)  # keeps a request's own order
        data = b"".join(one for output in outputs for one in (output.context_logits, output.generation_logits))
        told = [one.token for output in outputs for one in output.prompt_logprobs]
        return torch.frombuffer(bytearray(data), dtype=torch.float32), told

    flags = (*WINDOW, *LIMITS)
    expected, expected_told = run(build_engine(models["qwen3"], "full", *flags, *ON_CPU))
    found, told = run(on_gpu(models["qwen3"], "full", *flags, "--dtype", "float32"))
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= MAX_DIFFERENCE
    assert told == pytest.approx(expected_told, abs=MAX_DIFFERENCE)
    assert len(told) == sum(len(prompt) - 1 for prompt in prompts)


class Parts(Observer):
    """Notes what it is told of parts."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def op_launched(self, name: str) -> None:
        self.names.append(name)


def test_parts_cover_the_step(engine: Engine) -> None:
    """An observer sees each bucket's step twice, before its capture and in it, and replays not at all."""
    decoder, parts = engine.decoder, Parts()
    buckets = (1, 2, 4)
    try:
        decoder.observe(parts)
        step = ["begin", *OPS[1:-1] * len(kernel_model(decoder).layers), "head"]
        assert parts.names == step * (2 * len(buckets))
        run_prefill(decoder, 0, PROMPT, 2)
        decoder.decode([5], [0])
        assert len(parts.names) == len(step) * 2 * len(buckets)
    finally:
        decoder.observe(Observer())
        decoder.cache.close(0)


class Selected(Observer):
    """Copies of what each layer's index selects, by batch size and layer; a replay writes them anew."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], Tensor] = {}

    def selected(self, layer: int, queries: Tensor, batch: Batch, selection: Selection | None) -> None:
        assert selection is not None
        self.rows[batch.size, layer] = selection.rows.clone()


def test_an_observer_sees_what_a_replay_selects(engine: Engine) -> None:
    decoder, selected = engine.decoder, Selected()
    run_prefill(decoder, 0, PROMPT, 10)
    try:
        decoder.observe(selected)
        for token in (5, 6):
            with torch.inference_mode():
                for rows in selected.rows.values():
                    rows.fill_(-5)
            decoder.decode([token], [0])
            length = decoder.cache.lengths[0]
            for layer, index in enumerate(decoder.retrieval.indexes):
                rows = selected.rows[1, layer]
                assert ((rows >= 0) & (rows < length)).sum(dim=2).unique().tolist() == [index.budget(length).rows]
    finally:
        decoder.observe(Observer())
        decoder.cache.close(0)


def test_given_tokens_are_scored_by_the_steps_that_generate(engine: Engine) -> None:
    """Steps run ahead, and take in the given token all the same. Other tokens are drawn behind other tokens."""

    def told(forced: dict[int, tuple[int, ...]]) -> dict[int, list[Any]]:
        found = dict[int, list[Any]]()
        for slot, prompt in SLOTS.items():
            sampling = SamplingConfig(logprobs=3, forced_tokens=forced.get(slot, ()))
            found[engine.submit(Request(tuple(prompt), STEPS, sampling))] = []
        for output in run_to_end(engine):
            if output.token_id is not None:
                found[output.request_id].append((output.token_id, output.logprobs, output.attended_tokens))
        return dict(zip(SLOTS, found.values(), strict=True))

    greedy = told({})
    tokens = {slot: tuple(token for token, *_ in own) for slot, own in greedy.items()}
    again = told(tokens)
    for slot, own in greedy.items():  # which requests share a step depends on time, and with it the last bits
        for (token, likely, attended), (other_token, other_likely, other_attended) in zip(
            own, again[slot], strict=True
        ):
            assert (other_token, other_attended) == (token, attended)
            assert [one for one, _ in other_likely.top] == [one for one, _ in likely.top]
            assert other_likely.token == pytest.approx(likely.token, abs=MAX_DIFFERENCE)
    given = {slot: tuple(step[number] for step in TOKENS[:30]) for number, slot in enumerate(SLOTS)}
    other = told(given)
    assert {slot: tuple(token for token, *_ in own[:30]) for slot, own in other.items()} == given
    for slot in SLOTS:
        assert [one for one, _ in other[slot][0][1].top] == [one for one, _ in greedy[slot][0][1].top]
        assert [one for one, _ in other[slot][9][1].top] != [one for one, _ in greedy[slot][9][1].top]


def test_a_service_generates_from_its_own_thread(models: dict[str, Path], on_gpu: BuildEngine, engine: Engine) -> None:
    flags = (*WINDOW, *LIMITS, "--pariskv.top_k", "20", "--cache.offload", "always")
    service = EngineService.load(on_gpu(models["llama"], "pariskv", *flags))
    outputs: queue.Queue[StepOutput] = queue.Queue()
    try:
        service.submit(Request(tuple(PROMPT), 20), outputs.put)
        found = [outputs.get(timeout=60)]
        while found[-1].finish_reason is None:
            found.append(outputs.get(timeout=60))
    finally:
        service.close()
    tokens = [output.token_id for output in found if output.token_id is not None]
    assert [tokens] == engine.generate([Request(tuple(PROMPT), 20)])


def test_rows_that_exceed_the_device_are_refused_with_the_numbers(tmp_path: Path, on_gpu: BuildEngine) -> None:
    longest = 1 << 24
    model = save_random_model(tmp_path / "model", "llama", head_dim=64, max_position_embeddings=longest)
    flags = ("--max_batch_size", "64", "--max_seq_len", str(longest), "--cache.offload", "never")
    with pytest.raises(
        CapacityError, match=r"device memory: weights [\d,]+, windows and states [\d,]+, work space [\d,]+, index of"
    ):
        Engine.load(on_gpu(model, "full", *flags))
