"""Decode steps as CUDA graphs, one per batch size, so that the host makes one upload and one launch for a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, pack


@dataclass(frozen=True)
class StepResult:
    """Results of a decode step for each request of its bucket, on the engine's device.

    Attributes
    ----------
    logits : Tensor [size, vocabulary]
        In the engine's dtype.
    tokens : Tensor, int32 [size]
        The token with the largest logit; NO_TOKEN where that logit is not finite.
    """

    logits: Tensor
    tokens: Tensor


class DecodeStep:
    """A decode step for batches of up to `size` requests.

    Parameters
    ----------
    padding : RequestState
        State that fills the places of the requests that a batch has fewer than `size`.
    table : Tensor, int32 [slots, max_extents]
        Extents of each slot; read when the step runs.
    run : callable
        Launches the step for a batch and returns its results; must not synchronise.
    latest : Tensor, int32 [slots], optional
        See Batch; only with one may a step follow another whose tokens the host does not know.
    """

    def __init__(
        self,
        size: int,
        padding: RequestState,
        table: Tensor,
        run: Callable[[Batch], StepResult],
        latest: Tensor | None = None,
    ) -> None:
        self.size, self._run = size, run
        with torch.inference_mode(False):  # `load` may be called in that mode or not
            self._padding = pack([padding])
            self.batch = Batch(self._padding.repeat(size, 1).to(table.device), table, latest)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: StepResult | None = None

    def capture(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Record the step as a graph, which `launch` replays from now on. Call this before the first `load`.

        The host waits for the device.

        Parameters
        ----------
        stream : Stream
            Any stream but the current one.
        pool : handle of torch.cuda.graph_pool_handle()
            Memory that the graphs share, because they never run at the same time.
        """
        current = torch.cuda.current_stream(self.batch.requests.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Run once outside of the graph, on padding requests alone, because cuBLAS and the indexes allocate at first use.
            self._run(self.batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._result = self._run(self.batch)
        current.wait_stream(stream)
        self._graph = graph

    def load(self, states: Tensor) -> None:
        """Upload the requests of the next launch, int32 [at most `size`, 16], on the current stream; the host does not wait."""
        packed = torch.cat((states, self._padding.expand(self.size - states.shape[0], -1)))
        requests = self.batch.requests
        if requests.is_cuda:
            packed = packed.pin_memory()  # PyTorch keeps the block until the copy has been made
        requests.copy_(packed, non_blocking=True)

    def launch(self) -> StepResult:
        """Run the step on the current stream; its results stay valid until the next launch."""
        if self._graph is None or self._result is None:
            return self._run(replace(self.batch))  # a new Batch, with nothing read back yet
        self._graph.replay()
        return self._result
