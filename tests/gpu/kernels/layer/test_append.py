"""kvseek_append against PyTorch: rotated keys, and values, of a decode step go to the requests' window rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.conftest import MakeKernels
from tests.gpu.kernels.layer.test_layer import KV_HEADS, make, random, requests, state
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, pack
from kvseek.core.errors import KernelError
from kvseek.kernels.cuda.layer.layer import LayerKernels

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "bfloat16", "float16")
SLOTS, ROWS = 9, 11
STATES = [state(1, 7, 100_000, 10), state(1, 0, 3, 0), state(1, 8, 50, 4)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(6)


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


def test_it_is_what_rope_append_writes(kernels: MakeKernels, device: torch.device) -> None:
    """Keys that are rotated by an angle of zero stay as they are: both kernels write the same rows."""
    ops = make(kernels, device, "float16", 64)
    keys, values, window = world(ops, len(STATES), 64)
    batch, other = requests(device, STATES), window.clone()
    qkv = torch.cat((random(ops, len(STATES), 12, 64), keys, values), dim=1).flatten(1)
    flat = (torch.ones(len(STATES), 32, device=device), torch.zeros(len(STATES), 32, device=device))
    ops.rope_append(qkv, batch, flat, other, None, None)
    ops.append(keys, values, batch, window)
    assert torch.equal(window, other)


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
