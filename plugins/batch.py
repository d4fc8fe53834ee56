"""The requests of a decode step as GPU kernels read them (plugins/shared/batch.cuh).

The kernels of a captured graph get the same arguments at every replay. What varies from step to step lies in one int32
array in device memory, which the host uploads before each step: 16 numbers a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

REQUEST_FIELDS = 16
PLAN_FIELDS = 7  # of those, the method's own


@dataclass(frozen=True)
class RequestState:
    """One request of a decode step; the fields of `Request` in batch.cuh, in order."""

    token: int
    slot: int
    position: int
    write_row: int
    sink_rows: int
    ring_first: int
    ring_rows: int
    length: int
    dense: bool
    plan: tuple[int, ...] = ()

    def numbers(self) -> tuple[int, ...]:
        """The 16 numbers that the kernels read."""
        plan = self.plan
        assert len(plan) <= PLAN_FIELDS, f"a method's plan has at most {PLAN_FIELDS} numbers, not {len(plan)}"
        return (  # field by field: dataclasses.astuple copies deeply, in every step for every request
            self.token,
            self.slot,
            self.position,
            self.write_row,
            self.sink_rows,
            self.ring_first,
            self.ring_rows,
            self.length,
            int(self.dense),
            *plan,
            *(0,) * (PLAN_FIELDS - len(plan)),
        )


def pack(requests: Sequence[RequestState]) -> Tensor:
    """Requests as the kernels read them: int32 [batch, 16] on the CPU."""
    return torch.tensor([request.numbers() for request in requests], dtype=torch.int32).view(
        len(requests), REQUEST_FIELDS
    )


@dataclass(frozen=True)
class DeviceBatch:
    """What the kernels of a decode step read about its requests.

    Attributes
    ----------
    requests : Tensor, int32 [batch, 16], on the GPU
        Packed RequestState.
    table : Tensor, int32 [slots, max_extents], on the GPU
        Extents of each slot.
    """

    requests: Tensor
    table: Tensor

    @property
    def size(self) -> int:
        """Requests of the batch, those that only fill up a graph's bucket included."""
        return self.requests.shape[0]
