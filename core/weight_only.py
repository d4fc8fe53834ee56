"""Weight-only quantisation: 8 bits a weight, a scale for each row of a matrix, activations as they are.

`dequantise` defines the value of the weights; kernels may multiply first and scale the sum, which rounds less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.errors import ConfigError

NONE = "none"
PRECISIONS = {  # values of EngineConfig.weight_only_precision: dtype of the weights, and its largest number
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
QUANTISED = ("qkv", "o", "gate_up", "down")  # products of a layer
# With EngineConfig.quantize_lm_head a matrix of its own in tied models too: the embedding stays.
HEAD = "lm_head.weight"
NOT_FINITE = "use another checkpoint, or download it again if that of its publisher is whole"  # remedy of a weight
NUMBERS = 1 << 22  # weights quantised at a time, in whole rows: a few float32 copies of them take memory meanwhile
INPUTS_MULTIPLE = 16  # a row must have a multiple of so many weights, because kernels load so many at once


def quantise(weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Round a weight [outputs, inputs] to 8 bits.

    A row's largest magnitude becomes the largest number of the format, 127 of int8 and 448 of float8_e4m3fn; there is no
    zero point. The row's other weights are rounded to the nearest number, ties to even. The scale is rounded to bfloat16
    first, so that kernels which take it in 16 bits multiply with the same number.

    Returns
    -------
    quantised : Tensor, int8 or float8_e4m3fn [outputs, inputs]
    scale : Tensor, float32 [outputs]
        Factor that turns a quantised row into its weights, a number of bfloat16; 1 for a row of zeros, and for a row whose
        weights are all so small (below 2e-36 with int8) that float32 has no exact scale for them. Such weights become zeros.

    Raises
    ------
    ConfigError
        If a weight is not finite.
    """
    quantised = torch.empty(weight.shape, dtype=PRECISIONS[precision][0], device=weight.device)
    scale = torch.empty(weight.shape[0], device=weight.device)
    step = max(1, NUMBERS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        quantised[rows], scale[rows] = _quantise_rows(weight[rows], start, precision)
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


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the weights [outputs, inputs] in `dtype` from the results of `quantise`: a float32 product, rounded once."""
    return (weight.float() * scale[:, None]).to(dtype)


def is_quantised(name: str, *, quantize_lm_head: bool = False) -> bool:
    """Whether weight-only quantisation applies to the weight of this name."""
    return name.endswith(tuple(f".{part}.weight" for part in QUANTISED)) or (quantize_lm_head and name == HEAD)


def stored_weight(name: str, weight: Tensor, precision: str, *, quantize_lm_head: bool = False) -> dict[str, Tensor]:
    """A weight as an engine of these fields of EngineConfig keeps it: quantised with its scale, or itself."""
    if precision == NONE or not is_quantised(name, quantize_lm_head=quantize_lm_head):
        return {name: weight}
    quantised, scale = quantise(weight, precision)
    return {name: quantised, f"{name}_scale": scale}
