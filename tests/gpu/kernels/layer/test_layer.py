"""The kernels of layer.cu and of append.cu against PyTorch, over dtypes, head sizes and row counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.conftest import MakeKernels
from torch import Tensor

from kvseek.core.batch import LATEST, Batch, RequestState, pack
from kvseek.core.errors import KernelError
from kvseek.core.model_config import ModelConfig, RopeScaling
from kvseek.core.rope import RotaryEmbedding, Rotation, rotate
from kvseek.engine.draws.sampling import NO_TOKEN
from kvseek.kernels.cuda.layer.layer import LayerKernels

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, GROUP = 12, 4, 3
DTYPES = ("float32", "bfloat16", "float16")
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}  # a rounding or two, relative to the largest number
YARN = RopeScaling("yarn", 4.0, 4096)
# A token at position 12,345 ends a sequence of 12,346 tokens, the longest that is short.
LONGROPE = RopeScaling(
    "longrope",
    8.0,
    12_346,
    short_factor=tuple(1.0 + 0.1 * pair for pair in range(32)),
    long_factor=tuple(1.0 + pair for pair in range(32)),
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def make(kernels: MakeKernels, device: torch.device, dtype: str, dim: int = 64, **sizes: Any) -> LayerKernels:
    values = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64, "rope_scaling": None, **sizes}
    model = ModelConfig(
        "qwen3",
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=1 << 20,
        **values,
    )
    return LayerKernels(kernels(dtype, dim, GROUP), model, getattr(torch, dtype), device, max_batch=64)


def random(ops: LayerKernels, *shape: int) -> Tensor:
    return torch.randn(shape, device=ops.device).to(ops.dtype)


def check(found: Tensor, expected: Tensor, dtype: str) -> None:
    assert found.shape == expected.shape
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype]


def requests(device: torch.device, states: list[RequestState]) -> Batch:
    return Batch.of(states, torch.zeros(9, 1, dtype=torch.int32, device=device))


def state(token: int, slot: int, position: int, row: int) -> RequestState:
    return RequestState(token=token, slot=slot, position=position, write_row=row, ring_rows=1, length=0, dense=True)


@pytest.mark.parametrize("rows", [1, 3, 2000])
@pytest.mark.parametrize("hidden", [8, 576, 2056, 4096, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: str, hidden: int, rows: int, kernels: MakeKernels, device: torch.device) -> None:
    ops = make(kernels, device, dtype, hidden_size=hidden)
    x, delta, weight = random(ops, rows, hidden), random(ops, rows, hidden), random(ops, hidden)
    total = x + delta
    for added, expected in ((None, x.clone()), (delta, total)):
        out = ops.add_rms_norm(x, added, weight)
        assert torch.equal(x, expected)
        check(out, F.rms_norm(expected.float(), (hidden,), weight.float(), 1e-6), dtype)


@pytest.mark.parametrize("scaling", [None, YARN, LONGROPE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_step_begin(dtype: str, scaling: RopeScaling | None, kernels: MakeKernels, device: torch.device) -> None:
    ops = make(kernels, device, dtype, rope_scaling=scaling)
    embed, positions = random(ops, 1000, 64), [0, 7, 12_345, 12_346, 130_003]
    states = [state(token, 0, position, 0) for token, position in zip((0, 999, 5, 5, 5), positions, strict=True)]
    x, rotation = ops.step_begin(requests(device, states), embed)
    assert torch.equal(x, embed[[0, 999, 5, 5, 5]])
    part, _ = ops.step_begin(requests(device, states), embed[5:999].contiguous(), 5)  # a rank's rows of the vocabulary
    assert torch.equal(part, x * torch.tensor([0, 0, 1, 1, 1], device=device, dtype=x.dtype)[:, None])
    expected = RotaryEmbedding(ops.model, torch.device("cpu")).at(positions)
    for found, table in zip(rotation, expected, strict=True):
        torch.testing.assert_close(found.cpu(), table, rtol=0, atol=3e-6)
    for row in (2, 3):
        for found, other in zip(
            rotation, ops.rotation(positions[row], positions[row] + 1, positions[row] + 1), strict=True
        ):
            torch.testing.assert_close(found[row : row + 1], other, rtol=0, atol=1e-6)


def split(qkv: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys [rows, heads, D] in float32, and values, as they should come out."""
    size = rotation[0].shape[1] * 2
    q, k, v = qkv.view(qkv.shape[0], -1, size).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    q, k = q.float(), k.float()
    if norms is not None:
        q, k = (F.rms_norm(x, (size,), norm.float(), 1e-6) for x, norm in zip((q, k), norms, strict=True))
    return rotate(q, rotation), rotate(k, rotation), v


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_append(dtype: str, dim: int, norm: bool, kernels: MakeKernels, device: torch.device) -> None:
    ops = make(kernels, device, dtype, dim)
    norms = (random(ops, dim), random(ops, dim)) if norm else None
    states = [state(1, 7, 100_000, 10), state(1, 0, 3, 0), state(1, 8, 50, 4)]
    batch = requests(device, states)
    _, rotation = ops.step_begin(batch, random(ops, 1000, 64))
    qkv, window = random(ops, 3, (HEADS + 2 * KV_HEADS) * dim), random(ops, 9, KV_HEADS, 11, 2, dim)
    before = window.clone()
    q, k, v = split(qkv, rotation, norms)
    found = ops.rope_append(qkv, batch, rotation, window, *(norms or (None, None)))
    check(found, q, dtype)
    for request, one in enumerate(states):
        written = window[one.slot, :, one.write_row]
        check(written[:, 0], k[request], dtype)
        assert torch.equal(written[:, 1], v[request])
        before[one.slot, :, one.write_row] = written
    assert torch.equal(window, before), "rows of others stay as they were"


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_prompt(dtype: str, norm: bool, kernels: MakeKernels, device: torch.device) -> None:
    ops = make(kernels, device, dtype, 128)
    norms = (random(ops, 128), random(ops, 128)) if norm else None
    start, rows, tokens = 300, 517, 1000
    qkv, rotation = random(ops, rows, (HEADS + 2 * KV_HEADS) * 128), ops.rotation(start, start + rows, start + rows)
    keys = torch.full((KV_HEADS, tokens, 128), 3.0, dtype=ops.dtype, device=device)
    values = torch.full_like(keys, 4.0)
    q, k, v = split(qkv, rotation, norms)
    check(ops.rope_prompt(qkv, rotation, keys, values, start, *(norms or (None, None))), q, dtype)
    inside = slice(start, start + rows)
    check(keys[:, inside], k.transpose(0, 1), dtype)
    assert torch.equal(values[:, inside], v.transpose(0, 1))
    for array, kept in ((keys, 3.0), (values, 4.0)):
        assert (array[:, :start] == kept).all()
        assert (array[:, start + rows :] == kept).all()


@pytest.mark.parametrize("size", [8, 1536, 2056, 14336])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: str, size: int, kernels: MakeKernels, device: torch.device) -> None:
    ops = make(kernels, device, dtype, intermediate_size=size)
    gate_up = random(ops, 5, 2 * size) * 4
    gate_up[0, 0] = -200.0  # exp(200) is infinite in float32
    gate, up = gate_up.float().chunk(2, dim=-1)
    check(ops.silu_mul(gate_up), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("vocabulary", [1, 384, 1003, 49152, 128256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax(dtype: str, vocabulary: int, kernels: MakeKernels, device: torch.device) -> None:
    ops = make(kernels, device, dtype)
    for batch in (1, 64):
        logits = random(ops, batch, vocabulary)  # 16-bit numbers: rows have equal largest ones now and then
        expected = logits.float().cpu().max(dim=1).indices
        assert torch.equal(ops.argmax(logits).cpu().long(), expected)


def test_argmax_of_odd_numbers(kernels: MakeKernels, device: torch.device) -> None:
    ops = make(kernels, device, "bfloat16")
    logits = torch.full((6, 5000), -7.0, dtype=torch.bfloat16, device=device)
    logits[0, [4000, 4001]] = 1.0
    logits[1, 4999], logits[1, 17] = 0.0, -0.0
    logits[2, 9] = float("nan")
    logits[3, 9] = float("inf")
    logits[4] = float("-inf")
    logits[5], logits[5, 4998] = float("-inf"), -1e30
    for _ in range(3):  # the scratch is as it was
        assert ops.argmax(logits).tolist() == [4000, 17, NO_TOKEN, NO_TOKEN, NO_TOKEN, 4998]


def test_a_step_finds_the_tokens_of_the_one_before(kernels: MakeKernels, device: torch.device) -> None:
    """By slot, whatever the order of the requests; one that got none has zeros for an embedding."""
    ops = make(kernels, device, "bfloat16")
    embed, logits = random(ops, 1000, 64), random(ops, 4, 1000)
    logits[3] = float("nan")
    latest = torch.full((9,), 500, dtype=torch.int32, device=device)
    before = replace(requests(device, [state(7, slot, 3, 0) for slot in (4, 0, 8, 2)]), latest=latest)
    tokens = ops.argmax(logits, before).tolist()
    assert latest.tolist() == [tokens[1], 500, NO_TOKEN, 500, tokens[0], 500, 500, 500, tokens[2]]
    states = [state(token, slot, 4, 0) for token, slot in ((LATEST, 8), (9, 0), (LATEST, 4), (LATEST, 2))]
    after = replace(requests(device, states), latest=latest)
    x, _ = ops.step_begin(after, embed)
    assert torch.equal(x[:3], embed[[tokens[2], 9, tokens[0]]])
    assert not x[3].any()


SLOTS, ROWS = 9, 11
STATES = [state(1, 7, 100_000, 10), state(1, 0, 3, 0), state(1, 8, 50, 4)]


def expect(window: Tensor, keys: Tensor, values: Tensor, states: list[RequestState]) -> Tensor:
    """The window as it should be afterwards."""
    after = window.clone()
    for request, one in enumerate(states):
        after[one.slot, :, one.write_row] = torch.stack((keys[request], values[request]), dim=1)
    return after


def world(ops: LayerKernels, count: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of a step, and a window."""
    return (*(random(ops, count, KV_HEADS, dim) for _ in range(2)), random(ops, SLOTS, KV_HEADS, ROWS, 2, dim))


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_requests(dtype: str, dim: int, kernels: MakeKernels, device: torch.device) -> None:
    ops = make(kernels, device, dtype, dim)
    keys, values, window = world(ops, len(STATES), dim)
    expected = expect(window, keys, values, STATES)
    ops.append(keys, values, requests(device, STATES), window)
    assert torch.equal(window, expected), "bit for bit, and rows of others as they were"


def test_the_largest_bucket(kernels: MakeKernels, device: torch.device) -> None:
    """Sixty-four requests, of which some pad the bucket: those write the same row."""
    ops = make(kernels, device, "bfloat16", 128)
    own = [state(1, slot, 7, row) for slot in range(8) for row in range(7)]
    states = [*own, *[state(0, 8, 0, 0)] * (64 - len(own))]
    keys, values, window = world(ops, 64, 128)
    keys[len(own) :], values[len(own) :] = keys[-1:], values[-1:]
    expected = expect(window, keys, values, states)
    ops.append(keys, values, requests(device, states), window)
    assert torch.equal(window, expected)


def test_a_graph_follows_its_requests(kernels: MakeKernels, device: torch.device) -> None:
    """A replay reads keys, values, slots and rows as they are then."""
    ops = make(kernels, device, "bfloat16", 128)
    keys, values, window = world(ops, len(STATES), 128)
    batch: Batch = requests(device, STATES)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.append(keys, values, batch, window)
    moved = [state(1, 2, 9, 1), state(1, 3, 9, 10), state(1, 4, 9, 5)]
    batch.requests.copy_(pack(moved))
    keys.copy_(random(ops, *keys.shape))
    values.copy_(random(ops, *values.shape))
    expected = expect(window, keys, values, moved)
    graph.replay()
    assert torch.equal(window, expected)


def test_wrong_tensors_are_refused(kernels: MakeKernels, device: torch.device) -> None:
    ops = make(kernels, device, "bfloat16", 64)
    keys, values, window = world(ops, len(STATES), 64)
    batch, before = requests(device, STATES), window.clone()
    with pytest.raises(KernelError, match=r"append: shape of values.*\(3, 4, 64\)"):
        ops.append(keys, values[:2], batch, window)
    with pytest.raises(KernelError, match=r"keys: torch.float32"):
        ops.append(keys.float(), values, batch, window)
    torch.cuda.synchronize()
    assert torch.equal(window, before)
