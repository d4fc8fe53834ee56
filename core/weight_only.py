"""Weight-only quantisation: narrow weights, activations as they are.

Weights of 8 bits have a scale for each row of a matrix. Others have scales in groups of neighbours of a row:

| precision | weight [outputs, inputs] | scale [outputs, inputs / group] | group | also called |
|---|---|---|---|---|
| INT4 | uint8, two a byte | float16 [..., 2]: the factor, and the value of 0 | 32, 64, 128 | Q4_1 of GGUF, AWQ, GPTQ |
| INT8_GROUPS | int8 | float16 | 32 | Q8_0 of GGUF; the output head beside INT4 |
| INT8_ASYMMETRIC | int8 | float16 [..., 2], as of INT4 | 16 | holds Q6_K and most other integers, NVFP4 |
| FP8_GROUPS | float8_e4m3fn | float32 | 128 | FP8 in blocks of 128 x 128 of DeepSeek and Qwen |

`dequantise` defines the value of the weights; kernels may multiply first and scale the sum, which rounds less.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvseek.core.config import FP8_GROUPS, GROUPED, WEIGHT_GROUP, group_inputs
from kvseek.core.errors import ConfigError

NONE = "none"
INT4, INT8_GROUPS, INT8_ASYMMETRIC = GROUPED  # values of EngineConfig.weight_only_precision, too
PRECISIONS = {  # values of EngineConfig.weight_only_precision with a scale a row: dtype of the weights, and its largest number
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
QUANTISED = ("qkv", "qkvz", "o", "gate_up", "down")  # products of a layer
# With EngineConfig.quantize_lm_head a matrix of its own in tied models too: the embedding stays.
HEAD = "lm_head.weight"
NOT_FINITE = "use another checkpoint, or download it again if that of its publisher is whole"  # remedy of a weight
ALIKE: Mapping[str, str] = {}  # weight_formats of an engine whose matrices have one format
NUMBERS = 1 << 22  # weights quantised at a time, in whole rows: a few float32 copies of them take memory meanwhile
PACKED = 32  # inputs whose INT4 bytes lie together, whatever their group
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's range, which are tried
INPUTS_MULTIPLE = 16  # a row must have a multiple of so many weights, because kernels load so many at once


def number_format(
    name: str, precision: str, *, quantize_lm_head: bool = False, weight_formats: Mapping[str, str] = ALIKE
) -> str:
    """The format of a weight of an engine of these fields: one of PRECISIONS or GROUPED, FP8_GROUPS, or NONE."""
    if precision == NONE or not is_quantised(name, quantize_lm_head=quantize_lm_head):
        return NONE
    usual = INT8_GROUPS if precision == INT4 and name == HEAD else precision
    return weight_formats.get(name.removesuffix(".weight"), usual)


Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def layout(shape: tuple[int, ...], precision: str, weight_group: int = WEIGHT_GROUP) -> tuple[Layout, Layout]:
    """The tensors that a weight [outputs, inputs] is quantised to: the numbers, and their scales.

    `weight_group` is the inputs of a group of INT4.
    """
    outputs, inputs = shape
    groups = (outputs, inputs // group_inputs(precision, weight_group))
    if precision == INT4:
        return ((outputs, inputs // 2), torch.uint8), ((*groups, 2), torch.float16)
    if precision in (INT8_GROUPS, INT8_ASYMMETRIC):
        return (shape, torch.int8), ((*groups, 2) if precision == INT8_ASYMMETRIC else groups, torch.float16)
    if precision == FP8_GROUPS:
        return (shape, torch.float8_e4m3fn), (groups, torch.float32)
    return (shape, PRECISIONS[precision][0]), ((outputs,), torch.float32)


def quantise(
    weight: Tensor, precision: str, weight_group: int = WEIGHT_GROUP, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round a weight [outputs, inputs]; with INT4 in groups of `weight_group` inputs.

    With a scale a row, a row's largest magnitude becomes the largest number of the format, 127 of int8 and 448 of
    float8_e4m3fn; there is no zero point. The row's other weights are rounded to the nearest number, ties to even. The scale is
    rounded to bfloat16 first, so that kernels which take it in 16 bits multiply with the same number.

    INT4 divides the range of a group into 15 equal steps, INT8_ASYMMETRIC into 255. With `importance`, float32 [inputs] or [1]
    and positive, scales of INT4 are sought that make the sum of squared errors, an input's times its importance, smaller; that
    takes six times as long, and the ends of the range may be clipped. Where the weight is several matrices, one after the other,
    it may be [matrices, inputs].

    Returns
    -------
    quantised : Tensor, int8 or float8_e4m3fn [outputs, inputs]
        With INT4 uint8 [outputs, inputs / 2]: of each 32 inputs byte j has weight j in its low bits, and j + 16 in its high
        ones.
    scale : Tensor, float32 [outputs]
        Factor that turns a quantised row into its weights, a number of bfloat16; 1 for a row of zeros, and for a row whose
        weights are all so small (below 2e-36 with int8) that float32 has no exact scale for them. Such weights become zeros.
        In groups as `layout` says.

    Raises
    ------
    ConfigError
        If a weight is not finite, or in groups too large for float16.
    """
    quantised, scale = (
        torch.empty(shape, dtype=dtype, device=weight.device)
        for shape, dtype in layout(tuple(weight.shape), precision, weight_group)
    )
    groups = scale.shape[1] if scale.ndim > 1 else 1
    step = max(1, NUMBERS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        if precision in GROUPED:
            parts = _groups(weight[rows], groups)
            own = importance
            if importance is not None and importance.ndim == 2:  # each row's, of its matrix
                numbers = torch.arange(weight.shape[0], device=importance.device)[rows]
                own = importance[numbers * importance.shape[0] // weight.shape[0]]
            quantised[rows], scale[rows] = _quantise_groups(parts, start, precision, own)
        else:
            parts = _groups(weight[rows], groups).flatten(0, 1)
            numbers, factors = _quantise_rows(parts, start, groups, precision)
            quantised[rows], scale[rows] = numbers.view(-1, weight.shape[1]), factors.view(scale[rows].shape)
    return quantised, scale


def _quantise_rows(weight: Tensor, first: int, groups: int, precision: str) -> tuple[Tensor, Tensor]:
    """Round rows, or groups of them, with a scale each."""
    dtype, largest = PRECISIONS["fp8" if precision == FP8_GROUPS else precision]
    wide = weight.float()
    magnitude = wide.abs().amax(dim=1)
    if not magnitude.isfinite().all():
        row = first + int((~magnitude.isfinite()).nonzero()[0]) // groups
        raise ConfigError(f"row {row} holds infinity or NaN: must be finite; {NOT_FINITE}")
    scale = (magnitude / largest).bfloat16().float()
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 1.0)
    scaled = wide / scale[:, None]
    rounded = scaled.round() if dtype is torch.int8 else scaled
    return rounded.clamp(-largest, largest).to(dtype), scale


def _groups(weight: Tensor, groups: int) -> Tensor:
    return weight.view(weight.shape[0], groups, -1)


def _quantise_groups(groups: Tensor, first: int, precision: str, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    groups = groups.float()
    least, most = groups.aminmax(dim=-1)
    if precision == INT8_GROUPS:
        scale = (groups.abs().amax(dim=-1) / 127).half()
    elif precision == INT8_ASYMMETRIC:  # numbers from -128 on
        scale = torch.stack(((most - least) / 255, (most - least) * (128 / 255) + least), dim=-1).half()
    else:
        scale = torch.stack(((most - least) / 15, least), dim=-1).half()
    if not scale.isfinite().all():
        row = first + int((~scale.flatten(1).isfinite().all(dim=1)).nonzero()[0])
        raise ConfigError(f"row {row} holds NaN, or a weight too large for {precision}: must be finite; {NOT_FINITE}")
    if precision == INT8_GROUPS:
        factor = torch.where(scale > 0, scale, 1.0).float()[..., None]
        return (groups / factor).round().clamp(-127, 127).to(torch.int8).flatten(1), scale
    if precision == INT8_ASYMMETRIC:
        return _nearest(groups, scale, -128, 127).to(torch.int8).flatten(1), scale
    if importance is not None:
        each = importance.expand(*importance.shape[:-1], groups[0].numel())
        scale = _search(groups, least, most, scale, each.reshape(*importance.shape[:-1], *groups.shape[1:]))
    return pack(_nearest(groups, scale).to(torch.uint8).flatten(1)), scale


def _nearest(groups: Tensor, scale: Tensor, least: int = 0, most: int = 15) -> Tensor:
    """The numbers from `least` to `most`, as floats, whose values are nearest to the weights."""
    factor = torch.where(scale[..., 0] > 0, scale[..., 0], 1.0).float()[..., None]
    return ((groups - scale[..., 1:].float()) / factor).round_().clamp_(least, most)


def _search(groups: Tensor, least: Tensor, most: Tensor, scale: Tensor, importance: Tensor) -> Tensor:
    """Find scales of INT4 with a smaller sum of squared errors than `scale`, which are those of the whole range.

    A group's range is narrowed to its SHRINKS, and its numbers' scales become those of the least squares, as float16; of these
    and of `scale` the best stay. So ends that few weights have are clipped where the others gain by it. An input's errors count
    by its `importance`, float32 [groups of a row, inputs of a group], or of each row.
    """
    best, chosen = _squared_errors(groups, scale, importance), scale.clone()
    shares = importance / importance.sum(dim=-1, keepdim=True)
    mean = (groups * shares).sum(dim=-1)
    for shrink in SHRINKS:
        narrow = torch.stack(((most - least) * (shrink / 15), mean + (least - mean) * shrink), dim=-1)
        numbers = _nearest(groups, narrow)
        weighted = numbers * shares
        centre = weighted.sum(dim=-1)
        spread = (weighted * numbers).sum(dim=-1) - centre * centre
        factor = ((weighted * groups).sum(dim=-1) - centre * mean) / torch.where(spread > 0, spread, 1.0)
        fitted = torch.stack((factor, mean - factor * centre), dim=-1).half()
        errors = _squared_errors(groups, fitted, importance)
        better = (errors < best) & (factor > 0)  # False for NaN
        best, chosen = torch.where(better, errors, best), torch.where(better[..., None], fitted, chosen)
    return chosen


def _squared_errors(groups: Tensor, scale: Tensor, importance: Tensor) -> Tensor:
    values = _nearest(groups, scale).mul_(scale[..., :1].float()).add_(scale[..., 1:].float())
    return values.sub_(groups).square_().mul_(importance).sum(dim=-1)


def pack(numbers: Tensor) -> Tensor:
    """Pack numbers from 0 to 15, uint8 [outputs, inputs], as INT4 has them, uint8 [outputs, inputs / 2]."""
    low, high = numbers.view(numbers.shape[0], -1, 2, PACKED // 2).unbind(dim=2)
    return (low | high << 4).flatten(1)


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`."""
    parts = packed.view(packed.shape[0], -1, PACKED // 2)
    return torch.cat((parts & 15, parts >> 4), dim=-1).flatten(1)


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the weights [outputs, inputs] in `dtype` from the results of `quantise`: in float32, rounded once."""
    if scale.ndim == 3:
        numbers = _groups(unpack(weight) if weight.dtype is torch.uint8 else weight, scale.shape[1]).float()
        return (numbers * scale[..., :1].float() + scale[..., 1:].float()).flatten(1).to(dtype)
    if scale.ndim == 2:
        numbers = _groups(weight, scale.shape[1]).float()
        return (numbers * scale[..., None].float()).flatten(1).to(dtype)
    return (weight.float() * scale[:, None]).to(dtype)


def is_quantised(name: str, *, quantize_lm_head: bool = False) -> bool:
    """Whether weight-only quantisation applies to the weight of this name."""
    return name.endswith(tuple(f".{part}.weight" for part in QUANTISED)) or (quantize_lm_head and name == HEAD)


def stored_weight(
    name: str,
    weight: Tensor,
    precision: str,
    *,
    weight_group: int = WEIGHT_GROUP,
    quantize_lm_head: bool = False,
    weight_formats: Mapping[str, str] = ALIKE,
) -> dict[str, Tensor]:
    """A weight as an engine of these fields of EngineConfig keeps it: quantised with its scale, or itself."""
    own = number_format(name, precision, quantize_lm_head=quantize_lm_head, weight_formats=weight_formats)
    if own == NONE:
        return {name: weight}
    quantised, scale = quantise(weight, own, weight_group)
    return {name: quantised, f"{name}_scale": scale}
