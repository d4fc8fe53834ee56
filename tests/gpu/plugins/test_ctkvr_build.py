"""Lists of CTkvr's centroids as the GPU builds them, against the PyTorch definition."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.plugins.ctkvr.settings import BY_KEYS
from torch import Tensor

from kvseek.bench.methods import method_kernels
from kvseek.core.cuda import CudaKernels
from kvseek.plugins.ctkvr import device_build
from kvseek.plugins.ctkvr.build import attention_values
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.device_build import DeviceBuilder, Sampling

pytestmark = pytest.mark.gpu

KV_HEADS = 2
# dtype, head_dim, group size
SHAPES = [
    ("bfloat16", 128, 4),
    ("float16", 64, 3),
    ("float32", 96, 1),
    ("bfloat16", 256, 8),
    ("float32", 128, 16),
    ("bfloat16", 64, 1),
]


load_kernels = partial(method_kernels, "ctkvr", Config(**BY_KEYS))


def random_case(dtype: str, dim: int, group: int, centroids: int, n: int) -> tuple[Tensor, Tensor]:
    """Queries [H, C, D] that differ in norm by head, and keys [G, n, D] with a few loud channels, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    loud = 1 + 6 * (torch.rand(KV_HEADS, 1, dim, device="cuda", generator=generator) > 0.9)
    keys = (torch.randn(KV_HEADS, n, dim, device="cuda", generator=generator) + 0.3) * loud
    norms = 0.3 + 2 * torch.rand(KV_HEADS * group, 1, 1, device="cuda", generator=generator)
    queries = torch.randn(KV_HEADS * group, centroids, dim, device="cuda", generator=generator) * norms
    return queries.to(getattr(torch, dtype)), keys.to(getattr(torch, dtype))


def build(kernels: CudaKernels, queries: Tensor, keys: Tensor, rho: int) -> Tensor:
    """Lists, after a check that nothing else was written."""
    centroids = queries.shape[1]
    room = torch.full((KV_HEADS, centroids + 3, rho), -7, dtype=torch.int32, device="cuda")
    DeviceBuilder(kernels, queries.shape[0] // KV_HEADS, rho, queries.shape[2] ** -0.5).build(queries, keys, room)
    assert (room[:, centroids:] == -7).all()
    return room[:, :centroids]


def check(lists: Tensor, queries: Tensor, keys: Tensor) -> None:
    """Lists hold the best rho places once each, but for values that agree to the rounding of the logits."""
    n, scaling = keys.shape[1], queries.shape[2] ** -0.5
    ordered = lists.sort(dim=2).values.long()
    assert ordered.min() >= 0
    assert ordered.max() < n
    assert (ordered.diff(dim=2) > 0).all(), "no place twice"
    for head in range(KV_HEADS):
        lanes = queries.view(KV_HEADS, -1, *queries.shape[1:])[head]
        values = attention_values(lanes, keys[head], scaling)
        chosen = torch.zeros_like(values, dtype=torch.bool).scatter_(1, ordered[head], True)
        smallest = torch.where(chosen, values, torch.inf).amin(dim=1)
        best_left = torch.where(chosen, -torch.inf, values).amax(dim=1)
        # 16-bit inputs are multiplied exactly and summed in float32; float32 inputs are rounded to 11 bits first.
        error = 2e-3 if queries.dtype is torch.float32 else 2e-6
        bound = 1e-4 + error * lanes.float().norm(dim=-1).max() * keys[head].float().norm(dim=-1).max() * scaling
        excess = (best_left - smallest).max()
        assert excess <= bound, f"a key that was left out is better by {excess:.2e}, allowed are {bound:.2e}"


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize(
    ("centroids", "n", "rho"), [(1, 41, 40), (37, 1025, 300), (130, 5003, 1280), (9, 70_001, 2560)]
)
@pytest.mark.parametrize(("dtype", "dim", "group"), SHAPES)
def test_lists(dtype: str, dim: int, group: int, centroids: int, n: int, rho: int) -> None:
    queries, keys = random_case(dtype, dim, group, centroids, n)
    lists = build(load_kernels(dtype, dim, group), queries, keys, rho)
    check(lists, queries, keys)


@pytest.mark.parametrize("order", ["ascending", "descending", "runs"])
@pytest.mark.parametrize("group", [1, 4])
def test_keys_in_order_of_their_scores(group: int, order: str) -> None:
    queries, keys = random_case("bfloat16", 64, group, 17, 20_000)
    ramp = torch.linspace(-3, 3, 20_000, device="cuda")
    if order == "descending":
        ramp = ramp.flip(0)
    if order == "runs":
        ramp = ramp.view(8, -1)[torch.tensor([3, 1, 7, 0, 6, 2, 5, 4], device="cuda")].flatten()
    keys = (keys * 0.05 + ramp[:, None] * queries[0, 0].float().sign()).bfloat16()
    queries = (queries * 0.1 + queries[0, 0].sign()).bfloat16()
    check(build(load_kernels("bfloat16", 64, group), queries, keys, 500), queries, keys)


def test_ties_go_to_the_lowest_place() -> None:
    kernels = load_kernels("bfloat16", 128, 4)
    queries, keys = random_case("bfloat16", 128, 4, 5, 9000)
    keys[:] = keys[:, :1]
    lists = build(kernels, queries, keys, 1280)
    assert torch.equal(lists.sort(dim=2).values, torch.arange(1280, device="cuda", dtype=torch.int32).expand_as(lists))
    half = keys.clone()
    half[:, 4000:] *= 2  # better or worse for a head, and ties among themselves
    ordered = build(kernels, queries, half, 1280).sort(dim=2).values
    assert (ordered.diff(dim=2) == 1).all()
    assert set(ordered[..., 0].flatten().tolist()) <= {0, 4000}


@pytest.mark.parametrize("n", [3001, 9001])
def test_bands_strides_and_samples_change_nothing(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    kernels = load_kernels("bfloat16", 128, 4)
    queries, keys = random_case("bfloat16", 128, 4, 70, n)
    whole = build(kernels, queries, keys, 400)
    strided = torch.empty(KV_HEADS, n + 100, 128, dtype=torch.bfloat16, device="cuda")
    strided.fill_(torch.nan)
    strided[:, 50 : 50 + n] = keys
    monkeypatch.setattr(device_build, "WORK_BYTES", 1)
    monkeypatch.setattr(device_build, "SAMPLES", 700)
    parts = build(kernels, queries.transpose(0, 1).contiguous().transpose(0, 1), strided[:, 50 : 50 + n], 400)
    check(parts, queries, keys)
    same = (whole.sort(dim=2).values == parts.sort(dim=2).values).float().mean()
    assert same > 0.995, "another number of blocks may share the keys, and round their sums another way"


@pytest.mark.parametrize(("rank", "capacity"), [(3, 4096), (700, 912)])
@pytest.mark.parametrize(("dtype", "dim", "group"), SHAPES)
def test_bounds_that_fail(
    monkeypatch: pytest.MonkeyPatch, dtype: str, dim: int, group: int, rank: int, capacity: int
) -> None:
    # Too few candidates reach the bound, or too many for their room: the keys are searched one by one.
    queries, keys = random_case(dtype, dim, group, 6, 20_000)
    monkeypatch.setattr(Sampling, "of", classmethod(lambda cls, tokens, rho: cls(25, 800, rank, capacity)))
    check(build(load_kernels(dtype, dim, group), queries, keys, 400), queries, keys)


@pytest.mark.parametrize("scale", [1e-8, 1e4])
def test_tiny_and_huge_numbers(scale: float) -> None:
    queries, keys = random_case("bfloat16", 128, 4, 20, 4000)
    keys, queries = keys * scale, queries / scale
    check(build(load_kernels("bfloat16", 128, 4), queries, keys, 200), queries, keys)


def test_the_same_twice() -> None:
    kernels = load_kernels("float16", 64, 3)
    queries, keys = random_case("float16", 64, 3, 64, 30_000)
    first, *others = (build(kernels, queries, keys, 1280).sort(dim=2).values for _ in range(4))
    for other in others:
        assert torch.equal(first, other), "lists are sets: equal whatever the order of their places"


def test_all_lists_of_a_long_prompt() -> None:
    # Several rounds of tiles, and a length that is served.
    queries, keys = random_case("bfloat16", 128, 4, 300, 131_072 - 320)
    check(build(load_kernels("bfloat16", 128, 4), queries, keys, 1280)[:, -30:], queries[:, -30:], keys)
