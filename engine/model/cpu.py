"""The model on the CPU: its matrix products, and its decode steps; engine/model/layer.py has all else of it.

Products are oneDNN's, and kernels of our own for weights of 8 bits; docs/cpu.md has what each is worth. What multiplies follows
from the processor's instructions and never from a measurement: two servers on equal processors, or one that is started again,
give equal answers.

Some virtual machines advertise AMX and let programs request it, and then answer its instructions with SIGILL. oneDNN, which
multiplies bfloat16 matrices for PyTorch, believes the advertisement, and the signal ends the process: `bfloat16_works` finds out
first.

Requests of a step that attend to every row and requests that retrieve attend apart.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import platform
import signal
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from kvseek.core.batch import LATEST, Batch
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import EngineDirectoryError
from kvseek.core.rope import RotaryEmbedding, Rotation
from kvseek.core.weight_only import INPUTS_MULTIPLE
from kvseek.engine.cache.memory_layout import slot_count
from kvseek.engine.draws.sampling import (
    Drawn,
    Draws,
    Launched,
    Sampler,
    Verification,
    draw_once,
    greedy_token,
    sampled,
)
from kvseek.engine.retrieval import Retrieval
from kvseek.engine.row_recorder import NOBODY, RowsBySlot, Wanted
from kvseek.kernels.cpu.layer.layer import MOST_INPUTS, ByteProduct, GroupProduct

from .decoder import Decoder
from .layer import Linear, Product, Products, WeightsModel
from .mtp import MtpHead
from .prefill import Stream
from .reference import CausalAttention, LayerOperations, scaled

ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"  # environment variable that oneDNN reads when it is first used
WITHOUT_AMX = "AVX512_CORE_BF16"
PROBE_SIZE = 64  # of the matrices of a product that is tried

logger = logging.getLogger(__name__)

# oneDNN lays a weight out for a number of rows. What it makes for 32 rows multiplies 1 to 2,048 rows about as fast as what it
# makes for each of them, which cannot be said of a weight that was laid out for one row.
PACKED_FOR_ROWS = 32
# Most rows of a decode step that are multiplied faster without converting the weight first.
FEW_ROWS_OF_BFLOAT16 = 8
MOST_ROWS = 64  # of a step that verifies drafts: products of more gain nothing
# For each product and number of rows PyTorch and oneDNN keep what they have made, some hundred kilobytes, by default for the last
# 1,024. Prompts have any number of rows, so a server would grow by hundreds of megabytes, for what is seldom asked again. Both
# read these variables at the first product of the process. 64 are decode steps of a dozen batch sizes, of five products each.
KEPT_PRODUCTS = 64


@cache
def bfloat16_works() -> bool:
    """Whether bfloat16 products work in this process. Where AMX does not work, this first keeps oneDNN from using it.

    A product is tried in a forked child. Call this before the first matrix product of any dtype, because oneDNN decides once
    per process.
    """
    if _product_works():
        return True
    if ONEDNN_LIMIT not in os.environ:
        os.environ[ONEDNN_LIMIT] = WITHOUT_AMX
        logger.info("AMX does not work on this machine though it is advertised: %s=%s set", ONEDNN_LIMIT, WITHOUT_AMX)
    return _product_works()


def has_amx() -> bool:
    """Whether oneDNN multiplies bfloat16 by AMX, which is several times as fast as all else that processors have."""
    return (
        bfloat16_works() and torch.cpu._is_amx_tile_supported() and "AMX" in os.environ.get(ONEDNN_LIMIT, "AMX").upper()
    )


def _product_works() -> bool:
    child = os.fork()
    if child == 0:  # threads of the parent do not exist here, so nothing may wait for them
        faulthandler.disable()
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        torch.set_num_threads(1)
        ones = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16)
        os._exit(0 if float((ones @ ones)[0, 0]) == PROBE_SIZE else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


for _variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, str(KEPT_PRODUCTS))


def stays_quantised(dtype: torch.dtype, stored: torch.dtype, inputs: int) -> bool:
    """Whether a weight [outputs, inputs] that is stored as `stored` is multiplied with rows of `dtype` as it is."""
    # The kernel reads rows in whole vectors.
    return dtype is torch.bfloat16 and stored in (torch.int8, torch.uint8) and inputs % INPUTS_MULTIPLE == 0


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16 products; without them oneDNN's are slower than float32's."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def multiplies_integers() -> bool:
    """Whether prompts are multiplied with int8 weights by VNNI: where there is no AMX, nothing is faster."""
    return bool(torch.cpu._is_vnni_supported()) and not has_amx()


class PackedLinear(Linear):
    """A linear map whose weight lies in oneDNN's layout: a copy, which lets one row be multiplied at the memory's pace."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS), bias)

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        return _onednn(x, self.weight, self.bias)


class WidenedLinear(Linear):
    """A linear map in bfloat16 on a processor that has no instructions for it: prompts and many rows take float32."""

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        if not prompt and x.shape[0] <= FEW_ROWS_OF_BFLOAT16:
            return super().__call__(x)
        return _widened(x, self.weight.float(), self.bias)


class NarrowLinear(Linear):
    """A linear map of bfloat16 rows with a narrow weight, which decode steps multiply as it is, and prompts by `integers`.

    Without integers it is dequantised for prompts, and without a product always.

    Parameters
    ----------
    product : ByteProduct or GroupProduct or None
        Compiled kernels.
    inputs : int
    native : bool
        Whether the processor multiplies bfloat16.
    integers : bool
        Whether prompts are rounded to 16 bits a row and multiplied as integers, with a product.
    head : bool
        The weight is that of the head, which prompts multiply with few rows: it is dequantised for neither.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        product: ByteProduct | GroupProduct | None,
        inputs: int,
        *,
        native: bool,
        integers: bool,
        head: bool,
    ) -> None:
        super().__init__(weight, bias)
        self._product, self._native, self._head = product, native, head
        self._integers = integers and inputs <= MOST_INPUTS

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        if self._product is not None and (self._head or not prompt):
            return self._product(x)
        if self._product is not None and self._integers:
            return self._product.of_prompt(x)
        if self._native:
            return _onednn(x, self.values(torch.bfloat16), self.bias)
        return _widened(x, self.values(torch.float32), self.bias)

    @abstractmethod
    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantise the weight to bfloat16 or float32, [outputs, inputs]."""


class ByteLinear(NarrowLinear):
    """One with an int8 weight [outputs, inputs], `inputs` a multiple of INPUTS_MULTIPLE, and bfloat16 scales [outputs]."""

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, library: CpuLibrary | None, **how: bool
    ) -> None:
        weight = weight.contiguous()
        product = None if library is None else ByteProduct(library, weight, scale, bias)
        super().__init__(weight, bias, product, weight.shape[1], **how)
        self.scale = scale

    def values(self, dtype: torch.dtype) -> Tensor:
        return self.weight * self.scale.to(dtype)[:, None]


class GroupLinear(NarrowLinear):
    """One whose weight and scales are what `quantise` makes with one of GROUPED."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, library: CpuLibrary, **how: bool) -> None:
        product = GroupProduct(library, weight, scale, bias)
        super().__init__(weight, bias, product, product.inputs, **how)
        self._dequantised = product.values

    def values(self, dtype: torch.dtype) -> Tensor:
        return self._dequantised(dtype)


class HostProducts(Products):
    """Makes the products of an engine on the CPU.

    Parameters
    ----------
    dtype : torch.dtype
        That of x.
    library : CpuLibrary, optional
        Compiled kernels, which multiply few rows with int8 weights as they are; without them such weights are dequantised.
    native, integers : bool, optional
        Whether the processor multiplies bfloat16, and prompts are multiplied by VNNI; None: what `multiplies_bfloat16` and
        `multiplies_integers` find.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        library: CpuLibrary | None = None,
        native: bool | None = None,
        integers: bool | None = None,
    ) -> None:
        super().__init__(dtype)
        self._library = library
        self._native = multiplies_bfloat16() if native is None else native
        self._integers = multiplies_integers() if integers is None else integers

    @property
    def prompts(self) -> str:
        """What multiplies prompts, in words for the log."""
        if self.dtype is not torch.bfloat16:
            return f"oneDNN in {str(self.dtype).removeprefix('torch.')}"
        plain = f"oneDNN in {'bfloat16' if self._native else 'float32'}"
        return (
            f"{plain}, with weights of 8 or 4 bits integers by VNNI"
            if self._integers and self._library is not None
            else plain
        )

    def linear(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Linear:
        """See Products.linear; raises EngineDirectoryError if the scales have more digits than bfloat16.

        An int8 weight stays as it is if x is bfloat16.
        """
        return self._make(weight, bias, scale, head=False)

    def head(self, weight: Tensor, scale: Tensor | None = None) -> Product:
        return self._make(weight, None, scale, head=True)

    def _make(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None, *, head: bool) -> Linear:
        how = {"native": self._native, "integers": self._integers, "head": head}
        groups = scale is not None and scale.ndim > 1 and stays_quantised(self.dtype, weight.dtype, INPUTS_MULTIPLE)
        if scale is not None and groups and self._library is not None:
            return GroupLinear(weight, scale, bias, self._library, **how)
        if scale is not None and scale.ndim == 1 and stays_quantised(self.dtype, weight.dtype, weight.shape[1]):
            narrow = scale.bfloat16()
            if not torch.equal(narrow.float(), scale):
                raise EngineDirectoryError("the scales of 8-bit weights are of an older kvseek: build the engine again")
            return ByteLinear(weight, narrow, bias, self._library, **how)
        plain = super().linear(weight, bias, scale)
        if self.dtype is torch.float16 or not _has_onednn():  # float16: of a GPU's engine that is calibrated here
            return plain
        if self.dtype is torch.bfloat16 and not self._native:
            return WidenedLinear(plain.weight, bias)
        return PackedLinear(plain.weight, bias)


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply bfloat16 rows with a float32 weight [outputs, inputs]; the result is bfloat16."""
    out = _onednn(x.float(), weight, None if bias is None else bias.float())
    return out.to(x.dtype)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # PyTorch's public operator multiplies float32 with MKL, which is slow on AMD's processors, and takes no packed weight.
    # oneDNN sums a single row in another order than the same row among others, of whose number its sums do not depend.
    rows = x.shape[0]
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x.expand(2, -1) if rows == 1 else x, weight, bias, "none", [], "")
    return out[:rows]


def _has_onednn() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


Attend = Callable[[int, Tensor], Tensor]
"""Attention of a decode step: layer, queries [batch, H, D] to outputs [batch, H, D]."""


@dataclass(frozen=True)
class Group:
    """Requests of a batch that attend the same way: to every row (`dense`), or to selected rows."""

    requests: list[int]
    batch: Batch
    dense: bool


class HostBatch:
    """The requests of one step over a retrieval, as Retrieval.begin_step returns them.

    Attributes
    ----------
    batch : Batch
        All requests.
    """

    def __init__(self, retrieval: Retrieval, states: Tensor) -> None:
        self.batch = Batch(states, retrieval.cache.extents.table)
        self._retrieval, self._groups = retrieval, _groups(self.batch)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attend group by group: queries and outputs [batch, H, D]."""
        if len(self._groups) == 1:
            return self._attend_alike(layer, queries.contiguous(), self._groups[0])
        out = torch.empty_like(queries)
        for group in self._groups:
            out[group.requests] = self._attend_alike(layer, queries[group.requests], group)
        return out

    def _attend_alike(self, layer: int, queries: Tensor, group: Group) -> Tensor:
        """Attend for the requests of a group, whose queries these are."""
        attend = self._retrieval.attend_densely if group.dense else self._retrieval.attend
        return attend(layer, queries, group.batch)


def _groups(batch: Batch) -> list[Group]:
    dense = [bool(number) for number in batch.column("dense").tolist()]
    groups = []
    for wanted in (True, False):
        requests = [request for request, is_dense in enumerate(dense) if is_dense == wanted]
        if requests:
            groups.append(Group(requests, batch if len(requests) == batch.size else batch.subset(requests), wanted))
    return groups


class TorchModel(WeightsModel):
    """Runs prompts and decode steps on the CPU; a BlockReader of engine/model/prefill.py. Parameters as WeightsModel."""

    most_tokens = sys.maxsize  # of a block

    def __init__(
        self,
        weights: dict[str, Tensor],
        retrieval: Retrieval,
        ops: LayerOperations,
        attention: CausalAttention,
        products: Products,
    ) -> None:
        super().__init__(weights, retrieval, ops, attention, products)
        self.rope = RotaryEmbedding(self.model, retrieval.cache.window.device)
        self.reader = self
        self.mtp: MtpHead | None = None
        if self.model.mtp:
            slots, dtype = slot_count(self.config), retrieval.cache.window.dtype
            self.mtp = MtpHead(self.model, weights, products, ops, self.embed, self.head, slots, dtype)

    def rotate(self, start: int, stop: int, length: int) -> Rotation:
        return self.rope(start, stop, length)

    def end_prompt(self, prompt: Stream, slot: int, ids: Sequence[int], first: int, row: int) -> None:
        if self.mtp is not None and self.mtp.used:
            self.mtp.read_prompt(slot, ids, first, prompt.residual[row : row + len(ids)])

    def read_block(self, tokens: Sequence[int], slot: int) -> Tensor:
        states, _ = self.retrieval.begin_step(tokens, [slot] * len(tokens))
        requests = HostBatch(self.retrieval, states)
        return self.run_layers(requests.batch, requests.attend, slice(len(tokens) - 1, None))

    def run_layers(self, batch: Batch, attend: Attend, asked: slice = slice(None)) -> Tensor:
        """Run a decode step: write each token's rows to the window, and compute logits of the requests `asked`.

        Returns float32 [requests, vocabulary].
        """
        mark = self.retrieval.observer.op_launched
        x = scaled(self.embed(batch.column("token")), self.model)
        rotation = self.rope.at(batch.column("position").tolist())
        mark("begin")
        x = x + self.decode_layers(batch, x, rotation, attend, mark)
        if self.mtp is not None and self.mtp.used:
            self.mtp.read_step(batch.slots, batch.column("position").tolist(), x)
        logits = self.head(x[asked])
        mark("head")
        return logits


class HostDecoder(Decoder):
    """The decoder of an engine on the CPU. No steps are captured there."""

    model: TorchModel

    def __init__(self, model: TorchModel, retrieval: Retrieval, draws: Draws) -> None:
        super().__init__(model, retrieval)
        self._draws = draws
        self._latest = dict[int, int]()  # by slot: the token that its last step has drawn

    @property
    def runs_ahead(self) -> bool:
        """See Decoder. A step has ended here when it has been launched, so one that is launched ahead only delays its tokens."""
        return False

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        logits, attended, _ = self._step(tokens, slots, NOBODY)
        self.retrieval.end_step(slots)
        return logits, attended

    @torch.inference_mode()
    def launch(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        samplers: Sequence[Sampler | None],
        wanted: Wanted = NOBODY,
        steps: int = 1,
    ) -> Launched:
        """See Decoder. The step has ended when this returns."""
        assert steps == 1, "it does not run ahead"
        known = [self._latest[slot] if token == LATEST else token for token, slot in zip(tokens, slots, strict=True)]
        logits, attended, selected = self._step(known, slots, wanted)
        self.retrieval.end_step(slots)
        drawn = self._draw_rows(logits, range(len(slots)), samplers)
        tokens_drawn = (one if isinstance(one, int) else one.token for one in drawn)
        self._latest.update(zip(slots, (max(0, token) for token in tokens_drawn), strict=True))
        return Launched(attended, lambda: [drawn], selected)

    def _step(
        self, tokens: Sequence[int], slots: Sequence[int], wanted: Wanted
    ) -> tuple[Tensor, list[float], RowsBySlot]:
        """Run a step but for its end; see `decode` for logits and attended tokens, and Launched for the selected rows."""
        retrieval = self.retrieval
        states, attended = retrieval.begin_step(tokens, slots)
        requests = HostBatch(retrieval, states)
        recorder = retrieval.recorder_of(states, attended, wanted, together=False)
        with retrieval.recording(recorder):
            logits = self.model.run_layers(requests.batch, requests.attend)
        return logits, attended, dict if recorder is None else recorder.begin()

    def _draw_rows(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler | None]) -> list[Drawn | int]:
        """Draw a token from each of these rows of the logits; without a sampler the one of the largest logit."""
        numbers, drawing = sampled(samplers)
        own = [rows[number] for number in numbers]
        others = iter(draw_once(self._draws, logits, own, drawing) if own else ())
        return [greedy_token(logits[row]) if s is None else next(others) for row, s in zip(rows, samplers, strict=True)]

    @property
    def mtp(self) -> MtpHead | None:
        return self.model.mtp

    @property
    def most_rows(self) -> int:
        """See Decoder. Where more rows of bfloat16 would be multiplied otherwise, a row's last bits would tell of the draft."""
        widens = self.cache.window.dtype is torch.bfloat16 and not multiplies_bfloat16()
        return FEW_ROWS_OF_BFLOAT16 if widens else MOST_ROWS

    @torch.inference_mode()
    def verify(self, tokens: Sequence[int], slots: Sequence[int], wanted: Wanted = NOBODY) -> Verification:
        """See Decoder. The step has ended when this returns."""
        logits, attended, selected = self._step(tokens, slots, wanted)
        return Verification(attended, torch.inference_mode()(partial(self._draw_rows, logits)), selected)

    def draw(self, logits: Tensor, samplers: Sequence[Sampler]) -> list[Drawn | int]:
        return draw_once(self._draws, logits, range(len(samplers)), samplers)

    def prepare(self) -> None:
        """See Decoder."""

    def close(self) -> None:
        """See Decoder."""
