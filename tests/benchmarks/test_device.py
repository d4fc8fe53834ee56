"""What the GPU benchmarks compute without a GPU: shapes, plans, synthetic keys, settings.

tests/gpu/benchmarks/test_device_bench.py runs the whole of them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvseek.benchmarks import decode, device_cache_hits
from kvseek.benchmarks.device.contestant import shared_rows
from kvseek.benchmarks.device.memory_plan import (
    GIB,
    SLOT_STRIDE,
    Cell,
    IndexNeeds,
    Limits,
    Needs,
    fill_bytes,
    plan_phases,
)
from kvseek.benchmarks.device.options import parse
from kvseek.benchmarks.device.results import stage_groups
from kvseek.benchmarks.device.bench import ROOM, with_budget
from kvseek.benchmarks.device.memory_rates import KERNELS, ReadArguments, RowsArguments, random_row_offsets
from kvseek.benchmarks.device.random_weights import RandomWeights, weight_shapes
from kvseek.benchmarks.shapes import LLAMA_3_1_8B, QWEN3_8B, get_shape, matrix_bytes, row_numbers
from kvseek.benchmarks.synthetic_keys import Spectrum, SyntheticKeys
from kvseek.core.config import CacheConfig, EngineConfig, ModelConfig
from kvseek.core.errors import ConfigError
from kvseek.engine.cache.memory_layout import lay_out_rows
from kvseek.engine.model.layer import Layer

CPU = torch.device("cpu")
KIB = 1024
METHODS = ["--methods", "full,pariskv"]
TINY = ModelConfig("qwen3", 100, 32, 48, 2, 4, 2, 8, 1e-6, 1e4, 512, qk_norm=True, qkv_bias=True, output_bias=True)


def config_for(model: ModelConfig, method: str, context: int, batch: int) -> EngineConfig:
    longest = context + ROOM
    model = dataclasses.replace(model, max_position_embeddings=longest)
    lengths = {"max_input_len": longest, "max_seq_len": longest}
    return EngineConfig(model, method, dtype="bfloat16", device="cuda", max_batch_size=batch, **lengths)


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
    assert [row_numbers(model) * 2 for model in sizes] == [128 * KIB, 144 * KIB]
    assert get_shape("llama-3.1-8b", 1 << 20).max_position_embeddings == 1 << 20
    assert get_shape("llama-3.1-8b", 10) == LLAMA_3_1_8B
    with pytest.raises(ConfigError, match="--shape = 'gpt': must be one of"):
        get_shape("gpt", 10)


def test_random_weights_are_what_a_decoder_reads() -> None:
    weights = RandomWeights(TINY, torch.float32, CPU)
    layer = Layer(TINY, weights.tensors, 1)
    parts = (layer.attention_norm, layer.qkv.bias, layer.q_norm, layer.o.bias, layer.mlp_norm, layer.down.weight)
    assert all(part is not None for part in parts)
    assert layer.qkv.weight.shape == ((4 + 2 * 2) * 8, 32)
    assert layer.qkv.weight.var().item() == pytest.approx(1 / 32, rel=0.2)
    assert layer.down.weight.var().item() == pytest.approx(1 / 48 / 4, rel=0.2)
    assert weights.flat.numel() >= sum(tensor.numel() for tensor in weights.tensors.values())
    again = RandomWeights(TINY, torch.float32, CPU)
    assert torch.equal(weights.flat, again.flat)
    assert layer.qkv.weight.untyped_storage().data_ptr() == weights.flat.untyped_storage().data_ptr()


class TestSynthetic:
    tokens = 8192

    @pytest.fixture
    def source(self) -> SyntheticKeys:
        return SyntheticKeys(2, 128, CPU, seed=1)

    @pytest.fixture
    def keys(self, source: SyntheticKeys) -> torch.Tensor:
        return source.keys(self.tokens)

    def test_spectrum(self, keys: torch.Tensor) -> None:
        """Eigenvalues of the covariance fall as 1/rank or, where a frequent topic lies, faster, in no channel's direction;
        a few channels hold most of the mean."""
        for head in keys:
            eigenvalues = torch.linalg.eigvalsh(head.T.cov()).flip(0)
            assert 7 < (eigenvalues[7] / eigenvalues[63]).item() < 16
            assert head.var(dim=0).max() < 0.25 * eigenvalues[0]
            mean = head.mean(dim=0).square().sort(descending=True).values
            assert mean[:4].sum() > 0.5 * mean.sum()
            assert mean.sum() > 0.5 * head.var(dim=0).sum()

    def test_topics_persist_and_differ_in_frequency(self, source: SyntheticKeys) -> None:
        topics = source.topic_runs(50_000)
        changes = (topics[1:] != topics[:-1]).float().mean().item()
        assert 1 / changes == pytest.approx(Spectrum().run_tokens, rel=0.15)
        counts = torch.bincount(topics, minlength=1024).sort(descending=True).values
        assert counts[0] > 20 * counts[100]

    def test_attention_is_concentrated(self, source: SyntheticKeys, keys: torch.Tensor) -> None:
        """The best 100 of 8,192 keys hold about two thirds of the mass, as on real keys; so of another layer's keys."""
        queries = source.queries(8, 64)
        for signs in (torch.ones(2, 1, 128), source.signs()):
            turned = (queries * signs.repeat_interleave(4, dim=0)).view(2, 256, 128)
            weights = (turned @ (keys * signs).transpose(1, 2) / 128**0.5).softmax(dim=-1)
            assert weights.topk(100).values.sum(dim=-1).mean().item() == pytest.approx(0.65, abs=0.1)

    def test_neighbouring_queries_seek_the_same(self, source: SyntheticKeys, keys: torch.Tensor) -> None:
        queries = source.queries(2, 200)
        best = (queries @ keys.transpose(1, 2)).topk(100).indices
        assert shared_rows(best[:, :-1], best[:, 1:]) > 2 * shared_rows(best[:, :-60], best[:, 60:])

    def test_reproducible_and_of_the_dtype_asked_for(self) -> None:
        first, second = (SyntheticKeys(2, 16, CPU, seed=3) for _ in range(2))
        assert torch.equal(first.keys(50, torch.bfloat16), second.keys(50, torch.bfloat16))
        assert torch.equal(first.queries(4, 5), second.queries(4, 5))
        assert not torch.equal(first.keys(50), first.keys(50))
        assert first.values(7, torch.float16).shape == (2, 7, 16)

    def test_bad_spectra_are_named(self) -> None:
        with pytest.raises(ConfigError, match=r"spectrum.topic_share = 1: must be between 0 and 1"):
            Spectrum(topic_share=1)
        with pytest.raises(ConfigError, match=r"spectrum.run_tokens = 0: must be >= 1"):
            Spectrum(run_tokens=0)


class TestPlan:
    filling = fill_bytes(LLAMA_3_1_8B, [Cell(786_432, 1)], 2)
    limits = Limits(device=139 * GIB, work_space=int(parse(METHODS).work_gib * GIB) + filling, host=108 * GIB)

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
        narrow = [dataclasses.replace(one, weights=one.weights // 2, precision=name) for name in ("int8", "fp8", "fp8")]
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

    def test_768k_tokens_fit_in_both_places(self) -> None:
        """The dense baseline's 96 GiB beside weights and index on the device, the same rows in host memory."""
        cells = [Cell(131_072, 1), Cell(786_432, 1)]
        phase = self.plan(cells, "always")["always"]
        assert (phase.cells, phase.baseline, phase.skipped) == (cells, cells, {})

    def test_filling_is_counted(self) -> None:
        """At 768K tokens 1.5 GiB of a layer's keys, of a KV head 1/8 as they are and 4/8 in float32; 5 × 1/8 of chunks."""
        assert self.filling == (1.5 + 5 * 1.5 / 8 + 5 / 8) * GIB
        more = fill_bytes(LLAMA_3_1_8B, [Cell(786_432, 1), Cell(4096, 2)], 2)
        assert more == self.filling, "the longest text counts"
        assert fill_bytes(LLAMA_3_1_8B, [Cell(786_432, 2)], 2) == self.filling + SLOT_STRIDE * 2 * KIB

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
        with pytest.raises(ConfigError, match="--host_gib: 0 bytes: must be > 0"):
            Limits(GIB, GIB, 0)

    @pytest.mark.parametrize("layers", [0, 1, 13, 31, 32])
    def test_budgets_give_the_pool_that_was_planned(self, layers: int) -> None:
        """Neither a larger one, which would pin more memory than there is, nor other layers on the device."""
        needs, extents = self.needs(), 300
        for offload in {0: ("always", "auto"), 32: ("never", "auto")}.get(layers, ("auto",)):
            config = config_for(LLAMA_3_1_8B, "pariskv", 786_432, 4)
            budgeted = with_budget(config, offload, extents, needs.row_extent, layers)
            plan = lay_out_rows(budgeted, torch.bfloat16, extents * needs.row_extent // 32 * layers)
            assert (plan.capacity, plan.device_layers, plan.host_layers) == (extents, layers, 32 - layers)


def test_stages_are_grouped_and_none_is_lost() -> None:
    stages = {"qkv": 1.0, "o": 2.0, "select": 4.0, "attend": 8.0, "norm": 16.0, "a new one": 32.0}
    assert stage_groups(stages) == {"GEMMs": 3.0, "select": 4.0, "attend": 8.0, "others": 48.0}


def test_shared_rows() -> None:
    before = torch.tensor([[[1, 5, 9, -1]]])
    assert shared_rows(before, torch.tensor([[[5, 9, 10, -1]]])) == pytest.approx(2 / 3)
    assert shared_rows(before, before) == 1


def test_random_rows_lie_inside_the_pool() -> None:
    """A layer of a pool of 3 extents and 4 layers, 2 KV heads of 16 channels."""
    layer = 2 * 1024 * 2 * 16
    offsets = random_row_offsets(10_000, 3, 4 * layer, 2, 16, 2, CPU)
    extent, inside = offsets // (4 * layer * 2), offsets % (4 * layer * 2)
    assert set(extent.tolist()) == {0, 1, 2}
    assert inside.max() <= (layer - 2 * 16) * 2
    assert (offsets % (2 * 16 * 2) == 0).all()


def test_probe_arguments_mirror_the_kernels() -> None:
    text = (KERNELS / "plugins/probe/probe.cu").read_text(encoding="utf-8")
    for structure, name in ((ReadArguments, "ProbeReadArguments"), (RowsArguments, "ProbeRowsArguments")):
        body = text.partition(f"struct {name} {{")[2].partition("};")[0]
        fields = [line.partition(";")[0].split()[-1].lstrip("*") for line in body.splitlines() if ";" in line]
        assert fields == [field[0] for field in structure._fields_]
        assert ctypes.sizeof(structure) % 8 == 0


def test_probe_compiles() -> None:
    pytest.importorskip("cuda.core")
    from kvseek.builder.compile.cuda import Specialisation, compile_cubin

    image = compile_cubin(Specialisation("bfloat16", 128, 1, "probe"), 90, roots=[KERNELS])
    assert b"kvseek_probe_read" in image
    assert b"kvseek_probe_rows" in image


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
    "twice": (["--methods", "full,full"], "--methods = 'full,full': must name each once"),
    "offload twice": (["--offload", "auto,auto"], "--offload = 'auto,auto': must name each once"),
    "work": (["--work_gib", "-1"], "--work_gib = -1.0: must be > 0"),
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


def test_speed_ups_are_over_the_same_method_without_a_cache() -> None:
    def entry(method: str, hits: float, median: float) -> dict[str, Any]:
        return {"method": method, "hit_rate": hits, "layer_seconds": {"median": median}}

    results = [entry("a", 0.6, 10e-6), entry("a", 0.0, 25e-6), entry("b", 0.0, 7e-6)]
    device_cache_hits.add_speed_ups(results)
    assert [one["speed_up"] for one in results] == pytest.approx([2.5, 1, 1])


BAD_HITS = {
    "context": (["--methods", "pariskv", "--context", "100"], "--context = 100: must be between 4096 and"),
    "steps": (["--methods", "pariskv", "--steps", "241"], "--steps = 241: must be between 1 and 240"),
    "dense": (["--methods", "full"], "full: unknown key 'top_k'"),
}


@pytest.mark.parametrize("case", BAD_HITS)
def test_bad_settings_of_the_benchmark_of_hits_are_named(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, message = BAD_HITS[case]
    assert device_cache_hits.main(flags) == 1
    assert message in capsys.readouterr().err
