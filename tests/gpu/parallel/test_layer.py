"""kvseek_sum_add_rms_norm against PyTorch: ranks on one GPU, each on a stream of its own, with inboxes in plain memory."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.conftest import MakeKernels
from torch import Tensor

from kvseek.core.model_config import ModelConfig
from kvseek.engine.parallel.cuda.ranks import RankLayerKernels
from kvseek.engine.parallel.cuda.sums import Inboxes, inbox_bytes
from kvseek.engine.parallel.reports import Reporter

pytestmark = pytest.mark.gpu

DIM, GROUP, EPSILON = 64, 3, 1e-6
SECONDS = 60.0  # that kernels may wait for each other before the test lets them end
WAIT_CYCLES = 20_000_000  # some 10 ms: one rank comes late
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


class OtherRanks:
    """Ranks of one process: only what RankLayerKernels asks of DeviceRanks, with sums that nobody may need."""

    def __init__(self, inboxes: Inboxes | None) -> None:
        self.inboxes, self.reporter = inboxes, Reporter()

    def sum(self, tensor: Tensor) -> Tensor:
        """In the place of a sum of all ranks: so that a test sees that it was called."""
        return tensor * 2


def make(
    kernels: MakeKernels, device: torch.device, dtype: str, ranks: int, hidden: int, rows: int
) -> tuple[list[RankLayerKernels], list[Inboxes]]:
    number: torch.dtype = getattr(torch, dtype)
    own = [
        torch.zeros(inbox_bytes(ranks, rows, hidden, number), dtype=torch.uint8, device=device) for _ in range(ranks)
    ]
    addresses = [inbox.data_ptr() for inbox in own]
    inboxes = [Inboxes.over(rank, inbox, addresses, rows) for rank, inbox in enumerate(own)]
    model = ModelConfig("llama", 1000, hidden, 64, 1, 12, 4, DIM, EPSILON, 1e6, 1 << 12)
    compiled = kernels(dtype, DIM, GROUP)
    ops: list[Any] = [RankLayerKernels(compiled, model, number, device, 64, OtherRanks(one)) for one in inboxes]  # type: ignore[arg-type]
    return ops, inboxes


def stop(inboxes: list[Inboxes]) -> None:
    """As SymmetricSums.release: copied beside kernels that wait."""
    ones = torch.ones(1, dtype=torch.int32).pin_memory()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for one in inboxes:
            one.stop.copy_(ones, non_blocking=True)


def wait(streams: list[Any], inboxes: list[Inboxes]) -> None:
    """Wait for all streams; kernels that wait for ever are let go, and the test fails."""
    begun = time.monotonic()
    while not all(stream.query() for stream in streams):
        if time.monotonic() - begun > SECONDS:
            stop(inboxes)
            torch.cuda.synchronize()
            pytest.fail(f"kernels of ranks did not find each other's parts within {SECONDS:g} s")
        time.sleep(0.001)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("ranks", "rows", "hidden"),
    [(2, 1, 4096), (2, 64, 4096), (3, 5, 72), (2, 3, 16_384), (4, 2, 8), (8, 2, 8192), (2, 2, 5120)],
)
def test_sums_of_ranks_in_turns(
    ranks: int, rows: int, hidden: int, dtype: str, kernels: MakeKernels, device: torch.device
) -> None:
    """Seven sums of changing rows, one rank late: every rank has the same numbers to the bit, those of the reference."""
    torch.manual_seed(7)
    ops, inboxes = make(kernels, device, dtype, ranks, hidden, rows)
    number: torch.dtype = getattr(torch, dtype)
    streams = [torch.cuda.Stream(device) for _ in range(ranks)]  # type: ignore[no-untyped-call]
    weight = torch.randn(hidden, device=device).to(number)
    x = torch.randn(rows, hidden, device=device).to(number)
    residuals, expected = [x.clone() for _ in range(ranks)], x
    for turn in range(7):
        size = rows if turn % 3 else (rows + 1) // 2
        parts = torch.randn(ranks, size, hidden, device=device).to(number)
        torch.cuda.synchronize()
        normed = list[Tensor]()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if rank == turn % ranks:
                    torch.cuda._sleep(WAIT_CYCLES)
                normed.append(ops[rank].add_rms_norm(residuals[rank][:size], parts[rank], weight))
        wait(streams, inboxes)
        total = parts[0].float()
        for rank in range(1, ranks):
            total = total + parts[rank].float()
        expected[:size] = (expected[:size].float() + total).to(number)
        reference = F.rms_norm(expected[:size].float(), (hidden,), weight.float(), EPSILON)
        for rank in range(ranks):
            assert torch.equal(residuals[rank], expected), (turn, rank)
            assert torch.equal(normed[rank], normed[0])
        assert (normed[0].float() - reference).abs().max() <= TOLERANCE[dtype] * reference.abs().max()


def test_sums_in_a_graph(kernels: MakeKernels, device: torch.device) -> None:
    """A graph that is replayed counts on by itself."""
    ops, inboxes = make(kernels, device, "bfloat16", 2, 4096, 4)
    weight, parts = torch.ones(4096, device=device).bfloat16(), torch.ones(2, 4, 4096, device=device).bfloat16()
    residuals = torch.zeros(2, 4, 4096, device=device).bfloat16()
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    torch.cuda.synchronize()
    for rank in range(2):
        with torch.cuda.graph(graphs[rank], stream=streams[rank]):
            for _ in range(5):
                ops[rank].add_rms_norm(residuals[rank], parts[rank], weight)
    for _ in range(3):
        for rank in range(2):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
    wait(streams, inboxes)
    assert residuals.eq(3 * 5 * 2).all()
    assert inboxes[0].counts.eq(15).all()


def test_kernels_that_wait_for_nobody_are_let_go(kernels: MakeKernels, device: torch.device) -> None:
    ops, inboxes = make(kernels, device, "bfloat16", 2, 4096, 4)
    x = torch.zeros(4, 4096, device=device).bfloat16()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(100):
            ops[0].add_rms_norm(x, x.clone(), x[0].clone())
    time.sleep(0.05)
    assert not stream.query(), "nobody else sums"
    stop(inboxes)
    wait([stream], inboxes)


def test_more_rows_than_inboxes_are_for_are_summed_before(kernels: MakeKernels, device: torch.device) -> None:
    """So are all rows where there are no inboxes, and what is added without a norm; nothing is summed if nothing is added."""
    ops, inboxes = make(kernels, device, "float32", 2, 64, 2)
    without: Any = SimpleNamespace(inboxes=None, sum=OtherRanks(None).sum)
    none = RankLayerKernels(ops[0]._kernels, ops[0].model, torch.float32, device, 64, without)
    weight = torch.ones(64, device=device)
    for one, rows in ((ops[0], 3), (none, 1)):
        x = torch.zeros(rows, 64, device=device)
        one.add_rms_norm(x, torch.ones_like(x), weight)
        assert x.eq(2).all()
        one.add(x, torch.ones_like(x))
        one.add_rms_norm(x, None, weight)
        assert x.eq(4).all()
    assert inboxes[0].counts.eq(0).all()
