"""Weight-only quantisation: narrow weights, activations as they are.

Weights of 8 bits have a scale for each row of a matrix. Others are GGUF's blocks, WEIGHT_GROUP neighbours of a row: INT4 is Q4_1,
4 bits, a factor and the value of 0, and an output head beside such layers INT8_GROUPS, which is Q8_0, 8 bits and a factor.

`dequantise` defines the value of the weights; kernels may multiply first and scale the sum, which rounds less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import GROUPED, WEIGHT_GROUP
from kvseek.core.errors import ConfigError

NONE = "none"
INT4, INT8_GROUPS = GROUPED  # values of EngineConfig.weight_only_precision, too
PRECISIONS = {  # values of EngineConfig.weight_only_precision with a scale a row: dtype of the weights, and its largest number
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
QUANTISED = ("qkv", "o", "gate_up", "down")  # products of a layer
# With EngineConfig.quantize_lm_head a matrix of its own in tied models too: the embedding stays.
HEAD = "lm_head.weight"
NOT_FINITE = "use another checkpoint, or download it again if that of its publisher is whole"  # remedy of a weight
NUMBERS = 1 << 22  # weights quantised at a time, in whole rows: a few float32 copies of them take memory meanwhile
INPUTS_MULTIPLE = 16  # a row must have a multiple of so many weights, because kernels load so many at once


def number_format(name: str, precision: str, *, quantize_lm_head: bool = False) -> str:
    """The format of a weight of an engine of these fields: one of PRECISIONS or GROUPED, or NONE."""
    if precision == NONE or not is_quantised(name, quantize_lm_head=quantize_lm_head):
        return NONE
    return INT8_GROUPS if precision == INT4 and name == HEAD else precision


Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def layout(shape: tuple[int, ...], precision: str) -> tuple[Layout, Layout]:
    """The tensors that a weight [outputs, inputs] is quantised to: the numbers, and their scales."""
    outputs, inputs = shape
    if precision == INT4:
        return ((outputs, inputs // 2), torch.uint8), ((outputs, inputs // WEIGHT_GROUP, 2), torch.float16)
    if precision == INT8_GROUPS:
        return (shape, torch.int8), ((outputs, inputs // WEIGHT_GROUP), torch.float16)
    return (shape, PRECISIONS[precision][0]), ((outputs,), torch.float32)


def quantise(weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Round a weight [outputs, inputs].

    With a scale a row, a row's largest magnitude becomes the largest number of the format, 127 of int8 and 448 of
    float8_e4m3fn; there is no zero point. The row's other weights are rounded to the nearest number, ties to even. The scale is
    rounded to bfloat16 first, so that kernels which take it in 16 bits multiply with the same number.

    Returns
    -------
    quantised : Tensor, int8 or float8_e4m3fn [outputs, inputs]
        With INT4 uint8 [outputs, inputs / 2]: byte j of a group has weight j in its low bits, and j + 16 in its high ones.
    scale : Tensor, float32 [outputs]
        Factor that turns a quantised row into its weights, a number of bfloat16; 1 for a row of zeros, and for a row whose
        weights are all so small (below 2e-36 with int8) that float32 has no exact scale for them. Such weights become zeros.
        In groups float16 [outputs, groups], and with INT4 [outputs, groups, 2]: the factor, and the value of 0.

    Raises
    ------
    ConfigError
        If a weight is not finite, or in groups too large for float16.
    """
    quantised, scale = (
        torch.empty(shape, dtype=dtype, device=weight.device) for shape, dtype in layout(tuple(weight.shape), precision)
    )
    make = _quantise_rows if precision in PRECISIONS else _quantise_groups
    step = max(1, NUMBERS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        quantised[rows], scale[rows] = make(weight[rows], start, precision)
    return quantised, scale


def _quantise_rows(weight: Tensor, first: int, precision: str) -> tuple[Tensor, Tensor]:
    dtype, largest = PRECISIONS[precision]
    wide = weight.float()
    magnitude = wide.abs().amax(dim=1)
    if not magnitude.isfinite().all():
        row = first + int((~magnitude.isfinite()).nonzero()[0])
        raise ConfigError(f"row {row} holds infinity or NaN: must be finite; {NOT_FINITE}")
    scale = (magnitude / largest).bfloat16().float()
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 1.0)
    scaled = wide / scale[:, None]
    rounded = scaled.round() if dtype is torch.int8 else scaled
    return rounded.clamp(-largest, largest).to(dtype), scale


def _groups(weight: Tensor, size: int = WEIGHT_GROUP) -> Tensor:
    return weight.view(weight.shape[0], -1, size)


def _quantise_groups(weight: Tensor, first: int, precision: str) -> tuple[Tensor, Tensor]:
    groups = _groups(weight).float()
    if precision == INT8_GROUPS:
        scale = (groups.abs().amax(dim=-1) / 127).half()
    else:
        least, most = groups.aminmax(dim=-1)
        scale = torch.stack(((most - least) / 15, least), dim=-1).half()
    if not scale.isfinite().all():
        row = first + int((~scale.flatten(1).isfinite().all(dim=1)).nonzero()[0])
        raise ConfigError(f"row {row} holds NaN, or a weight too large for {precision}: must be finite; {NOT_FINITE}")
    if precision == INT8_GROUPS:
        factor = torch.where(scale > 0, scale, 1.0).float()[..., None]
        return (groups / factor).round().clamp(-127, 127).to(torch.int8).flatten(1), scale
    factor, zero = torch.where(scale[..., 0] > 0, scale[..., 0], 1.0).float()[..., None], scale[..., 1:].float()
    numbers = ((groups - zero) / factor).round().clamp(0, 15).to(torch.uint8)
    low, high = numbers.chunk(2, dim=-1)
    return (low | high << 4).flatten(1), scale


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the weights [outputs, inputs] in `dtype` from the results of `quantise`: in float32, rounded once."""
    if weight.dtype is torch.uint8:
        packed = _groups(weight, WEIGHT_GROUP // 2)
        numbers = torch.cat((packed & 15, packed >> 4), dim=-1).float()
        return (numbers * scale[..., :1].float() + scale[..., 1:].float()).flatten(1).to(dtype)
    if scale.ndim == 2:
        numbers = _groups(weight).float()
        return (numbers * scale[..., None].float()).flatten(1).to(dtype)
    return (weight.float() * scale[:, None]).to(dtype)


def is_quantised(name: str, *, quantize_lm_head: bool = False) -> bool:
    """Whether weight-only quantisation applies to the weight of this name."""
    return name.endswith(tuple(f".{part}.weight" for part in QUANTISED)) or (quantize_lm_head and name == HEAD)


def stored_weight(name: str, weight: Tensor, precision: str, *, quantize_lm_head: bool = False) -> dict[str, Tensor]:
    """A weight as an engine of these fields of EngineConfig keeps it: quantised with its scale, or itself."""
    own = number_format(name, precision, quantize_lm_head=quantize_lm_head)
    if own == NONE:
        return {name: weight}
    quantised, scale = quantise(weight, own)
    return {name: quantised, f"{name}_scale": scale}
