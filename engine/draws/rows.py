"""Writes what the kernels for drawing tokens read of each request, and reads what they write (kernels/draw.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvseek.core.request import LogProbs
from kvseek.core.streams import to_device
from kvseek.kernels.draw_rows import DRAWN, NOT_FINITE, ROW_BYTES, DrawnToken, DrawRow

from .reference import MOST_INVERSE, least_weight, merged_biases
from .sampling import Drawn, Sampler, not_finite

ALLOWED, BANNED = DrawRow.allowed.offset, DrawRow.banned.offset
NUMBERS, POINTER, COUNT = Struct("<2i"), Struct("<Q"), Struct("<i")
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

    def results(self, tokens: Tensor, logits: Sequence[Tensor]) -> list[Drawn]:
        """Read what a kernel wrote, for all requests.

        Parameters
        ----------
        tokens : Tensor, int32 [drawn for, DRAWN_WORDS], on the CPU
        logits : sequence of Tensor [vocabulary], on the CPU
            Those of the requests `told`.
        """
        found = (DrawnToken * len(self.rows)).from_buffer_copy(tokens.numpy().tobytes())
        rest = iter(logits)
        drawn = (_result(one, sampler, rest) for one, sampler in zip(found, self._samplers, strict=True))
        return [next(drawn) if one is None else one for one in self._refused]

    @property
    def told(self) -> list[int]:
        """Rows of the logits that requests ask for."""
        return [row for row, one in zip(self.rows, self._samplers, strict=True) if one.params.return_generation_logits]


def pack_rows(rows: Sequence[int], samplers: Sequence[Sampler], device: torch.device, work: int = 0) -> DrawRows:
    """Write the requests of a draw, each with its row of the logits, and copy them to the device; the host does not wait."""
    refused, kept = list[Drawn | None](), list[tuple[int, Sampler, Prepared, list[tuple[int, Words]]]]()
    for row, sampler in zip(rows, samplers, strict=True):
        try:
            kept.append((row, sampler, _prepared(sampler, device), _lists(sampler)))
            refused.append(None)
        except Exception as error:  # whatever it is, it is one request's
            refused.append(Drawn(error=error))
    at = len(kept) * (ROW_BYTES + work)
    size = at + sum(words.nbytes for *_, lists in kept for _, words in lists)
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.empty_like(on_host, device=device) if device.type == "cuda" else on_host
    data, base = memoryview(on_host.numpy()), on_device.data_ptr()  # type: ignore[arg-type]
    for begin, (row, sampler, prepared, lists) in zip(range(0, size, ROW_BYTES), kept, strict=False):
        data[begin : begin + ROW_BYTES] = prepared.row
        NUMBERS.pack_into(data, begin + DrawRow.row.offset, row, len(sampler.generated))
        for field, words in lists:
            POINTER.pack_into(data, begin + field, base + at)
            if field == BANNED:
                COUNT.pack_into(data, begin + DrawRow.bans.offset, words.size)
            data[at : at + words.nbytes] = words.tobytes()
            at += words.nbytes
    if on_device is not on_host:
        on_device.copy_(on_host, non_blocking=True)
    return DrawRows(on_device, [row for row, *_ in kept], [sampler for _, sampler, *_ in kept], refused)


def _lists(sampler: Sampler) -> list[tuple[int, Words]]:
    """Return what differs from draw to draw, each with the place of its pointer in a DrawRow; raises as Sampler.allowed."""
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
