"""Draws tokens by a compiled kernel, for a whole batch at once: on the CPU, or on a GPU behind the step that makes the logits.

What the kernels read and write of each request: kernels/draw.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvseek.core.request import LogProbs
from kvseek.core.streams import HostCopy, everything_launched, to_device
from kvseek.engine.draws.reference import MOST_INVERSE, least_weight, merged_biases
from kvseek.engine.draws.sampling import Drawn, Sampler, not_finite
from kvseek.kernels.draw_rows import DRAWN, DRAWN_WORDS, NOT_FINITE, ROW_BYTES, DrawnToken, DrawRow

DRAWN_BYTES = ctypes.sizeof(DrawnToken)
ALLOWED, BANNED = DrawRow.allowed.offset, DrawRow.banned.offset
POINTER, COUNT = Struct("<Q"), Struct("<i")
NEUTRAL = bytes(DrawRow(greedy=True, likeliest=-1, repetition_penalty=1.0))
Words = npt.NDArray[np.uint32] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class Prepared:
    """What does not change from one draw of a request to the next, and the tensors that `row` points to."""

    row: bytes
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class DrawLayout:
    """What does not change from a draw to the next as long as both are for the same requests.

    Attributes
    ----------
    rows, samplers, places : list
        As Draws.begin is given them.
    head : array, uint8 [requests, ROW_BYTES]
        The DrawRow of each request, but for `number` and what `_lists` returns.
    scored : list of int
        Requests that get something with the token.
    refused : dict of int to Drawn
        By request, why nothing is drawn for it; a row that changes nothing stands in its place.
    """

    rows: list[int]
    samplers: list[Sampler]
    places: list[int]
    head: npt.NDArray[np.uint8]
    scored: list[int]
    refused: dict[int, Drawn]

    @classmethod
    def of(cls, rows: list[int], samplers: list[Sampler], places: list[int], device: torch.device) -> DrawLayout:
        """Write the rows of these requests, and copy to the device what they point to."""
        prepared, refused = list[bytes](), dict[int, Drawn]()
        for number, sampler in enumerate(samplers):
            try:
                prepared.append(_prepared(sampler, device).row)
            except Exception as error:  # whatever it is, it is one request's
                refused[number] = Drawn(error=error)
                prepared.append(NEUTRAL)
        head = np.frombuffer(b"".join(prepared), dtype=np.uint8).reshape(len(rows), ROW_BYTES).copy()
        column(head, "latest", np.uint64)[:] = places
        column(head, "row", np.int32)[:] = rows
        scored = [number for number, sampler in enumerate(samplers) if sampler.params.scores_tokens]
        return cls(rows, samplers, places, head, scored, refused)

    def pack(self, device: torch.device, steps: int) -> tuple[Tensor, dict[int, Drawn]]:
        """Complete the rows of the draws of some steps and copy them to the device; the host does not wait.

        Returns
        -------
        buffer : Tensor, uint8, on the device
            A DrawRow for each step and request, and the lists that the rows point to.
        refused : dict of int to Drawn
            As `refused`, with those whose guide failed before the draw.
        """
        refused, lists = dict(self.refused), list[tuple[int, int, Words]]()
        assert steps == 1 or not self.logit_rows, "logits are copied for one step"
        for number, sampler in enumerate(self.samplers):
            if sampler.varies:
                assert steps == 1, "what may be drawn next is only known for one step"
                try:
                    lists += [(number * ROW_BYTES, field, words) for field, words in _lists(sampler)]
                except Exception as error:  # whatever it is, it is one request's
                    refused[number] = Drawn(error=error)
        head = steps * self.head.size
        on_host = torch.empty(
            head + sum(words.nbytes for *_, words in lists), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        buffer = torch.empty_like(on_host, device=device)
        array = on_host.numpy()
        rows, data = array[:head].reshape(steps, *self.head.shape), memoryview(array)  # type: ignore[arg-type]
        rows[:] = self.head
        numbers = column(rows, "number", np.int32)
        numbers[:] = [sampler.number for sampler in self.samplers]
        if steps > 1:
            numbers += np.arange(steps, dtype=np.int32)[:, None]
        at = head
        for begin, field, words in lists:
            POINTER.pack_into(data, begin + field, buffer.data_ptr() + at)
            if field == BANNED:
                COUNT.pack_into(data, begin + DrawRow.bans.offset, words.size)
            data[at : at + words.nbytes] = words.tobytes()
            at += words.nbytes
        buffer.copy_(on_host, non_blocking=True)
        return buffer, refused

    @property
    def logit_rows(self) -> list[int]:
        """Rows of the logits that requests ask for."""
        each = zip(self.rows, self.samplers, strict=True)
        return [row for row, one in each if one.params.return_generation_logits]

    def results(self, tokens: Tensor, logits: Sequence[Tensor], refused: dict[int, Drawn]) -> list[list[Drawn | int]]:
        """Read what a kernel wrote.

        Parameters
        ----------
        tokens : Tensor, int32 [steps, requests, DRAWN_WORDS], on the CPU
        logits : sequence of Tensor [vocabulary], on the CPU
            Those of `logit_rows` of the last step.
        refused : dict of int to Drawn
            As `pack` returns it.
        """
        found, rest = tokens.numpy(), iter(logits)
        drawn: list[list[Drawn | int]] = found[:, :, 0].tolist()
        looks = found[:, :, 1] != DRAWN
        if self.scored:
            looks[:, self.scored] = True
        if looks.any():
            for step, number in np.argwhere(looks).tolist():
                result = DrawnToken.from_buffer_copy(found[step, number].tobytes())
                drawn[step][number] = _result(result, self.samplers[number], rest)
        for number, one in refused.items():
            for own in drawn:
                own[number] = one
        return drawn


def column(rows: npt.NDArray[np.uint8], name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the field of DrawRow of all rows, uint8 [..., ROW_BYTES], to be written to."""
    field = getattr(DrawRow, name)
    values: npt.NDArray[Any] = rows[..., field.offset : field.offset + field.size].view(dtype)[..., 0]
    return values


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

    def __call__(self, logits: Tensor, rows: int, work: int, drawn: int, count: int) -> None:
        """Draw for `count` >= 1 requests: addresses of their DrawRows, of the zeros, and of as many DrawnTokens to write."""


class CompiledDraws:
    """Draws by a kernel; Draws of sampling.py. On a GPU the host waits in `results`, and for the draws alone."""

    def __init__(self, kernel: DrawKernel) -> None:
        self._kernel = kernel
        self._layout: DrawLayout | None = None  # of the last draw

    def begin(
        self, rows: Sequence[int], samplers: Sequence[Sampler], places: Sequence[int] = (), steps: int = 1
    ) -> CompiledDrawing:
        given = list(rows), list(samplers), list(places) or [0] * len(rows)

        def layout_on(device: torch.device) -> DrawLayout:
            layout = self._layout
            if layout is None or (layout.rows, layout.samplers, layout.places) != given:
                layout = self._layout = DrawLayout.of(*given, device)
            return layout

        return CompiledDrawing(self._kernel, layout_on, len(rows), steps)


class CompiledDrawing:
    """See Drawing. All that the draws of its steps need goes to the device with the first of them, while the step runs."""

    def __init__(
        self, kernel: DrawKernel, layout_on: Callable[[torch.device], DrawLayout], requests: int, steps: int
    ) -> None:
        self._kernel, self._layout_on, self._requests, self._steps = kernel, layout_on, requests, steps
        self._begun = self._launched = 0  # draws
        self._error: Exception | None = None  # for which none was launched after them, such as too little memory
        self._wait: Callable[[], list[Tensor]] = list  # for the results

    def draw(self, logits: Tensor) -> None:
        self._begun += 1
        try:
            if self._begun == 1:
                self._prepare(logits.device)
            if self._error is None:
                before, requests, kernel = self._launched * self._requests, self._requests, self._kernel
                rows = self._rows.data_ptr() + before * ROW_BYTES
                work = self._work.data_ptr() + before * kernel.work_bytes
                kernel(logits, rows, work, self._drawn.data_ptr() + before * DRAWN_BYTES, requests)
                self._launched += 1
        except Exception as error:  # requests that draw nothing go on
            self._error = error
        if self._begun == self._steps:
            self._wait = self._copy(logits)

    def results(self) -> list[list[Drawn | int]]:
        found = self._wait()
        missing: list[list[Drawn | int]] = [
            [Drawn(error=self._error)] * self._requests for _ in range(self._steps - self._launched)
        ]
        if not self._launched:
            return missing
        drawn, *logits = found
        return self._layout.results(drawn, logits, self._refused) + missing

    def _copy(self, logits: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to copy the results of the draws that were launched, the last step's logits with them."""
        if self._launched:
            try:
                return HostCopy([self._drawn[: self._launched], *(logits[row] for row in self._layout.logit_rows)]).wait
            except Exception as error:
                self._error, self._launched = error, 0
        wait = everything_launched(logits.device)

        def nothing() -> list[Tensor]:
            wait()
            return []

        return nothing

    def _prepare(self, device: torch.device) -> None:
        self._layout = self._layout_on(device)
        self._rows, self._refused = self._layout.pack(device, self._steps)
        draws = self._steps * self._requests
        self._work = torch.zeros(draws * self._kernel.work_bytes, dtype=torch.uint8, device=device)
        self._drawn = torch.empty((self._steps, self._requests, DRAWN_WORDS), dtype=torch.int32, device=device)
