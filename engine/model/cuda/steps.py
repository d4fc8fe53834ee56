"""Decode steps on a GPU, for every StepModel: batches, buckets, CUDA graphs, and the copies that the host waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvseek.core.batch import Batch, bucket_of, buckets_for
from kvseek.core.streams import HostCopy, to_device, wait_for_stream, wait_on_error
from kvseek.engine.draws.sampling import Drawn, Draws, Launched, Sampler, sampled
from kvseek.engine.model.cuda.graphs import DecodeStep, StepResult
from kvseek.engine.retrieval import Retrieval


class StepModel(Protocol):
    """A model whose decode steps run on a GPU: engine/model/cuda/model.py, engine/tensorrt/models.py."""

    def run_layers(self, batch: Batch) -> StepResult:
        """Launch a decode step on the current stream, kernel by kernel, and read nothing back."""


class GraphSteps:
    """Runs the decode steps of a model as CUDA graphs; Steps of engine/decoder.py.

    Also a BlockReader of engine/model/continuation.py, if the model's retrieval keeps no hot rows: the requests of a slot would
    write to the same frames.

    Parameters
    ----------
    draws : Draws, optional
        What draws tokens; steps that only compute logits need none.
    graphs : bool
        Capture decode steps as CUDA graphs, each when its bucket is first used; False launches kernel by kernel.

    Raises
    ------
    ConfigError
        If max_batch_size exceeds the largest bucket.
    """

    def __init__(
        self, model: StepModel, retrieval: Retrieval, draws: Draws | None = None, *, graphs: bool = True
    ) -> None:
        self._model, self._retrieval, self._draws, self._graphs = model, retrieval, draws, graphs
        self._device = retrieval.cache.window.device
        self.buckets = buckets_for(retrieval.config.max_batch_size)
        self._steps: dict[int, DecodeStep] = {}
        # Replaced steps are kept, because PyTorch captures no graph into a memory pool that no other graph uses any more.
        self._replaced: list[DecodeStep] = []
        self._capture_stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """See Steps.decode."""
        with wait_on_error(self._device):
            result, attended = self._launch(tokens, slots)
            self._retrieval.end_step(slots)
            wait_for_stream(self._device)
            logits = result.logits[: len(slots)].float().cpu()
            self._retrieval.check()
        return logits, attended

    @property
    def runs_ahead(self) -> bool:
        """See Steps."""
        return True

    @torch.inference_mode()
    def launch(self, tokens: Sequence[int], slots: Sequence[int], samplers: Sequence[Sampler | None]) -> Launched:
        """See Steps.launch. Draws are launched behind the step's graph: the host prepares them while the step runs."""
        rows, drawing = sampled(samplers)
        latest = self._retrieval.cache.latest
        with wait_on_error(self._device):
            result, attended = self._launch(tokens, slots)
            finish: Callable[[], list[Drawn | int]] = list
            if rows:
                places = [latest.data_ptr() + latest.element_size() * slots[row] for row in rows]
                finish = self._sampling.begin(result.logits, rows, drawing, places)
            copies = HostCopy([result.tokens])
            self._retrieval.end_step(slots)  # evictions and upkeep, whose launches the host makes beside the step

        def collect() -> list[Drawn | int]:
            with wait_on_error(self._device):
                (greedy,) = copies.wait()
                drawn: list[Drawn | int] = list(greedy.tolist()[: len(slots)])
                for row, one in zip(rows, finish(), strict=True):
                    drawn[row] = one
                self._retrieval.check()
            return drawn

        return Launched(attended, collect)

    @torch.inference_mode()
    def draw(self, logits: Tensor, samplers: Sequence[Sampler]) -> list[Drawn | int]:
        """See Steps.draw. The logits are numbers of the engine's dtype, as all that its head computes."""
        with wait_on_error(self._device):
            own = to_device(logits, self._retrieval.cache.window.dtype, self._device)
            return self._sampling.begin(own, range(len(samplers)), samplers)()

    @property
    def _sampling(self) -> Draws:
        assert self._draws is not None, "steps that only read blocks draw no tokens"
        return self._draws

    @property
    def most_tokens(self) -> int:
        """See BlockReader."""
        return self._retrieval.config.max_batch_size

    @torch.inference_mode()
    def read_block(self, tokens: Sequence[int], slot: int) -> Tensor:
        """See BlockReader."""
        with wait_on_error(self._device):
            result, _ = self._launch(tokens, [slot] * len(tokens))
            return result.logits[len(tokens) - 1 : len(tokens)].to(torch.float32, copy=True)

    def step(self, size: int) -> DecodeStep:
        """Return the decode step for a bucket; the first call captures it."""
        if size not in self._steps:
            cache = self._retrieval.cache
            table, run = cache.extents.device_table, self._model.run_layers
            step = DecodeStep(size, cache.padding_state(), table, run, cache.latest)
            if self._graphs:
                self._capture(step)
            self._steps[size] = step
        return self._steps[size]

    def prepare(self) -> None:
        """See Steps.prepare."""
        self._replaced += self._steps.values()
        self._steps.clear()
        for size in self.buckets:
            self.step(size)

    def close(self) -> None:
        """See Steps.close."""
        self._steps.clear()
        self._replaced.clear()

    def _launch(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[StepResult, list[float]]:
        step = self.step(bucket_of(len(slots)))
        states, attended = self._retrieval.begin_step(tokens, slots)
        step.load(states)
        return step.launch(), attended

    def _capture(self, step: DecodeStep) -> None:
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        step.capture(self._capture_stream, self._pool)
