"""Host steps of CTkvr for tests: random rows in a poisoned pool, and the same step defined in float64."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.kernels.arguments import pointers
from kvseek.kernels.reference.codes.key_codes import STEPS, KeyCodes, encode, estimate_all, mean_integers, round_lanes
from kvseek.kernels.reference.codes.rotation import padded_dim, rotate, rotation_signs
from kvseek.plugins.ctkvr.native import TYPES, HostStep, host_step

EXTENT = 1024
NAN = float("nan")
CODE_ARRAYS = ("high", "low", "scales", "means", "mean_steps")
BLOCK = 256  # places that share a mean


@dataclass
class Case:
    """A batch, what it recalls, and room for the results of a step; every row that is not recalled is NaN.

    With `bits`, keys are ranked by codes of so many bits, and the rows have no address.
    """

    counts: Sequence[Sequence[int]]  # [batch][G] recalled places
    group: int
    dim: int
    dtype: torch.dtype
    top_k: int
    rho: int
    tokens: int = 3000
    seed: int = 0
    loudness: float = 1.0
    bits: int = 0
    queries: Tensor = field(init=False)
    rows: Tensor = field(init=False)
    recalled: Tensor = field(init=False)
    table: Tensor = field(init=False)
    slots: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        batch, kv_heads = len(self.counts), len(self.counts[0])
        extents = -(-self.tokens // EXTENT)
        self.heads, self.kv_heads, self.scaling = kv_heads * self.group, kv_heads, self.dim**-0.5
        queries = torch.randn(batch, self.heads, self.dim, generator=random)
        self.queries = (self.loudness * queries).to(self.dtype)
        self.slots = torch.arange(batch - 1, -1, -1, dtype=torch.int32)
        order = torch.randperm(batch * extents, generator=random)
        self.table = torch.full((batch, extents + 1), -1, dtype=torch.int32)
        self.table[:, :extents] = order.view(batch, extents)
        pool = torch.full((batch * extents, 2, kv_heads, EXTENT, 2, self.dim), NAN).to(self.dtype)
        self.rows = pool[:, 1]  # the second of two layers
        capacity = max(1, max(map(max, self.counts)))
        self.recalled = torch.full((batch, kv_heads, capacity), -1, dtype=torch.int32)
        self.signs, planes = rotation_signs(self.seed, padded_dim(self.dim)), self.rows.shape[:3]
        self.high = torch.full((*planes, padded_dim(self.dim) // 4), 255, dtype=torch.uint8)
        self.low, self.scales = self.high.clone()[..., : 256 * (self.bits == 4)], torch.full(planes, NAN).half()
        blocks = (*planes[:2], EXTENT // BLOCK)
        self.means = torch.randint(-127, 128, (*blocks, 2, padded_dim(self.dim)), generator=random).to(torch.int8)
        self.mean_steps = torch.rand(blocks, generator=random) / 10_000
        for request, head in itertools.product(range(batch), range(kv_heads)):
            count = self.counts[request][head]
            places = torch.randperm(self.tokens, generator=random)[:count].sort().values
            self.recalled[request, head, :count] = places
            rows = torch.randn(count, 2, self.dim, generator=random).to(self.dtype)
            where = self.table[self.slots[request], places // EXTENT].long()
            self.rows[where, head, places % EXTENT] = rows
            if self.bits and count:
                block = (where, head, places % EXTENT // BLOCK)
                means = mean_integers(self.means[block]) * self.mean_steps[block][:, None]
                codes = encode(rotate(rows[:, 0], self.signs) - means, self.bits)
                for name, values in zip(CODE_ARRAYS[:3], codes, strict=True):
                    getattr(self, name)[where, head, places % EXTENT] = values
        self.recalled_count = torch.tensor(self.counts, dtype=torch.int32)
        self.out = torch.full((batch, self.heads, self.dim), NAN)
        self.lse = torch.full((batch, self.heads), NAN)
        self.selected = torch.full((batch, kv_heads, self.top_k), -2, dtype=torch.int32)
        self.best = torch.full((batch, kv_heads, self.rho), -2, dtype=torch.int32)
        self.error = ctypes.c_int32(0)

    def step(self, pool: int = 0, threads: int = 1) -> ctypes.Structure:
        """Arguments of the step, for threads of a pool or of the OpenMP runtime."""
        codes = {
            "block": BLOCK,
            "padded_dim": padded_dim(self.dim),
            "step": STEPS.get(self.bits, 0),
        }
        arrays = (*CODE_ARRAYS, "signs") if self.bits else ("rows", "out", "lse")
        return HostStep(
            pool=pool,
            **pointers(self, "queries", "recalled", "recalled_count", "slots", "table", *arrays),
            **pointers(self, "selected", "best"),
            **codes,
            error=ctypes.addressof(self.error),
            extent_stride=self.rows.stride(0),
            batch=len(self.counts),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            capacity=self.recalled.shape[2],
            top_k=self.top_k,
            rho=self.rho,
            table_slots=self.table.shape[0],
            max_extents=self.table.shape[1],
            dtype=TYPES[self.dtype],
            threads=threads,
            scaling=self.scaling,
        )

    def run(self, library: CpuLibrary, pool: int = 0, threads: int = 1) -> int:
        """Run the step once; its error code."""
        step = self.step(pool, threads)
        self.error.value = 0
        host_step(library)(step)
        return self.error.value

    def scores(self, request: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Places [c], scaled scores [g, c] and value rows [c, D] of a task, float64."""
        places = self.recalled[request, head, : self.counts[request][head]].long()
        where = self.table[self.slots[request], places // EXTENT].long()
        rows = self.rows[where, head, places % EXTENT].double()
        queries = self.queries[request, head * self.group : (head + 1) * self.group].double()
        if self.bits:
            arrays = [getattr(self, name)[where, head, places % EXTENT][None] for name in CODE_ARRAYS[:3]]
            arrays += [getattr(self, name)[where, head, places % EXTENT // BLOCK][None] for name in CODE_ARRAYS[3:]]
            lanes = round_lanes(rotate(queries[None], self.signs))
            estimates = estimate_all(KeyCodes(*arrays), lanes)[0]
            return places, estimates.double() * self.scaling, rows[:, 1]
        return places, queries @ rows[:, 0].T * self.scaling, rows[:, 1]


def check_results(case: Case, tolerance: float) -> None:
    """Assert that a step that has run did what float64 says; keys whose values agree to `tolerance` may change places."""
    for request, head in itertools.product(range(len(case.counts)), range(case.kv_heads)):
        if case.counts[request][head]:
            _check_task(case, request, head, tolerance)
        else:
            _check_nothing(case, request, head)


def _check_task(case: Case, request: int, head: int, tolerance: float) -> None:
    places, scores, rows = case.scores(request, head)
    values = (scores - scores.logsumexp(dim=1, keepdim=True)).amax(dim=0)
    number_of = {place: number for number, place in enumerate(places.tolist())}

    def check_best(found: list[int], wanted: int) -> list[int]:
        count = min(wanted, len(places))
        assert all(place == -1 for place in found[count:])
        numbers = [number_of[place] for place in found[:count]]
        assert numbers == sorted(set(numbers)), "ascending, none twice"
        left_out = sorted(set(range(len(places))) - set(numbers))
        if left_out:
            assert values[numbers].min() >= values[left_out].max() - tolerance
        return numbers

    chosen = check_best(case.selected[request, head].tolist(), case.top_k)
    check_best(case.best[request, head].tolist(), case.rho)
    if case.bits:
        return
    heads = slice(head * case.group, (head + 1) * case.group)
    expected = scores[:, chosen].softmax(dim=1) @ rows[chosen]
    torch.testing.assert_close(case.out[request, heads].double(), expected, rtol=tolerance, atol=tolerance)
    expected = scores[:, chosen].logsumexp(dim=1)
    torch.testing.assert_close(case.lse[request, heads].double(), expected, rtol=tolerance, atol=tolerance)


def _check_nothing(case: Case, request: int, head: int) -> None:
    heads = slice(head * case.group, (head + 1) * case.group)
    assert case.bits or case.out[request, heads].eq(0).all()
    assert case.bits or case.lse[request, heads].eq(-torch.inf).all()
    assert case.selected[request, head].eq(-1).all()
    assert case.best[request, head].eq(-1).all()
