"""The ranks of an engine on GPUs: sums on the device, on the way of a layer too, and what all must agree on while they load."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from kvseek.core.batch import buckets_for
from kvseek.core.config import EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.model_config import ModelConfig
from kvseek.engine.cache.host_memory import available_bytes
from kvseek.engine.cache.row_storage import can_pin
from kvseek.engine.parallel.nodes import LOOPBACK
from kvseek.engine.parallel.ranks import Ranks, using_interface_to
from kvseek.engine.parallel.reports import Reporter
from kvseek.kernels.cuda.layer.layer import LayerKernels, norm_threads
from kvseek.kernels.structs import c_struct

from .gpus import ranks_on, take_gpu
from .sums import (
    NCCL,
    SMALL_BYTES,
    SYMMETRIC,
    Inboxes,
    NcclSums,
    Sums,
    SymmetricSums,
    choose,
    inbox_rows,
    measure,
    try_to_make,
)

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels


# That a rank waits for another one while weights are read: long, as rank 0 notices earlier that one hangs, and ends the others.
LOADING_SECONDS = 3600.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceRanks(Ranks):
    """Ranks that compute on GPUs of one host. gloo joins them, and they sum on their GPUs.

    Attributes
    ----------
    device : torch.device
        This rank's GPU.
    sharers : int
        Ranks that compute on it.
    small, large : Sums
        How tensors of decode steps are summed, and larger ones.
    """

    device: torch.device
    sharers: int
    small: Sums
    large: Sums
    loading: dist.ProcessGroup

    @classmethod
    def over(cls, ranks: Ranks, config: EngineConfig, made: list[Sums]) -> DeviceRanks:
        """Take this rank's GPU, and find out with the others how they sum.

        Parameters
        ----------
        config : EngineConfig
            Of all ranks.
        made : list of Sums
            Ways to sum are added to it as soon as they are there, for a thread that may have to release their kernels.

        Raises
        ------
        ConfigError
            If there are fewer GPUs than ranks.
        SumError
            If the GPUs cannot sum.
        """
        reporter = ranks.reporter
        device = take_gpu(ranks.rank, ranks.size)
        sharers, dtype = ranks_on(device, ranks.size), getattr(torch, config.dtype)
        assert dist.group.WORLD is not None, "the ranks have joined"
        reporter.doing("joins the ranks on GPUs")

        def join() -> dist.ProcessGroup:
            with using_interface_to(LOOPBACK):
                group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=LOADING_SECONDS))
            return group

        loading = reporter.apart(join)
        most = partial(_most, reporter, loading)
        exchanges = int(most(SymmetricSums.exchanges))
        with using_interface_to(LOOPBACK):
            SymmetricSums.catch_up(exchanges, ranks.rank, device)
        hidden = config.model.hidden_size
        size = inbox_rows(config.max_batch_size, hidden, dtype), hidden
        makers: dict[str, Callable[[], Sums]] = {
            SYMMETRIC: partial(SymmetricSums, dist.group.WORLD, device, dtype, *size)
        }
        if most(sharers) == 1:  # NCCL refuses several ranks on one GPU
            makers[NCCL] = partial(NcclSums, device)
        names, ways, seconds = list(makers), dict[str, Sums](), dict[str, float]()
        rows = buckets_for(config.max_batch_size)[-1]
        for name, make in makers.items():
            sums = make_together(ranks, loading, name, partial(_make_on, device, make))
            if sums is None:
                continue
            made.append(sums)
            ways[name] = sums
            reporter.doing(f"times sums by {name}")
            seconds[name] = most(measure(sums, rows, hidden, dtype, device))  # as slow as the slowest rank
        chosen = names.index(choose(seconds))
        small = names[int(most(chosen if ranks.rank == 0 else -1))]  # clocks differ, so rank 0 decides
        taken = ", ".join(f"{name} {own * 1e6:.1f} us" for name, own in seconds.items())
        logger.info("ranks on GPUs sum decode steps by %s; a sum of [%d, %d] takes: %s", small, rows, hidden, taken)
        large = ways.get(NCCL, ways[small])
        return cls(ranks.rank, ranks.size, device, sharers, ways[small], large, loading, reporter=reporter)

    @property
    def way(self) -> str:
        return self.small.name

    @property
    def inboxes(self) -> Inboxes | None:
        """By which kernels of all ranks hand each other their parts of decode steps; None where NCCL sums."""
        return self.small.inboxes if isinstance(self.small, SymmetricSums) else None

    def leave(self) -> None:
        """See Ranks. What waits on the GPU for other ranks has been released."""
        with suppress(RuntimeError):  # of a kernel that failed, which has been told
            torch.cuda.synchronize(self.device)
        for sums in {id(one): one for one in (self.small, self.large)}.values():
            sums.close()
        super().leave()

    def sum(self, tensor: Tensor) -> Tensor:
        """See Ranks. On the GPU, and captured in a graph if one is being captured; `tensor` may be overwritten."""
        self.reporter.step()
        return (self.small if tensor.nbytes <= SMALL_BYTES else self.large).sum(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        """See Ranks; all ranks get the result, as all draw the token with the largest logit.

        It is a sum in which all but one rank add zeros, so it is exact, and needs no other way than sums.
        """
        rows, own = tensor.shape
        whole = tensor.new_zeros(rows, self.size * own)
        whole[:, self.rank * own : (self.rank + 1) * own] = tensor
        return self.sum(whole)

    def free_bytes(self) -> int:
        """Return the device memory that this rank may still take, in bytes, the same on all ranks: that of the fullest GPU.

        Ranks that share a GPU divide what it has free. All ranks call this when each has read its weights.
        """
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize(self.device)
        self._wait()  # until the others have freed what they do not need
        free, _ = torch.cuda.mem_get_info(self.device)
        return -int(_most(self.reporter, self.loading, -(free // self.sharers)))  # and until they have looked, too

    def check_host_memory(self, size: int) -> None:
        """Raise CapacityError unless all ranks can pin `size` bytes of host memory each; all ranks call this before they do."""
        available = available_bytes()
        fits = can_pin(self.size * size, available)
        self._wait()  # nobody pins before all have looked
        if not fits:
            raise CapacityError(
                f"the row pools of {self.size} ranks need {self.size * size:,} bytes of host memory together, {available:,} are "
                "available; lower cache.kv_cache_host_memory_bytes, max_batch_size or max_seq_len"
            )

    def _wait(self) -> None:
        _most(self.reporter, self.loading, 0)


def make_together(
    ranks: Ranks, loading: dist.ProcessGroup, name: str, make: Callable[[], tuple[Sums | None, str]]
) -> Sums | None:
    """Make a way to sum on all ranks; None if it cannot be made on one of them, which all say then.

    A rank that fails alone may keep the others waiting in `make`, for ever in NCCL. It tells of that in its report, and rank 0
    ends the engine with its name and reason (reports.py), as nothing can end such a wait and keep the process group.

    Parameters
    ----------
    make : callable
        Returns the way, or None and why not. It is called in another thread.
    """
    ranks.reporter.doing(f"connects the GPUs by {name}")
    sums, reason = ranks.reporter.apart(make)
    if sums is None:
        logger.warning("rank %d cannot sum by %s: %s", ranks.rank, name, reason)
        ranks.reporter.failed(f"cannot sum by {name}: {reason}")
    failed = _most(ranks.reporter, loading, sums is None, failed=sums is None)
    return None if failed else sums


def _make_on(device: torch.device, make: Callable[[], Sums]) -> tuple[Sums | None, str]:
    """Make a way to sum on a GPU, from a thread that has chosen none."""
    torch.cuda.set_device(device)
    return try_to_make(make)


def _most(reporter: Reporter, group: dist.ProcessGroup, number: float, failed: bool = False) -> float:
    """Return the largest number of all ranks, which all call this; float64 is exact for bytes.

    `failed`: the rank has reported a failure, which is to stand in its report as long as it waits.
    """
    found = torch.tensor(float(number), dtype=torch.float64)
    if not failed:
        reporter.waiting("waits for the other ranks")
    reporter.apart(lambda: dist.all_reduce(found, dist.ReduceOp.MAX, group=group))
    reporter.doing("goes on with the others")
    return found.item()


SumAddRmsNormArguments = c_struct("kernels/cuda/layer/layer.cu", "SumAddRmsNormArguments")


class RankLayerKernels(LayerKernels):
    """The kernels of one rank. `delta` of its methods is this rank's part of what is added; parameters as LayerKernels.

    Few rows, those of decode steps, are summed by the kernel that adds and normalises them, in float32, if the ranks have
    inboxes. PyTorch's kernel for such a sum waits for the other ranks twice, and the next product waits for that kernel before it
    reads any weights. More rows, and all rows where NCCL sums, are summed before.
    """

    def __init__(
        self,
        kernels: CudaKernels,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_batch: int,
        ranks: DeviceRanks,
    ) -> None:
        super().__init__(kernels, model, dtype, device, max_batch)
        self._ranks, self._inboxes = ranks, ranks.inboxes

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add the sum of all ranks' `delta`, unless it is None, to x [rows, hidden] in place; returns x's RMS norm × `weight`."""
        inboxes = self._inboxes
        if delta is None:
            return super().add_rms_norm(x, None, weight)
        if inboxes is None or x.shape[0] > inboxes.counts.numel():
            return super().add_rms_norm(x, self._ranks.sum(delta), weight)
        self._ranks.reporter.step()
        return self.sum_add_rms_norm(x, delta, weight, inboxes)

    def add(self, x: Tensor, delta: Tensor) -> None:
        """Add the sum of all ranks' `delta` to x [rows, hidden] in place."""
        super().add(x, self._ranks.sum(delta))

    def sum_add_rms_norm(self, x: Tensor, part: Tensor, weight: Tensor, inboxes: Inboxes) -> Tensor:
        """As `add_rms_norm`, for at most as many rows as the inboxes are for. It waits on the GPU for the other ranks."""
        out = torch.empty_like(x)
        arguments = SumAddRmsNormArguments(
            x=self._address("x", x),
            part=self._address("part", part),
            weight=self._address("weight", weight),
            out=out.data_ptr(),
            inboxes=inboxes.addresses.data_ptr(),
            counts=inboxes.counts.data_ptr(),
            stop=inboxes.stop.data_ptr(),
            hidden=x.shape[1],
            epsilon=self.model.rms_norm_eps,
            centre=self._centre,
            rank=inboxes.rank,
            ranks=inboxes.addresses.numel(),
            capacity=inboxes.counts.numel(),
        )
        self._launch("kvseek_sum_add_rms_norm", (x.shape[0], 1, 1), norm_threads(x.shape[1]), arguments)
        return out
