"""What the GPU benchmark computes without a GPU: shapes, weights, what fits, floors, ratios, settings.

tests/gpu/bench/test_device_bench.py runs the whole of it.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from kvseek.bench.speed import decode
from kvseek.bench.speed.device import floors
from kvseek.bench.speed.device.bench import ROOM
from kvseek.bench.speed.device.decode import borrow_baselines, dense_floor, peaks, pooled, with_times
from kvseek.bench.speed.device.floors import Rates, Step, Work, host_memory_rate, work
from kvseek.bench.speed.device.main import over_baseline
from kvseek.bench.speed.device.memory_plan import (
    GIB,
    Cell,
    IndexNeeds,
    Limits,
    Needs,
    fill_bytes,
    plan_phases,
)
from kvseek.bench.speed.device.options import parse
from kvseek.bench.speed.parts import part_groups
from kvseek.bench.speed.shapes import LLAMA_3_1_8B, QWEN3_8B, get_shape, matrix_bytes, matrix_numbers, row_numbers
from kvseek.bench.timing import Samples
from kvseek.bench.variants import WeightForm
from kvseek.builder.checkpoints.weights import WeightFormat
from kvseek.core.config import FP8_GROUPS, CacheConfig, EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ModelConfig
from kvseek.core.weight_only import INT4
from kvseek.engine.model.layer import Layer
from kvseek.engine.model.weights import list_weights, make_weights, weight_shapes
from kvseek.plugins.measurements import SelectionCosts

KIB = 1024
METHODS = ["--methods", "full,pariskv"]


def config_for(model: ModelConfig, method: str, context: int, batch: int) -> EngineConfig:
    """An engine of the benchmark for requests of `context` tokens."""
    longest = context + ROOM
    model = dataclasses.replace(model, max_position_embeddings=longest)
    lengths = {"max_input_len": longest, "max_seq_len": longest}
    return EngineConfig(model, method, dtype="bfloat16", device="cuda", max_batch_size=batch, **lengths)


CPU = torch.device("cpu")
TINY = ModelConfig("qwen3", 100, 32, 48, 2, 4, 2, 8, 1e-6, 1e4, 512, qk_norm=True, qkv_bias=True, output_bias=True)


def test_shapes_are_of_their_size() -> None:
    """Matrices as the models' names say: 8.03 and 8.19 thousand million numbers with the embedding; 128 and 144 KiB a token."""
    sizes = {LLAMA_3_1_8B: 8.03e9, QWEN3_8B: 8.19e9}
    for model, size in sizes.items():
        numbers = sum(math.prod(shape) for shape in weight_shapes(model).values())
        assert numbers == pytest.approx(size, rel=2e-3)
        norms = sum(math.prod(shape) for shape in weight_shapes(model).values() if len(shape) == 1)
        config, ends = config_for(model, "full", 1, 1), model.vocab_size * model.hidden_size
        assert matrix_bytes(config) == 2 * (numbers - norms - ends)
        narrow = dataclasses.replace(config, weight_only_precision="fp8")
        assert matrix_bytes(narrow) == numbers - norms, "one a number of the layers, two of the head"
        narrow = dataclasses.replace(config, weight_only_precision="int8", quantize_lm_head=True)
        assert matrix_bytes(narrow) == numbers - norms - ends, "one a number of layers and head"
    assert [row_numbers(model) * 2 for model in sizes] == [128 * KIB, 144 * KIB]
    assert get_shape("llama-3.1-8b", 1 << 20).max_position_embeddings == 1 << 20
    assert get_shape("llama-3.1-8b", 10) == LLAMA_3_1_8B
    mixture = get_shape("qwen3-30b-a3b", 10)
    embeddings, norms = 151_936 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048  # of 30.5 billion weights, 3.3 for a token
    assert matrix_numbers(mixture) == 30_532_122_624 - 2 * embeddings - norms
    attention, router, expert = 2 * (32 + 4) * 128 * 2048, 128 * 2048, 3 * 768 * 2048
    assert matrix_numbers(mixture, 1) == 48 * (attention + router + 8 * expert)
    assert matrix_numbers(mixture, 2) == 48 * (attention + router + round((16 - 0.5) * expert))
    for name in ("qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b"):
        hybrid = get_shape(name, 10)
        layers = {name: shape for name, shape in weight_shapes(hybrid).items() if name.startswith("layers.")}
        matrices = {
            name: shape for name, shape in layers.items() if len(shape) > 1 and not name.endswith(".conv.weight")
        }
        assert matrix_numbers(hybrid) == sum(map(math.prod, matrices.values()))
    assert row_numbers(hybrid) == 10 * 2 * 2 * 256, "a quarter of the layers have rows"
    with pytest.raises(ConfigError, match="--shape = 'gpt': must be one of"):
        get_shape("gpt", 10)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("precision", "head"), [("int8", False), ("int8", True), ("fp8", False), (INT4, True), (FP8_GROUPS, False)]
)
def test_quantised_weights_are_those_that_the_builder_stores(precision: str, head: bool, tied: bool) -> None:
    sizes, group = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}, 64 if precision == INT4 else 32
    model = dataclasses.replace(TINY, tie_word_embeddings=tied, **sizes)
    config = dataclasses.replace(
        config_for(model, "full", 1, 1), weight_only_precision=precision, weight_group=group, quantize_lm_head=head
    )
    own = make_weights(config, CPU, 0)
    stored = WeightFormat(torch.bfloat16, precision, head, group)
    listed = [one for weight in list_weights(model, quantize_lm_head=head) for one in stored.stored(weight)]
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()} == {
        one.name: (one.shape, one.dtype) for one in listed
    }
    needs = Needs.of(config, 2, IndexNeeds())
    matrices = sum(tensor.nbytes for tensor in own.values() if tensor.dim() > 1)
    assert needs.weights == matrices, "scales of groups count"


def test_rows_in_8_bits_need_half_the_memory() -> None:
    wide = config_for(TINY, "full", 1, 1)
    narrow = dataclasses.replace(wide, cache=dataclasses.replace(wide.cache, row_dtype="int8"))
    needs = [Needs.of(config, 2, IndexNeeds()) for config in (wide, narrow)]
    assert needs[0].row_extent == 1024 * 2 * row_numbers(TINY)
    assert needs[1].row_extent == 1024 * (row_numbers(TINY) + 2 * row_numbers(TINY) // TINY.head_dim), "and scales"
    assert needs[0].window_slot == needs[1].window_slot, "windows have 16 bits"


def test_random_weights_are_what_a_decoder_reads() -> None:
    config = dataclasses.replace(config_for(TINY, "full", 1, 1), dtype="float32")
    weights = make_weights(config, CPU, 0)
    layer = Layer(weights, 1)
    parts = (layer.attention_norm, layer.qkv.bias, layer.q_norm, layer.o.bias, layer.mlp_norm, layer.down.weight)
    assert all(part is not None for part in parts)
    assert layer.qkv.weight.shape == ((4 + 2 * 2) * 8, 32)
    assert layer.qkv.weight.var().item() == pytest.approx(1 / 32, rel=0.2)
    assert layer.down.weight.var().item() == pytest.approx(1 / 48 / 4, rel=0.2)
    again = make_weights(config, CPU, 0)
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())


def test_parts_of_a_step_are_grouped_and_none_is_lost() -> None:
    parts = {"qkv": 1.0, "o": 2.0, "select": 4.0, "attend": 8.0, "norm": 16.0, "a new one": 32.0}
    assert part_groups(parts) == {"GEMMs": 3.0, "select": 4.0, "attend": 8.0, "others": 48.0}


def test_lists_are_sorted_and_checked() -> None:
    flags = ["--contexts", "262144,131072,131072", "--batches", "4,1", "--offload", "always,auto"]
    arguments = parse([*METHODS, *flags])
    assert (arguments.contexts, arguments.batches) == ([131_072, 262_144], [1, 4])
    assert [variant.label for variant in arguments.methods] == ["full", "pariskv"]
    assert arguments.offload == ["always", "auto"]


BAD = {
    "contexts": (["--contexts", "100"], "--contexts = '100': must be a comma list of numbers >= 4096"),
    "batches": (["--batches", "1,x"], "--batches = '1,x': must be a comma list"),
    "steps": (["--steps", "201"], "--steps = 201: must be between 1 and 200, so that no timed step evicts"),
    "dtype": (["--dtype", "int8"], "--dtype = 'int8': must be one of bfloat16, float16, float32"),
    "offload twice": (["--offload", "auto,auto"], "--offload = 'auto,auto': must name each once"),
    "repeats": (["--repeats", "0"], "--repeats = 0: must be >= 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, message = BAD[case]
    assert decode.main(["--device", "cuda", *METHODS, *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--shape", "qwen3-8b", *METHODS, "--output", str(tmp_path / "out.json")]) == 1
    assert "PyTorch sees no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


class TestPlan:
    filling = fill_bytes(LLAMA_3_1_8B, [Cell(786_432, 1)], 2)
    limits = Limits(device=139 * GIB, work_space=parse(METHODS).work_memory + filling, host=108 * GIB)

    def needs(self) -> Needs:
        config = config_for(LLAMA_3_1_8B, "pariskv", 1 << 17, 1)
        return Needs.of(config, 2, IndexNeeds(extent=32 * 8 * 112 * 1024))

    def plan(self, cells: list[Cell], *offloads: str, limits: Limits | None = None) -> dict[str, object]:
        phases = plan_phases(CacheConfig(), cells, offloads, ROOM, self.needs(), limits or self.limits)
        return {phase.offload: phase for phase in phases}

    def test_needs(self) -> None:
        """An extent's rows in all layers; slots and what does not grow; of several methods the most of each part."""
        assert self.needs().row_extent == 1024 * 128 * KIB
        assert IndexNeeds(10, 100, 7).of(extents=3, slots=2) == 237
        one, other = (dataclasses.replace(self.needs(), window_slot=n, index=IndexNeeds(n, 9 - n, 5)) for n in (2, 6))
        most = Needs.most([one, other])
        assert (most.window_slot, most.index) == (6, IndexNeeds(6, 7, 5))
        assert most.weights == one.weights, "of one precision they are there once"
        narrow = [
            dataclasses.replace(one, weights=one.weights // 2, form=WeightForm(name)) for name in ("int8", "fp8", "fp8")
        ]
        assert Needs.most([one, *narrow]).weights == 2 * one.weights, "int8 and fp8 lie side by side"

    def test_bytes_of_slots_are_planned_for(self) -> None:
        """Two slots of 84 MB a layer (one is for padding) push out what fitted exactly."""
        cells, config = [Cell(131_072, 1)], config_for(LLAMA_3_1_8B, "pariskv", 131_072, 1)
        slot = 32 * 84_000_000
        plain, more = (Needs.of(config, 2, IndexNeeds(slot=bytes_)) for bytes_ in (0, slot))
        exact = plain.weights + 2 * plain.window_slot + 128 * plain.row_extent
        for needs, fits in ((plain, True), (more, False)):
            (phase,) = plan_phases(CacheConfig(), cells, ["never"], ROOM, needs, Limits(exact + GIB, GIB, GIB))
            assert (phase.cells == cells) is fits
            if not fits:
                assert f"exceed the limit by {2 * slot / GIB:.1f} GiB" in phase.skipped[cells[0]]

    def test_what_does_not_fit_is_skipped_with_the_reason(self) -> None:
        cells = [Cell(131_072, 1), Cell(786_432, 1), Cell(1_048_576, 1)]
        plan = self.plan(cells, "always", "never", "auto")
        assert plan["always"].cells == cells[:2]
        assert "rows in host memory exceed the limit by 20" in plan["always"].skipped[cells[2]]
        assert plan["never"].baseline == plan["never"].cells == cells[:2]
        assert "index and rows on the device exceed" in plan["never"].skipped[cells[2]]
        assert plan["auto"].cells == cells
        assert plan["auto"].baseline == []

    def test_the_baseline_yields_to_the_index(self) -> None:
        """Half the device: rows of 786,432 tokens do not fit, but their index does."""
        cells = [Cell(131_072, 1), Cell(786_432, 1)]
        small = Limits(device=70 * GIB, work_space=6 * GIB, host=108 * GIB)
        phase = self.plan(cells, "always", limits=small)["always"]
        assert (phase.cells, phase.baseline) == (cells, cells[:1])

    def test_bad_settings_are_named(self) -> None:
        with pytest.raises(ConfigError, match="--offload = 'maybe': must be a comma list of always, never, auto"):
            self.plan([Cell(4096, 1)], "maybe")
        with pytest.raises(ConfigError, match="choose a smaller shape"):
            self.plan([Cell(4096, 1)], "auto", limits=Limits(10 * GIB, GIB, GIB))
        with pytest.raises(ConfigError, match="--host_memory: 0 bytes: must be > 0"):
            Limits(GIB, GIB, 0)


class TestFloor:
    rates = Rates(4.4e12, host_link=50e9, host_memory=100e9)

    def moved(self, costs: SelectionCosts, step: Step, monkeypatch: pytest.MonkeyPatch) -> Work:
        monkeypatch.setattr(floors, "costs_of", lambda config, length, itemsize: costs)
        return work(config_for(LLAMA_3_1_8B, "full", 131_072, 1), step, 2)

    def test_dense_attention_at_128k(self) -> None:
        """The design's figures for one H200: 3.4 ms of matrices at the full rate, 3.9 ms of rows."""
        moved = work(config_for(LLAMA_3_1_8B, "full", 131_072, 1), Step(130_752, 320, 1, 0), 2)
        floor = moved.floor(self.rates)
        assert floor["weights"] == pytest.approx(3.4e-3, rel=0.02)
        assert floor["device_rows"] == pytest.approx(3.9e-3, rel=0.01)
        assert floor["host_rows"] == floor["scan"] == floor["rerank"] == 0
        assert floor["total"] == pytest.approx(sum(value for part, value in floor.items() if part != "total"))

    def test_hot_rows_are_read_on_the_device(self) -> None:
        config = config_for(LLAMA_3_1_8B, "pariskv", 131_072, 2)
        cold, hot = (work(config, Step(100_000, 320, 2, 16, rate), 2) for rate in (0.0, 0.75))
        assert cold.host_rows == 2 * 8 * 16 * 100 * 512
        assert hot.host_rows == cold.host_rows / 4
        assert hot.device_rows - cold.device_rows == 0.75 * cold.host_rows

    def test_small_regions_and_unknown_methods(self) -> None:
        short = work(config_for(LLAMA_3_1_8B, "pariskv", 4096, 1), Step(50, 320, 1, 32), 2)
        assert short.host_rows == 32 * 8 * 50 * 512
        with pytest.raises(ConfigError, match="--methods: 'flat': must say what its step moves"):
            work(config_for(LLAMA_3_1_8B, "flat", 4096, 1), Step(50, 320, 1, 32), 2)
        with pytest.raises(ConfigError, match="hit_rate ="):
            Step(1, 1, 1, 1, 1.5)

    @pytest.mark.parametrize("host_cores", [True, False])
    def test_keys_and_rows_in_host_memory(self, host_cores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Half of the layers on the device: their keys are reranked there."""
        costs = SelectionCosts(rows=512, reranked_keys=6144, host_cores=host_cores)
        moved = self.moved(costs, Step(100_000, 320, 2, 16), monkeypatch)
        lists = 2 * 16 * 8
        away = lists * (512 * 512 + 6144 * 256)
        assert (moved.host_rows, moved.host_cores) == ((0, away) if host_cores else (away, 0))
        assert moved.rerank == lists * 6144 * 256
        assert moved.floor(self.rates)["host_cores"] == pytest.approx(moved.host_cores / 100e9)

    @pytest.mark.parametrize("host_layers", [0, 31, 32])
    def test_dense_layers_come_first(self, host_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        moved = self.moved(SelectionCosts(rows=100, dense_layers=2), Step(5000, 320, 1, host_layers), monkeypatch)
        dense = max(0, 2 - (32 - host_layers))
        assert moved.host_rows == 8 * 512 * (dense * 5000 + (host_layers - dense) * 100)
        in_all = 8 * 512 * (2 * 5000 + 30 * 100 + 32 * 320)
        assert sum(moved.bytes_by_part().values()) - moved.weights == in_all


def entry(method: str, median: float, baseline: float | None) -> dict[str, object]:
    return with_times({"method": method, "batch": 1, "floor": {"total": 0.001}}, [median], [median], baseline)


def test_ratios_and_borrowed_baselines() -> None:
    with_baseline = [entry("full", 0.008, 0.008), entry("pariskv", 0.004, 0.016)]
    without, other = [entry("pariskv", 0.002, None)], [entry("pariskv", 1.0, None)]
    cells = [{"context": 10, "batch": 1, "results": results} for results in (with_baseline, without)]
    document = {"phases": [{"cells": [cell]} for cell in (*cells, {"context": 20, "batch": 1, "results": other})]}
    borrow_baselines(document, "full")
    assert [e["to_baseline"] for e in (*with_baseline, *without, *other)] == [1.0, 0.25, 0.25, None]
    assert ["baseline_of_another_phase" in e for e in (*with_baseline, *without)] == [False, False, True]
    found = peaks([{**one, "context": 10} for one in with_baseline + without], "full")
    assert [(one["method"], one["tokens_per_second"], one["to_baseline"]) for one in found] == [
        ("full", 125.0, 1.0),
        ("pariskv", 500.0, 4.0),
    ]


def test_a_baseline_that_does_not_fit_is_replaced_by_its_floor() -> None:
    """One million tokens, the rows of 10 of 32 layers in host memory, half of the method's rows hot."""
    config, step = config_for(LLAMA_3_1_8B, "full", 1_000_000, 1), Step(1_000_000, 576, 1, 10, hit_rate=0.5)
    found = dense_floor(config, step, 2, TestFloor.rates)
    weights, rows = 15.0e9 / 4.4e12, 8 * 512 * 1e6
    assert found == pytest.approx(weights + rows * (22 / 4.4e12 + 10 / 50e9), rel=0.01)
    alone = {**entry("pariskv", 0.09, None), "dense_floor_seconds": found}
    assert over_baseline(alone) == f"{0.09 / found:.3f}†"
    assert over_baseline({**alone, "to_baseline": 0.5}) == "0.500"


def test_a_baseline_of_several_rounds() -> None:
    found = pooled(entry("full", 0.008, 0.008), Samples([0.004, 0.006]), [0.01, 0.01])
    assert found["samples"] == [0.008, 0.004, 0.006]
    assert (found["step_seconds"]["median"], found["to_baseline"]) == (0.006, 1.0)
    assert found["wall_seconds"]["count"] == 3


def test_host_memory_is_read() -> None:
    assert 1e8 < host_memory_rate(1 << 24) < 1e13
