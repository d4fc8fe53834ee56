"""Decode steps on a GPU, for every StepModel: one CUDA graph per batch size, so that the host makes one upload and one launch
for a step, and the copies that the host waits for. KernelModel is the StepModel of weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, bucket_of, buckets_for, pack
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import require
from kvseek.core.rope import Rotation
from kvseek.core.streams import HostCopy, to_device, wait_for_stream, wait_on_error
from kvseek.engine.draws.sampling import Drawn, Draws, Launched, Sampler, Verification, draw_once, sampled
from kvseek.engine.model.decoder import Decoder, PromptModel
from kvseek.engine.model.layer import WeightsModel
from kvseek.engine.model.reference import scaled
from kvseek.engine.retrieval import Retrieval
from kvseek.engine.row_recorder import NOBODY, RowsBySlot, Wanted
from kvseek.kernels.cuda.layer.layer import LayerKernels

from .attention import PromptAttention


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

    def pack(self, states: Tensor) -> Tensor:
        """Fill up the requests of a step, int32 [at most `size`, 16], or of some [steps, ...], to `size` for `upload`."""
        *steps, given, _ = states.shape
        if given < self.size:
            states = torch.cat((states, self._padding.expand(*steps, self.size - given, -1)), dim=-2)
        return states.pin_memory() if self.batch.requests.is_cuda else states  # kept until the copies have been made

    def upload(self, packed: Tensor) -> None:
        """Upload the requests of the next launch, as `pack` returns them, on the current stream; the host does not wait."""
        self.batch.requests.copy_(packed, non_blocking=True)

    def load(self, states: Tensor) -> None:
        """Upload the requests of the next launch, int32 [at most `size`, 16], as `upload`."""
        self.upload(self.pack(states))

    def launch(self, replays: bool = True) -> StepResult:
        """Run the step on the current stream; its results stay valid until the next launch.

        Without `replays` its kernels are launched one by one, so that a recorder can copy what each layer selects.
        """
        if not replays or self._graph is None or self._result is None:
            return self._run(replace(self.batch))  # a new Batch, with nothing read back yet
        self._graph.replay()
        return self._result

    def close(self) -> None:
        """Free the graph, whoever still holds this step: NCCL ends a communicator only when no graph uses it."""
        self._graph = None


class StepModel(PromptModel, Protocol):
    """A model that reads prompts, and whose decode steps run on a GPU: KernelModel, and those of engine/tensorrt/models.py."""

    def run_layers(self, batch: Batch) -> StepResult:
        """Launch a decode step on the current stream, kernel by kernel, and read nothing back."""


class GraphDecoder(Decoder):
    """The decoder of an engine on a GPU, whose steps are CUDA graphs.

    Also a BlockReader of engine/model/prefill.py, if the model's retrieval keeps no hot rows: the requests of a slot would
    write to the same frames.

    Parameters
    ----------
    draws : Draws, optional
        What draws tokens; steps that only compute logits need none.
    graphs : bool
        Capture decode steps as CUDA graphs, each when its bucket is first used; False launches kernel by kernel.
    reader : GraphDecoder, optional
        What reads the model's prompts in blocks and verifies drafts, and is closed with this decoder.

    Raises
    ------
    ConfigError
        If max_batch_size exceeds the largest bucket.
    """

    model: StepModel

    def __init__(
        self,
        model: StepModel,
        retrieval: Retrieval,
        draws: Draws | None = None,
        *,
        graphs: bool = True,
        reader: GraphDecoder | None = None,
    ) -> None:
        super().__init__(model, retrieval)
        self._draws, self._graphs, self._reader = draws, graphs, reader
        self._device = retrieval.cache.window.device
        self.buckets = buckets_for(retrieval.config.max_batch_size)
        self._steps: dict[int, DecodeStep] = {}
        # Replaced steps are kept, because PyTorch captures no graph into a memory pool that no other graph uses any more.
        self._replaced: list[DecodeStep] = []
        self._capture_stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        with wait_on_error(self._device):
            result, attended = self._launch(tokens, slots)
            self.retrieval.end_step(slots)
            wait_for_stream(self._device)
            logits = result.logits[: len(slots)].float().cpu()
        return logits, attended

    @property
    def runs_ahead(self) -> bool:
        return True

    @torch.inference_mode()
    def launch(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        samplers: Sequence[Sampler | None],
        wanted: Wanted = NOBODY,
        steps: int = 1,
    ) -> Launched:
        """See Decoder. Draws are launched behind a step's graph: the host prepares them while the step runs.

        A step whose selected rows somebody wants is launched kernel by kernel.
        """
        rows, drawn_for = sampled(samplers)
        latest, batch, drawing, greedy = self.retrieval.cache.latest, len(slots), None, list[Tensor]()
        if rows:
            first, size = latest.data_ptr(), latest.element_size()
            places = [first + size * slots[row] for row in rows]
            drawing = self._sampling.begin(rows, drawn_for, places, steps)
        with wait_on_error(self._device):
            step = self.step(bucket_of(batch))
            states, attended = self.retrieval.begin_steps(tokens, slots, steps)
            packed = step.pack(states)
            recorder = self.retrieval.recorder_of(states, attended, wanted, together=True)
            for number in range(steps):
                if number:
                    self.retrieval.refresh(slots)
                step.upload(packed if steps == 1 else packed[number])
                with self.retrieval.recording(recorder):
                    result = step.launch(replays=recorder is None)
                if drawing is not None:
                    drawing.draw(result.logits)
                if len(rows) < batch:  # else something is drawn for every request
                    greedy.append(result.tokens if steps == 1 else result.tokens.clone())
            selected: RowsBySlot = dict if recorder is None else recorder.begin()
            copies = HostCopy([torch.cat(greedy)] if steps > 1 and greedy else greedy)
            self.retrieval.end_step(slots)  # evictions and upkeep, whose launches the host makes beside the step

        def collect() -> list[list[Drawn | int]]:
            with wait_on_error(self._device):
                found = [] if drawing is None else drawing.results()
                if len(rows) == batch:
                    return found
                (made,) = copies.wait()
                tokens_made: list[Drawn | int] = made.tolist()
                drawn = [tokens_made[first : first + batch] for first in range(0, len(tokens_made), step.size)]
                for own, others in zip(drawn, found, strict=False):
                    for row, one in zip(rows, others, strict=True):
                        own[row] = one
                return drawn

        return Launched(attended, collect, selected)

    @property
    def most_rows(self) -> int:
        """See Decoder. Indexes have room for the regions of so many requests, whichever slots they are of."""
        return self.retrieval.config.max_batch_size

    def prepare_to_verify(self) -> None:
        """See Decoder. Several rows of a slot would write to the same hot rows, so another graph of each size runs without."""
        if self.retrieval.hot_rows and self._reader is None:
            self._reader = cold_decoder(self.model, self.retrieval)
            # Its graphs never run beside the others, so that they need no more memory than these, but for their results.
            self._reader._capture_stream, self._reader._pool = self._capture_stream, self._pool
            self._reader.prepare()

    @torch.inference_mode()
    def verify(self, tokens: Sequence[int], slots: Sequence[int], wanted: Wanted = NOBODY) -> Verification:
        """See Decoder. Greedy tokens of all rows are copied at once; the host waits for each draw at random."""
        own = self if self._reader is None else self._reader
        with wait_on_error(self._device):
            step = own.step(bucket_of(len(slots)))
            states, attended = self.retrieval.begin_step(tokens, slots)
            recorder = self.retrieval.recorder_of(states, attended, wanted, together=True)
            step.load(states)
            with own.retrieval.recording(recorder):
                result = step.launch(replays=recorder is None)
            selected: RowsBySlot = dict if recorder is None else recorder.begin()
            copies, made = HostCopy([result.tokens]), list[int]()

        @torch.inference_mode()
        def draw(rows: Sequence[int], samplers: Sequence[Sampler | None]) -> list[Drawn | int]:
            with wait_on_error(self._device):
                numbers, drawing = sampled(samplers)
                drawn = [rows[number] for number in numbers]
                others = iter(draw_once(self._sampling, result.logits, drawn, drawing) if drawn else ())
                if not made:
                    made.extend(copies.wait()[0].tolist())
            return [made[row] if s is None else next(others) for row, s in zip(rows, samplers, strict=True)]

        return Verification(attended, draw, selected)

    @torch.inference_mode()
    def accept(self, slots: Sequence[int], surplus: Sequence[int]) -> None:
        with wait_on_error(self._device):
            self.retrieval.accept(slots, surplus)

    @torch.inference_mode()
    def draw(self, logits: Tensor, samplers: Sequence[Sampler]) -> list[Drawn | int]:
        """See Decoder. The logits are numbers of the engine's dtype, as all that its head computes."""
        with wait_on_error(self._device):
            own = to_device(logits, self.retrieval.cache.window.dtype, self._device)
            return draw_once(self._sampling, own, range(len(samplers)), samplers)

    @property
    def _sampling(self) -> Draws:
        assert self._draws is not None, "steps that only read blocks draw no tokens"
        return self._draws

    @property
    def most_tokens(self) -> int:
        return self.retrieval.config.max_batch_size

    @torch.inference_mode()
    def read_block(self, tokens: Sequence[int], slot: int) -> Tensor:
        with wait_on_error(self._device):
            result, _ = self._launch(tokens, [slot] * len(tokens))
            return result.logits[len(tokens) - 1 : len(tokens)].to(torch.float32, copy=True)

    def step(self, size: int) -> DecodeStep:
        """Return the decode step for a bucket; the first call captures it."""
        if size not in self._steps:
            cache = self.retrieval.cache
            table, run = cache.extents.device_table, self.model.run_layers
            step = DecodeStep(size, cache.padding_state(), table, run, cache.latest)
            if self._graphs:
                self._capture(step)
            self._steps[size] = step
        return self._steps[size]

    def prepare(self) -> None:
        self._replaced += self._steps.values()
        self._steps.clear()
        for size in self.buckets:
            self.step(size)

    def close(self) -> None:
        for step in (*self._steps.values(), *self._replaced):
            step.close()
        self._steps.clear()
        self._replaced.clear()
        if self._reader is not None:
            self._reader.close()

    def _launch(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[StepResult, list[float]]:
        step = self.step(bucket_of(len(slots)))
        states, attended = self.retrieval.begin_step(tokens, slots)
        step.load(states)
        return step.launch(), attended

    def _capture(self, step: DecodeStep) -> None:
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        step.capture(self._capture_stream, self._pool)


class KernelModel(WeightsModel):
    """Runs prompts and decode steps on a GPU; a StepModel. Parameters as WeightsModel.

    The weights are on the cache's device and in its dtype.
    """

    ops: LayerKernels

    def with_retrieval(self, retrieval: Retrieval) -> KernelModel:
        """Return a model of the same weights whose layers attend by another retrieval over the same cache."""
        other = copy.copy(self)
        other.retrieval = retrieval
        return other

    def rotate(self, start: int, stop: int, length: int) -> Rotation:
        return self.ops.rotation(start, stop, length)

    def add(self, x: Tensor, delta: Tensor) -> None:
        self.ops.add(x, delta)

    @torch.inference_mode()
    def run_layers(self, batch: Batch) -> StepResult:
        mark = self.retrieval.observer.op_launched
        x, rotation = self.ops.step_begin(batch, self.embed.weight, self.embed.first)
        x = scaled(self.embed.complete(x), self.model)
        mark("begin")
        delta = self.decode_layers(batch, x, rotation, partial(self.retrieval.attend, batch=batch), mark)
        logits = self.head.project(self.ops.add_rms_norm(x, delta, self.head.norm))
        result = StepResult(logits, self.ops.argmax(logits, batch))
        mark("head")
        return result


def cold_decoder(model: StepModel, retrieval: Retrieval) -> GraphDecoder:
    """Make a decoder of a model of weights that neither reads nor writes hot rows, and draws no tokens."""
    assert isinstance(model, KernelModel), "plans read no blocks, and verify no drafts"
    cold = retrieval.without_hot_rows()
    return GraphDecoder(model.with_retrieval(cold), cold)


def layer_kernels(
    retrieval: Retrieval, kernels: CudaKernels, make: Callable[..., LayerKernels] = LayerKernels
) -> LayerKernels:
    """Make the launcher of the kernels for all that a layer computes besides products, selection and attention.

    `make` takes what LayerKernels takes: that of one of several ranks adds their parts.
    """
    window, most = retrieval.cache.window, buckets_for(retrieval.config.max_batch_size)[-1]
    return make(kernels, retrieval.config.model, window.dtype, window.device, most)


def prompt_attention(retrieval: Retrieval, kernels: CudaKernels) -> PromptAttention:
    """Make the attention of prompts that are read in chunks."""
    config = retrieval.config
    sizes = config.prefill_chunk_tokens, config.max_input_len
    fp8 = config.prefill_precision == "fp8"
    if fp8:
        capability = torch.cuda.get_device_capability(kernels.device)
        limit, remedy = "'none' on a GPU of compute capability below 9.0", "leave it out"
        require(capability >= (9, 0), "prefill_precision", config.prefill_precision, limit, remedy)
    return PromptAttention(kernels, config.model, retrieval.cache.window.dtype, *sizes, fp8)
