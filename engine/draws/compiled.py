"""Draws tokens by a compiled kernel, for a whole batch at once: on the CPU, or on a GPU behind the step that makes the logits.

What the kernels read and write of each request: kernels/draw.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvseek.core.request import LogProbs
from kvseek.core.streams import HostCopy, to_device
from kvseek.engine.draws.reference import MOST_INVERSE, least_weight, merged_biases
from kvseek.engine.draws.sampling import Drawn, Sampler, not_finite
from kvseek.kernels.draw_rows import DRAWN, NOT_FINITE, ROW_BYTES, DrawnToken, DrawRow

ALLOWED, BANNED = DrawRow.allowed.offset, DrawRow.banned.offset
POINTER, COUNT = Struct("<Q"), Struct("<i")
NUMBERS = Struct("<Q2i")  # the fields `latest`, `row` and `number` of a DrawRow
Words = npt.NDArray[np.uint32] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class Prepared:
    """What does not change from one draw of a request to the next, and the tensors that `row` points to."""

    row: bytes
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class DrawRows:
    """The requests of one draw.

    Attributes
    ----------
    buffer : Tensor, uint8, on the device that draws
        A DrawRow for each request that is drawn for, `work` bytes of zeros for each, and the lists that the rows point to.
    rows : list of int
        The row of the logits of each request that is drawn for.
    """

    buffer: Tensor
    rows: list[int]
    _samplers: list[Sampler]
    _refused: list[Drawn | None]  # for all requests: those whose guide failed before the draw

    def results(self, tokens: Tensor, logits: Sequence[Tensor]) -> list[Drawn | int]:
        """Read what a kernel wrote, for all requests.

        Parameters
        ----------
        tokens : Tensor, int32 [drawn for, DRAWN_WORDS], on the CPU
        logits : sequence of Tensor [vocabulary], on the CPU
            Those of `logit_rows`.
        """
        found = tokens.numpy()
        drawn: list[Drawn | int] = found[:, 0].tolist()
        rest = iter(logits)
        for number, (sampler, status) in enumerate(zip(self._samplers, found[:, 1].tolist(), strict=True)):
            if status != DRAWN or sampler.params.scores_tokens:
                drawn[number] = _result(DrawnToken.from_buffer_copy(found[number].tobytes()), sampler, rest)
        if len(drawn) == len(self._refused):
            return drawn
        others = iter(drawn)
        return [next(others) if one is None else one for one in self._refused]

    @property
    def logit_rows(self) -> list[int]:
        """Rows of the logits that requests ask for."""
        return [row for row, one in zip(self.rows, self._samplers, strict=True) if one.params.return_generation_logits]


def pack_rows(
    rows: Sequence[int],
    samplers: Sequence[Sampler],
    device: torch.device,
    work: int = 0,
    places: Sequence[int] = (),
) -> DrawRows:
    """Write the requests of a draw, each with its row of the logits, and copy them to the device; the host does not wait.

    `work` and `places` are DrawKernel.work_bytes and those of Draws.begin.
    """
    refused, drawn, packed = list[Drawn | None](), list[Sampler](), list[bytes]()
    numbers, lists = list[tuple[int, int, int]](), list[tuple[int, int, Words]]()
    for row, sampler, place in zip(rows, samplers, places or [0] * len(samplers), strict=True):
        try:
            prepared = _prepared(sampler, device).row
            if sampler.varies:
                lists += [(len(drawn) * ROW_BYTES, field, words) for field, words in _lists(sampler)]
        except Exception as error:  # whatever it is, it is one request's
            refused.append(Drawn(error=error))
            continue
        refused.append(None)
        drawn.append(sampler)
        packed.append(prepared)
        numbers.append((place, row, sampler.number))
    head, zeros = len(drawn) * ROW_BYTES, len(drawn) * work
    size = head + sum(words.nbytes for *_, words in lists)
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")  # all but the zeros
    buffer = torch.empty(size + zeros, dtype=torch.uint8, device=device)
    buffer[head : head + zeros].zero_()
    data = memoryview(on_host.numpy())  # type: ignore[arg-type]
    data[:head] = b"".join(packed)
    for begin, changing in zip(range(DrawRow.latest.offset, size, ROW_BYTES), numbers, strict=False):
        NUMBERS.pack_into(data, begin, *changing)
    at = head
    for begin, field, words in lists:
        POINTER.pack_into(data, begin + field, buffer.data_ptr() + zeros + at)
        if field == BANNED:
            COUNT.pack_into(data, begin + DrawRow.bans.offset, words.size)
        data[at : at + words.nbytes] = words.tobytes()
        at += words.nbytes
    buffer[:head].copy_(on_host[:head], non_blocking=True)
    if lists:
        buffer[head + zeros :].copy_(on_host[head:], non_blocking=True)
    return DrawRows(buffer, [row for _, row, _ in numbers], drawn, refused)


def _lists(sampler: Sampler) -> list[tuple[int, Words]]:
    """Return what differs from draw to draw, each with the place of its pointer in a DrawRow; raises as Sampler.allowed."""
    assert not (sampler.reads_tokens and sampler.pending), "the host has to know the tokens before"
    allowed, banned, lists = sampler.allowed(), sampler.banned(), list[tuple[int, Words]]()
    if allowed is not None:
        lists.append((ALLOWED, allowed))
    if banned:
        lists.append((BANNED, np.array(banned, dtype=np.int32)))
    return lists


def _prepared(sampler: Sampler, device: torch.device) -> Prepared:
    """Return what the sampler keeps on the device; made at its first draw."""
    if not isinstance(sampler.prepared, Prepared):
        sampler.prepared = _prepare(sampler, device)
    return sampler.prepared


def _prepare(sampler: Sampler, device: torch.device) -> Prepared:
    params, biases, occurrences = sampler.params, merged_biases(sampler.params), sampler.occurrences()
    added = torch.tensor(list(biases.values()), dtype=torch.float32)
    tensors = [to_device(list(biases), torch.int32, device), to_device(added, torch.float32, device)]
    if occurrences is not None:
        tensors.append(to_device(occurrences, torch.int32, device))
    row = DrawRow(
        seed=params.seed,
        inverse_temperature=0.0 if params.greedy else min(1 / params.temperature, MOST_INVERSE),
        top_p=params.top_p,
        least_weight=least_weight(params.min_p),
        bias_ids=tensors[0].data_ptr(),
        biases=tensors[1].data_ptr(),
        occurrences=0 if occurrences is None else tensors[2].data_ptr(),
        greedy=params.greedy,
        top_k=params.top_k,
        bias_count=len(biases),
        likeliest=-1 if params.logprobs is None else params.logprobs,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
    return Prepared(bytes(row), tuple(tensors))


def _result(one: ctypes.Structure, sampler: Sampler, logits: Iterator[Tensor]) -> Drawn:
    params = sampler.params
    own = next(logits).float().numpy().tobytes() if params.return_generation_logits else b""
    if one.status != DRAWN:
        return Drawn(error=not_finite(one.largest) if one.status == NOT_FINITE else sampler.nothing_left())
    if params.logprobs is None:
        return Drawn(one.token, None, own)
    count = min(params.logprobs, sampler.vocab_size)
    top = tuple(zip(one.ids[:count], one.log_probabilities[:count], strict=True))
    return Drawn(one.token, LogProbs(one.log_probability, top), own)


class DrawKernel(Protocol):
    """NativeDraw of kernels/cpu/draw/draw.py, DeviceDraw of kernels/cuda/draw/draw.py.

    Attributes
    ----------
    work_bytes : int
        Bytes of zeros that it needs for each request.
    """

    @property
    def work_bytes(self) -> int: ...

    def __call__(self, logits: Tensor, rows: Tensor, count: int) -> Tensor:
        """Draw for `count` requests, whose DrawRows begin the uint8 tensor `rows`; int32 [count, DRAWN_WORDS]."""


class CompiledDraws:
    """Draws by a kernel; Draws of sampling.py. On a GPU the host waits in what `begin` returns, and for the draws alone."""

    def __init__(self, kernel: DrawKernel) -> None:
        self._kernel = kernel

    def begin(
        self, logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler], places: Sequence[int] = ()
    ) -> Callable[[], list[Drawn | int]]:
        try:
            packed = pack_rows(rows, samplers, logits.device, self._kernel.work_bytes, places)
            tokens = self._kernel(logits, packed.buffer, len(packed.rows))
            copies = HostCopy([tokens, *(logits[row] for row in packed.logit_rows)])
        except Exception as error:  # too little memory, say: requests that draw nothing go on
            failed: list[Drawn | int] = [Drawn(error=error) for _ in rows]
            return lambda: failed

        def finish() -> list[Drawn | int]:
            found, *logits_copied = copies.wait()
            return packed.results(found, logits_copied)

        return finish
