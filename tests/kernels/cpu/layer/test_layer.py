"""The compiled operations between a layer's products against PyTorch's, and decode steps with the one and the other."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.prefill import check_agreement
from torch import Tensor

from kvseek.core.batch import Batch, RequestState
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.core.model_config import ModelConfig
from kvseek.core.rope import RotaryEmbedding, Rotation
from kvseek.engine.engine import Engine
from kvseek.engine.model.reference import TorchOperations
from kvseek.kernels.cpu.layer.layer import NativeOperations

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of one result, relative
BATCHES = (1, 3, 8, 40)


def model_of(heads: int = 4, kv_heads: int = 2, dim: int = 64) -> ModelConfig:
    return ModelConfig("qwen3", 100, 64, 96, 1, heads, kv_heads, dim, 1e-6, 1e4, 1 << 17)


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """`expected` is computed in float32, and may be the difference of two products, each at most 8 or so."""
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), expected, rtol=ROUNDING[dtype], atol=2e-6)


def request(slot: int, row: int) -> RequestState:
    return RequestState(token=1, slot=slot, position=7, write_row=row, length=0)


@DTYPES
@pytest.mark.parametrize("hidden", [1, 48, 576, 1001, 4096])
def test_add_rms_norm(library: CpuLibrary, level: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(hidden)
    ops, reference = NativeOperations(library, model_of(), dtype), TorchOperations(model_of())
    for rows, is_first in itertools.product(BATCHES, (True, False)):
        x, weight = random(dtype, rows, hidden), random(dtype, hidden)
        delta = None if is_first else random(dtype, rows, hidden)
        total = x.clone() if delta is None else x + delta
        out = ops.add_rms_norm(x, delta, weight)
        assert torch.equal(x, total)
        check(out, reference.add_rms_norm(total.float(), None, weight.float()), dtype)


@DTYPES
@pytest.mark.parametrize("size", [1, 48, 333, 1536])
def test_silu_mul(library: CpuLibrary, level: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    ops = NativeOperations(library, model_of(), dtype)
    for rows in BATCHES:
        gate_up = random(dtype, rows, 2 * size) * 20
        check(ops.silu_mul(gate_up), TorchOperations(model_of()).silu_mul(gate_up.float()), dtype)


def test_silu_mul_of_what_no_exponential_holds(library: CpuLibrary, level: int) -> None:
    gates = torch.tensor([-torch.inf, -3e38, -1000.0, -89.0, -86.0, -0.0, 88.0, 1000.0, torch.nan, torch.inf])
    gate_up = torch.cat((gates, torch.ones(10)))[None]
    found = NativeOperations(library, model_of(), torch.float32).silu_mul(gate_up)
    expected = TorchOperations(model_of()).silu_mul(gate_up)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-36, equal_nan=True)


@functools.cache
def rotary_embedding(model: ModelConfig) -> RotaryEmbedding:
    """Its table of so many positions takes longer than what is tested."""
    return RotaryEmbedding(model, CPU)


def rope_case(model: ModelConfig, rows: int, norm: bool, dtype: torch.dtype) -> tuple[Tensor, Rotation, list[Any]]:
    """Random qkv, the rotation of far positions, and the weights of QK-norm or None."""
    qkv = random(dtype, rows, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    rotation = rotary_embedding(model).at(torch.arange(rows).mul(2999).tolist())
    return qkv, rotation, [random(dtype, model.head_dim) if norm else None for _ in range(2)]


def wide(tensors: list[Any]) -> list[Any]:
    return [None if tensor is None else tensor.float() for tensor in tensors]


SHAPES = pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (8, 2, 128), (6, 1, 12)])


@DTYPES
@SHAPES
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk_norm"])
def test_rope_append(
    library: CpuLibrary, level: int, norm: bool, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(dim)
    model = model_of(heads, kv_heads, dim)
    for rows in BATCHES:
        qkv, rotation, norms = rope_case(model, rows, norm, dtype)
        states = [request(slot, slot * 5 % 11) for slot in torch.randperm(rows + 2)[:rows].tolist()]
        batch = Batch.of(states, torch.zeros(rows + 2, 1, dtype=torch.int32))
        window = random(dtype, rows + 2, kv_heads, 11, 2, dim)
        expected = window.float()
        queries = TorchOperations(model).rope_append(qkv.float(), batch, rotation, expected, *wide(norms))
        check(NativeOperations(library, model, dtype).rope_append(qkv, batch, rotation, window, *norms), queries, dtype)
        check(window, expected, dtype)


@DTYPES
@SHAPES
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk_norm"])
def test_rope_prompt(
    library: CpuLibrary, level: int, norm: bool, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(dim)
    model = model_of(heads, kv_heads, dim)
    qkv, rotation, norms = rope_case(model, 37, norm, dtype)
    keys, values = random(dtype, kv_heads, 60, dim), random(dtype, kv_heads, 60, dim)
    expected = keys.float(), values.float()
    queries = TorchOperations(model).rope_prompt(qkv.float(), rotation, *expected, 20, *wide(norms))
    found = NativeOperations(library, model, dtype).rope_prompt(qkv, rotation, keys, values, 20, *norms)
    check(found, queries, dtype)
    for ours, theirs in zip((keys, values), expected, strict=True):
        check(ours, theirs, dtype)


@DTYPES
def test_a_row_depends_neither_on_other_rows_nor_on_threads(library: CpuLibrary, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(3)
    model, rows = model_of(9, 3, 64), 300  # enough rows for several threads
    ops = NativeOperations(library, model, dtype)
    qkv, rotation, norms = rope_case(model, rows, True, dtype)
    x, weight, gate_up = random(dtype, rows, 576), random(dtype, 576), random(dtype, rows, 960)
    keys, values = (torch.empty(3, rows, 64, dtype=dtype) for _ in range(2))
    batch = Batch.of([request(row, 1) for row in range(rows)], torch.zeros(rows, 1, dtype=torch.int32))
    window = torch.zeros(rows, 3, 2, 2, 64, dtype=dtype)
    normed, activated = ops.add_rms_norm(x, None, weight), ops.silu_mul(gate_up)
    queries = ops.rope_append(qkv, batch, rotation, window, *norms)
    assert torch.equal(ops.rope_prompt(qkv, rotation, keys, values, 0, *norms), queries)
    torch.set_num_threads(1)
    for row in (0, 1, 150, 299):
        one = slice(row, row + 1)
        assert torch.equal(ops.add_rms_norm(x[one], None, weight), normed[one])
        assert torch.equal(ops.silu_mul(gate_up[one]), activated[one])
        own, turned = torch.zeros_like(window), tuple(part[one] for part in rotation)
        assert torch.equal(ops.rope_append(qkv[one], batch.subset([row]), turned, own, *norms), queries[one])
        assert torch.equal(own[row], window[row])
        assert torch.equal(torch.stack((keys[:, row], values[:, row]), dim=1), window[row, :, 1])


def test_tensors_that_the_kernels_cannot_read_are_refused(library: CpuLibrary) -> None:
    ops = NativeOperations(library, model_of(), torch.float32)
    with pytest.raises(
        KernelError, match=r"x: torch\.float32 on cpu, strides \(1, 4\): must be contiguous torch\.float32"
    ):
        ops.add_rms_norm(torch.zeros(64, 4).T, None, torch.zeros(64))
    with pytest.raises(KernelError, match=r"gate_up: torch\.bfloat16 on cpu.*convert it before"):
        ops.silu_mul(torch.zeros(1, 64, dtype=torch.bfloat16))


WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--max_batch_size", "3")
MODELS: dict[str, dict[str, Any]] = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen2": {}, "qwen3": {}}
NUMBERS = torch.arange(180).mul(7).remainder(100).tolist()
MOST = {"float32": 2e-5, "bfloat16": 0.15}  # of logits up to 5 or so


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("architecture", MODELS)
def test_prompts_and_steps_as_with_reference_kernels(
    architecture: str, dtype: str, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    model = random_model(architecture, **MODELS[architecture])

    def load(kernels: str) -> Any:
        directory: Path = build_engine(model, "full", *WINDOW, "--dtype", dtype, "--kernels", kernels)
        return Engine.load(directory).decoder

    prompts = {0: NUMBERS[:25], 1: NUMBERS[:60], 2: NUMBERS}
    check_agreement(load("native"), load("reference"), prompts, 12, room=20, most=MOST[dtype])
