"""Matrix products on a GPU: kernels for decode steps, cuBLAS for prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.model_config import ExpertsConfig
from kvseek.engine.model.experts import Experts, Parts
from kvseek.engine.model.layer import Linear, Product, Products
from kvseek.kernels.cuda.layer.experts import ExpertKernels
from kvseek.kernels.cuda.layer.products import MOST_ROWS, ProductKernels

from .experts import KernelExperts, multiplies_groups

# Numbers of rows that RowCounts tries: these, and then multiples of ROW_STEP, the rows of a tile of a matrix.
FEW_ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448)
ROW_STEP = 128
# Rows that are multiplied in parts of each number: sums in another order seldom round differently.
TRIED_ROWS = 1024
Multiply = Callable[[Tensor], Tensor]


class KernelLinear(Linear):
    """A linear map on a GPU, with a weight in the dtype of x, or of 8 or 4 bits.

    The rows of a decode step are multiplied by a kernel that reads the weight as it is stored. Prompts are multiplied by cuBLAS,
    for which a narrower weight is first written out in the dtype of x: cuBLAS then multiplies faster than a kernel that
    converts while it multiplies.

    Parameters
    ----------
    weight, scale : Tensor, Tensor or None
        As they are stored, see core/weight_only.py; without a scale in the dtype of x.
    fp8_prompts : bool
        Whether rows of prompts are rounded to FP8 (ProductKernels.quantise_rows), and multiplied with the weight, which is of FP8
        too, as it is stored.

    Attributes
    ----------
    counts : RowCounts or None
        Numbers of rows with which cuBLAS multiplies prompts; None: any.
    """

    counts: RowCounts | None = None

    def __init__(
        self,
        kernels: ProductKernels,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        *,
        fp8_prompts: bool = False,
    ) -> None:
        super().__init__(weight, bias)
        self.scale, self._kernels, self._fp8_prompts = scale, kernels, fp8_prompts

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        if not prompt:
            return self._kernels.linear(x, self.weight, self.scale, self.bias)
        multiply = self.prompt_product()
        return multiply(x) if self.counts is None else self.counts.multiply(x, multiply)

    def prompt_product(self) -> Multiply:
        """What multiplies rows of a prompt, whatever their number."""
        if self._fp8_prompts and self.scale is not None:
            weight, scales = self.weight.t(), self.scale[None]

            def multiply(x: Tensor) -> Tensor:
                rows, factors = self._kernels.quantise_rows(x)
                return torch._scaled_mm(rows, weight, factors[:, None], scales, self.bias, out_dtype=x.dtype)

            return multiply
        wide = self.weight if self.scale is None else self._kernels.dequantise(self.weight, self.scale)
        return partial(F.linear, weight=wide, bias=self.bias)

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor], *, prompt: bool = False) -> Tensor:
        """See Linear.gated. The kernel does both."""
        if not prompt:
            return self._kernels.linear(x, self.weight, self.scale, self.bias, gated=True)
        return super().gated(x, silu_mul, prompt=prompt)


class KernelHead(Linear):
    """The quantised head on a GPU, which is never written out: it is the largest matrix, and mostly multiplied with few rows.

    More rows, such as logits of whole prompts of a small vocabulary, are multiplied in groups, since a row's result does not
    depend on the others. `weight` and `scale` are those of KernelLinear.
    """

    def __init__(self, kernels: ProductKernels, weight: Tensor, scale: Tensor) -> None:
        super().__init__(weight)
        self.scale, self._kernels = scale, kernels

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        for rows, products in zip(torch.split(x, MOST_ROWS), torch.split(out, MOST_ROWS), strict=True):
            self._kernels.linear(rows, self.weight, self.scale, None, out=products)
        return out


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows with which cuBLAS sums the products of a row and one weight in the same order, and gives the same bits.

    For few rows cuBLAS cuts the sums of some matrices into parts, so a prompt's row would depend on how many are read with it.
    Which numbers are alike is found by trying: the rest is filled up with rows of zeros, which takes hardly longer.

    Attributes
    ----------
    alike : tuple of int
        Ascending. The last is the most rows that are multiplied at once.
    """

    alike: tuple[int, ...]

    @classmethod
    def of(cls, multiply: Multiply, like: Tensor, most: int) -> RowCounts:
        """Find the numbers up to `most` for rows like `like` [inputs], on a GPU. It takes some 50 ms."""
        most = -(-most // ROW_STEP) * ROW_STEP
        generator = torch.Generator(like.device).manual_seed(0)
        x = torch.randn(most, *like.shape, generator=generator, device=like.device, dtype=like.dtype)
        whole = multiply(x)
        few = [rows for rows in FEW_ROWS if rows < most]
        tried = (*few, *range(FEW_ROWS[-1] // ROW_STEP * ROW_STEP + ROW_STEP, most, ROW_STEP))

        def same(rows: int) -> bool:
            starts = range(0, min(most, TRIED_ROWS) - rows + 1, rows) or (0,)
            parts = ((multiply(x[one : one + rows]), whole[one : one + rows]) for one in starts)
            return bool(torch.stack([(part == expected).all() for part, expected in parts]).all())

        return cls((*(rows for rows in tried if same(rows)), most))

    def multiply(self, x: Tensor, multiply: Multiply) -> Tensor:
        """Multiply, with rows of zeros behind those of x where that makes the number of rows one of these."""
        most = self.alike[-1]
        if x.shape[0] > most:
            return torch.cat([self.multiply(part, multiply) for part in torch.split(x, most)])
        rows = self.alike[bisect_left(self.alike, x.shape[0])]
        if rows > x.shape[0]:
            return multiply(F.pad(x, (0, 0, 0, rows - x.shape[0])))[: x.shape[0]]
        return multiply(x)


class KernelProducts(Products):
    """Makes products on a GPU; weights of 8 and 4 bits stay so.

    Parameters
    ----------
    chunk : int
        Most rows of a prompt that a layer multiplies at once.
    head_rows : int
        Most rows of prompts that the head multiplies at once.
    fp8_prompts : bool
        Whether prompts are multiplied in FP8, see KernelLinear.
    experts : ExpertKernels, optional
        Those of a model with experts.
    """

    def __init__(
        self,
        kernels: ProductKernels,
        chunk: int,
        head_rows: int,
        *,
        fp8_prompts: bool = False,
        experts: ExpertKernels | None = None,
    ) -> None:
        super().__init__(kernels.dtype)
        self._experts = experts
        self._kernels, self._chunk, self._head_rows = kernels, chunk, head_rows
        self._fp8_prompts = fp8_prompts
        self._counts: dict[tuple[torch.Size, torch.dtype, bool], RowCounts] = {}

    def linear(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Linear:
        return self._make(weight, bias, scale, self._chunk)

    def experts(self, config: ExpertsConfig, gate_up: Parts, down: Parts) -> Experts:
        assert self._experts is not None, "the model has experts"
        looped = None if multiplies_groups(gate_up[0], self.dtype) else super().experts(config, gate_up, down)
        return KernelExperts(self._experts, gate_up, down, self._kernels.dequantise, looped)

    def head(self, weight: Tensor, scale: Tensor | None = None) -> Product:
        if scale is not None:
            return KernelHead(self._kernels, weight, scale)
        return self._make(weight, None, None, self._head_rows)

    def _make(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None, most: int) -> Linear:
        made = KernelLinear(self._kernels, weight, scale, bias, fp8_prompts=self._fp8_prompts)
        key = weight.shape, weight.dtype, bias is not None
        if key not in self._counts:
            inputs = self._kernels.formats.of(weight, scale).inputs(weight)
            like = torch.empty(inputs, dtype=self.dtype, device=weight.device)
            self._counts[key] = RowCounts.of(made.prompt_product(), like, most)
        made.counts = self._counts[key]
        return made
