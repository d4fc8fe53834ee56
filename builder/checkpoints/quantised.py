"""Quantised weights of Hugging Face checkpoints: the tensors that stand for a weight, and the numbers that they mean.

A weight's own tensors tell its format, by their names, types and shapes, so that layers which a publisher left out are read as
they are, and layers of several formats side by side. `quantization_config` tells what tensors cannot: whose rules they follow.

| whose | tensors of a weight | a weight's value |
|---|---|---|
| FP8 of DeepSeek, Qwen, FBGEMM, ModelOpt; compressed-tensors | weight, weight_scale(_inv), weight_zero_point | (q - z) s |
| compressed-tensors, packed | weight_packed, weight_scale, weight_zero_point, weight_g_idx, weight_shape | (q - z) s |
| NVFP4 of compressed-tensors | weight_packed, weight_scale, weight_global_scale | q s / global |
| NVFP4 of ModelOpt | weight, weight_scale, weight_scale_2 | q s global |
| AutoAWQ (GEMM), GPTQ | qweight, qzeros, scales, g_idx | (q - z) s |

Sources: compressed_tensors/compressors of compressed-tensors 0.20; AutoAWQ's awq/utils/packing_utils.py; AutoGPTQ's
auto_gptq/nn_modules/qlinear and GPTQModel's note on format v2; transformers' integrations/finegrained_fp8.py; NVIDIA ModelOpt's
modelopt/torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvseek.core.config import ASYMMETRIC_GROUP, FP8_GROUP, FP8_GROUPS, WEIGHT_GROUP, WEIGHT_GROUPS, group_inputs
from kvseek.core.errors import require
from kvseek.core.model_config import CHECK_CONFIG
from kvseek.core.weight_only import INT4, INT8_ASYMMETRIC, NOT_FINITE, NUMBERS, pack

from .files import DOWNLOAD_AGAIN, FLOAT_TYPES, StoredTensor
from .known_keys import KnownKeys

UNQUANTISED = "use the unquantised checkpoint"
UNREAD = {  # methods that are known and not read, and why
    "bitsandbytes": "its numbers are entries of a table, which no kernel here multiplies: ",
    "mxfp4": "it is published of gpt-oss, which kvseek does not serve: ",
}
WORD = 32  # bits of the numbers that narrower ones are packed into
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where of a word's eight numbers the first column stands, the second, and so on
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of E2M1 (OCP Microscaling Formats 1.0, table 5)
FP4_GROUP = 16  # weights of NVFP4 that share a scale
HALF_ROUNDING = 2.0**-11  # of a number, at most, when it is rounded to float16
# Parts of a module that are its weight; the first is what the others belong to.
PARTS = {
    "weight": ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_zero_point", "weight_g_idx"),
    "weight_packed": ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale"),
    "qweight": ("qzeros", "scales", "g_idx"),
}
KINDS = {"weight": ("F8_E4M3", "I8", "U8"), "weight_packed": ("I32", "U8"), "qweight": ("I32",)}  # types of the first
SCALES = (*FLOAT_TYPES, "F8_E4M3", "F8_E8M0")  # types of scales
TYPES = {  # of parts that are no scales
    "weight_zero_point": (*SCALES, "I8", "U8", "I32"),  # I32: packed
    "qzeros": ("I32",),
    **dict.fromkeys(("weight_g_idx", "g_idx", "weight_shape"), ("I32", "I64")),
}
OF_ALL = ("weight_scale_2", "weight_global_scale")  # one number
SCALE_NAMES = ("weight_scale", "weight_scale_inv", "scales")
NEEDED = {"weight": (), "weight_packed": ("weight_scale",), "qweight": ("qzeros", "scales")}
# Of activations and of the KV cache, which an engine keeps in its own type.
ACTIVATION_SCALES = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "input_scale_ub",
    "output_scale",
)
CACHE_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")
EXCLUSIONS = "modules_to_not_convert ignored_layers ignore exclude_modules modules_to_convert"
KERNELS = "*exllama* use_cuda_fp16 max_input_length backend do_fuse fuse_max_seq_len modules_to_fuse"
MAKING = """group_size sym desc_act damp_* static_groups true_sequential dataset tokenizer model_name_or_path model_file_base_name
    batch_size pad_token_id block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize
    cache_block_outputs model_seqlen act_group_aware lm_head dynamic meta"""


@dataclass(frozen=True)
class Rules:
    """One publisher's quantization_config.

    Attributes
    ----------
    keys : KnownKeys
        Of the object.
    kinds : tuple of str
        First parts of PARTS that its weights have.
    """

    keys: KnownKeys
    kinds: tuple[str, ...]


def _rules(used: str, neutral: Mapping[str, tuple[Any, ...]], idle: str, kinds: str) -> Rules:
    reason = (
        "how the weights were quantised and which were not, which the tensors tell, and how other programs run them"
    )
    return Rules(
        KnownKeys("quantization_config", f"quant_method {used}", neutral, {reason: idle}), tuple(kinds.split())
    )


RULES = {
    "fp8": _rules(
        "weight_block_size kv_cache_scheme",
        {
            "fmt": ("e4m3", "float8_e4m3fn"),
            "scale_fmt": ("float", "ue8m0"),
            "dequantize": (False,),
            "expert_dtype": ("fp8",),
        },
        f"activation_scheme {EXCLUSIONS}",
        "weight",
    ),
    "fbgemm_fp8": _rules("", {}, f"activation_scale_ub {EXCLUSIONS}", "weight"),
    "compressed-tensors": _rules(
        "config_groups kv_cache_scheme format quantization_status",
        {"transform_config": ({}, None), "moe_sparsity_config": ({}, None), "dequantize": (False,)},
        f"sparsity_config global_compression_ratio version run_compressed use_optimized_inference {EXCLUSIONS}",
        "weight weight_packed",
    ),
    "modelopt": _rules(
        "quant_algo kv_cache_scheme kv_cache_quant_algo",
        {"has_zero_point": (False,), "pre_quant_scale": (False,)},
        f"config_groups group_size producer quantized_layers {EXCLUSIONS}",
        "weight",
    ),
    "awq": _rules(
        "bits version format checkpoint_format",
        {"method": ("awq",), "pack_dtype": ("int32",)},
        f"zero_point w_bit q_group_size {MAKING} {EXCLUSIONS} {KERNELS}",
        "qweight",
    ),
    "gptq": _rules(
        "bits format checkpoint_format",
        {"is_marlin_format": (False,), "method": ("gptq",), "pack_dtype": ("int32",)},
        f"{MAKING} {EXCLUSIONS} {KERNELS}",
        "qweight",
    ),
}
FORMATS = (
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
)
ALGORITHMS = ("FP8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "W4A16_NVFP4", "MIXED_PRECISION")
VERSIONS = {"gptq": 1, "gptq_v2": 0}  # of GPTQ's formats, and what is added to the zero points that are stored


@dataclass(frozen=True)
class Quantisation:
    """What a quantization_config tells beyond the tensors.

    Attributes
    ----------
    method : str
        One of RULES.
    bits : int or None
        Of the weights of `awq` and `gptq`.
    zero_offset : int
        What is added to stored zero points.
    block : tuple of int or None
        Rows and columns that share a scale.
    cache : bool
        Whether it asks for a quantised KV cache.
    """

    method: str
    bits: int | None = None
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    cache: bool = False

    @classmethod
    def read(cls, values: Any) -> Quantisation:
        """Parse a quantization_config; raises ConfigError on one that cannot be computed with its own numbers."""
        require(isinstance(values, dict), "quantization_config", values, "an object", CHECK_CONFIG)
        method = values.get("quant_method")
        known = isinstance(method, str) and method in RULES
        remedy = f"{UNREAD.get(method, '')}{UNQUANTISED}" if isinstance(method, str) else UNQUANTISED
        require(known, "quantization_config.quant_method", method, f"one of {', '.join(RULES)}", remedy)
        RULES[method].keys.check(values)
        cache = any(values.get(name) is not None for name in ("kv_cache_scheme", "kv_cache_quant_algo"))
        if method in ("awq", "gptq"):
            bits = values.get("bits", values.get("w_bit"))
            allowed = (4,) if method == "awq" else (2, 3, 4, 8)
            _one_of("bits", bits, allowed)
            _same_bits(values.get("dynamic"), bits)
            names = ("version", "format", "checkpoint_format")  # of which a file has one, or several
            stated = {name: values[name] for name in names if values.get(name) is not None}
            versions = {"gemm": 0} if method == "awq" else VERSIONS
            for name, value in stated.items():
                _one_of(name, value.lower() if isinstance(value, str) else value, tuple(versions))
            found = {value.lower() for value in stated.values()} or {next(iter(versions))}
            require(len(found) == 1, "quantization_config: formats", stated, "the same", CHECK_CONFIG)
            return cls(method, bits, versions[found.pop()])
        if method == "modelopt":
            _one_of("quant_algo", values.get("quant_algo"), ALGORITHMS)
        block = values.get("weight_block_size")
        if method == "compressed-tensors":
            _one_of("format", values.get("format"), FORMATS)
            # Older tools say "frozen" of compressed weights; others have another type, and are refused.
            _one_of("quantization_status", values.get("quantization_status", "compressed"), ("compressed", "frozen"))
            block = _block_structure(values.get("config_groups"))
        if block is not None:
            sound = isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)
            require(sound, "quantization_config: block of weights", block, "[rows, columns]", CHECK_CONFIG)
            block = tuple(block)
        return cls(method, block=block, cache=cache)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    fits = any(type(value) is type(one) and value == one for one in allowed)
    require(fits, f"quantization_config.{name}", value, f"one of {', '.join(map(str, allowed))}", UNQUANTISED)


def _same_bits(dynamic: Any, bits: int) -> None:
    """Refuse GPTQModel's bits of some modules: the tensors of these would not tell them from another shape."""
    for pattern, own in dynamic.items() if isinstance(dynamic, dict) else ():
        found = own.get("bits", bits) if isinstance(own, dict) else bits
        name, limit = f"quantization_config.dynamic: bits of {pattern!r}", f"{bits}, those of all modules"
        require(found == bits, name, found, limit, UNQUANTISED)


def _block_structure(groups: Any) -> Any:
    """Return the block that weights of compressed-tensors share a scale in; None where they have another strategy."""
    require(isinstance(groups, dict), "quantization_config.config_groups", groups, "an object", CHECK_CONFIG)
    blocks = [
        weights.get("block_structure")
        for group in groups.values()
        if isinstance(group, dict) and isinstance(weights := group.get("weights"), dict)
    ]
    different = [one for one in blocks if one != blocks[0]]
    require(not different, "quantization_config.config_groups: block_structure", blocks, "the same in all", UNQUANTISED)
    return blocks[0] if blocks else None


def modelopt_config(document: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the `quantization` of ModelOpt's hf_quant_config.json into a quantization_config."""
    values = document.get("quantization")
    require(isinstance(values, dict), "quantization", values, "an object", CHECK_CONFIG)
    return {"quant_method": "modelopt", **values}  # type: ignore[dict-item]


class NarrowWeight(Protocol):
    """A weight that is stored quantised."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Formats of core/weight_only.py that keep the numbers as they are, that of the fewest bytes first."""

    @property
    def why(self) -> str:
        """Why there is no such format, as "it has ..."; empty if there is one."""

    @property
    def group(self) -> int:
        """With INT4, one of WEIGHT_GROUPS that divides the inputs that share a scale."""

    def expanded(self, precision: str, device: str) -> str:
        """Why an engine on a device cannot keep the numbers in one of `precisions`, as `why`; empty if it can."""

    def as_stored(self, precision: str, group: int) -> tuple[Tensor, Tensor]:
        """Read what `quantise` makes with one of `precisions`, with INT4 in groups of `group`, a divisor of its own."""


class Kept(NamedTuple):
    """What keeps a weight's numbers: see NarrowWeight."""

    precisions: tuple[str, ...] = ()
    group: int = WEIGHT_GROUP
    why: str = ""


def beyond_float16(scale: Tensor, precision: str) -> str:
    """Why scales, float32, are not those of INT4 or INT8_ASYMMETRIC, as "has ..."; empty if float16 has them."""
    most = torch.finfo(torch.float16).max / (16 if precision == INT4 else 256)  # a value of 0 is up to so many scales
    close = (scale.half().float() - scale).abs() <= HALF_ROUNDING * scale.abs()
    return "" if bool((close & (scale.abs() < most)).all()) else "has scales beyond the range of float16"


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [outputs, inputs] and its parts.

    Attributes
    ----------
    rules : Quantisation
    parts : mapping of str to StoredTensor
        By the names of PARTS, without the module's.
    """

    rules: Quantisation
    parts: Mapping[str, StoredTensor]

    @cached_property
    def first(self) -> StoredTensor:
        """The part that holds the weights."""
        return next(self.parts[name] for name in PARTS if name in self.parts)

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        return self.first.place

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns; raises ConfigError if the parts contradict each other."""
        shape = self.first.shape
        require(len(shape) == 2, f"{self.place}: shape", shape, "of two numbers", UNQUANTISED)
        if "qweight" in self.parts:
            across, along = (WORD // 4 if self.rules.method == "awq" else 1), shape[0]
            if self.rules.method == "gptq":
                along = shape[0] * WORD // self._bits
            return (shape[1] * across, along)
        if self.first.kind == "U8":  # two numbers of 4 bits
            return (shape[0], shape[1] * 2)
        if "weight_shape" in self.parts:
            self._check("weight_shape", self.parts["weight_shape"].shape, (2,))
            return tuple(self.parts["weight_shape"].read().tolist())
        return shape

    @property
    def precisions(self) -> tuple[str, ...]:
        """See NarrowWeight."""
        return self._kept.precisions

    @property
    def why(self) -> str:
        """See NarrowWeight."""
        return self._kept.why

    @property
    def group(self) -> int:
        """See NarrowWeight."""
        return self._kept.group

    @cached_property
    def _kept(self) -> Kept:
        """By the shapes of the parts, and the order of the columns; says nothing of parts that contradict each other."""
        scale = self._scale
        simple = scale is not None and math.prod(scale.shape) in (1, self.shape[0])
        if self.first.kind == "F8_E4M3":
            if scale is None or len(self.parts) > 2:  # beside the numbers
                return Kept(why="has zero points, or several scales")
            if self.rules.block is None or scale.shape == (self.shape[0], 1):
                return Kept(("fp8",)) if simple else Kept(why="has groups")
            wide, inputs = self.rules.block[1], self.shape[1]
            fits = wide % FP8_GROUP == 0 and inputs % FP8_GROUP == 0
            return Kept((FP8_GROUPS,)) if fits else Kept(why=f"has {inputs} columns in blocks of {wide}")
        kept = self._kept_of_integers()
        alone = self.first.kind == "I8" and len(self.parts) == 2 and simple
        return kept._replace(precisions=("int8", *kept.precisions), why="") if alone else kept

    @property
    def _scale(self) -> StoredTensor | None:
        return next((self.parts[name] for name in SCALE_NAMES if name in self.parts), None)

    def _kept_of_integers(self) -> Kept:
        """Of numbers of FP4, too, which are halves of integers."""
        columns = self.shape[1]
        turned = "qweight" in self.parts  # AWQ's and GPTQ's, whose columns are outputs
        bits = self._bits if turned else self.first.shape[1] * WORD / max(1, columns)
        packed = turned or ("weight_packed" in self.parts and self.first.kind == "I32")
        if packed and not 1 <= bits <= 8:
            return Kept(why=f"has numbers of {bits:g} bits")
        if self._scale is None or self.rules.block is not None:
            return Kept(why="has no scale, or blocks of them")
        scales = self._scale.shape
        count = max(1, scales[0 if turned else 1]) if len(scales) == 2 else 1
        if columns % (count * ASYMMETRIC_GROUP):
            return Kept(why=f"has groups of {columns / count:g} columns")
        order = self.parts.get("g_idx", self.parts.get("weight_g_idx"))
        if order is not None:
            groups = order.read().long().flatten()
            in_order = torch.equal(groups, torch.arange(columns) // (columns // count)) or bool((groups == -1).any())
            if not in_order:
                return Kept(why="has its columns in the order of activations")
        group = next((one for one in reversed(WEIGHT_GROUPS) if columns % (count * one) == 0), 0)
        if packed and bits == 4 and group:
            return Kept((INT4, INT8_ASYMMETRIC), group)
        return Kept((INT8_ASYMMETRIC,))

    def expanded(self, precision: str, device: str) -> str:
        """See NarrowWeight. Kernels of the CPU take scales of rows in bfloat16; INT4 and INT8_ASYMMETRIC have float16."""
        if precision == FP8_GROUPS:
            return "" if device == "cuda" else "has FP8 in blocks, which a GPU multiplies"
        grouped = precision in (INT4, INT8_ASYMMETRIC)
        if device == "cuda" and not grouped:
            return ""
        assert self._scale is not None, "by its precisions"
        if grouped and self._scale.kind == "F16":
            return ""
        scale = self._scales() if grouped and "qweight" not in self.parts else self._scale.read().float()
        if not grouped:
            return "" if torch.equal(scale.bfloat16().float(), scale) else "has scales with more digits than bfloat16"
        return beyond_float16(scale, precision)

    def as_stored(self, precision: str, group: int) -> tuple[Tensor, Tensor]:
        """See NarrowWeight.

        Integers and scales are the checkpoint's. The value of 0 of INT4 and INT8_ASYMMETRIC, -z s, is rounded to float16, by at
        most 2^-11 of itself (HALF_ROUNDING), or 2^-25 if that is more; so is s, by at most 2^-11 of itself, where it has more
        digits than float16. Rounding the weights to bfloat16 would move them by 2^-9.
        """
        if precision in (INT4, INT8_ASYMMETRIC):
            return self._with_zeros(precision, group)
        numbers, scale = self.first.read(), self._scales()
        scale = self._of_blocks(scale)[0] if precision == FP8_GROUPS else scale.reshape(-1)
        if precision == FP8_GROUPS:
            assert self.rules.block is not None, "by its precisions"
            scale = scale.repeat_interleave(self.rules.block[1] // FP8_GROUP, 1)[:, : self.shape[1] // FP8_GROUP]
        sound = bool(scale.isfinite().all()) and not (numbers.is_floating_point() and bool(numbers.isnan().any()))
        require(sound, f"{self.place}: a weight", "infinity or NaN", "finite", NOT_FINITE)
        return numbers, scale.contiguous() if scale.ndim > 1 else scale.expand(self.shape[0]).contiguous()

    def _with_zeros(self, precision: str, group: int) -> tuple[Tensor, Tensor]:
        numbers, zeros, scales, _ = self._numbers()
        if self.first.kind == "U8":  # FP4
            numbers, scales = numbers * 2, scales / 2
        turned = "qweight" in self.parts  # whose numbers, and zero points, begin at 0, those of others at -8 or -128
        shift = (0 if turned else 8) if precision == INT4 else (-128 if turned and self._bits == 8 else 0)
        zeros = scales.new_zeros(()) if zeros is None else self._points(zeros, scales)
        scales = self._by_row(scales)
        scale = torch.stack((scales, -(zeros + shift) * scales), dim=-1).half()
        require(bool(scale.isfinite().all()), f"{self.place}: a scale", "infinity or NaN", "finite", NOT_FINITE)
        stored = numbers.add_(shift).to(torch.uint8 if precision == INT4 else torch.int8)
        repeats = self.shape[1] // group_inputs(precision, group) // scales.shape[1]
        return pack(stored) if precision == INT4 else stored, scale.repeat_interleave(repeats, 1)

    def _points(self, zeros: Tensor, scales: Tensor) -> Tensor:
        zeros = self._by_row(zeros)
        self._check("zero points of a row", zeros.shape[1], self._by_row(scales).shape[1])
        return zeros

    def _of_blocks(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Scales of blocks as those of rows, and each column's group."""
        assert self.rules.block is not None, "whoever calls it has looked"
        (rows, columns), (high, wide) = self.shape, self.rules.block
        self._check("scales", tuple(scales.shape), (-(-rows // high), -(-columns // wide)))
        return scales.repeat_interleave(high, 0)[:rows], torch.arange(columns) // wide

    def read(self) -> Tensor:
        """Compute the weights, float32 [outputs, inputs]: products in float32, which are exact of integers and 16-bit scales."""
        numbers, zeros, scales, groups = self._numbers()
        rows, columns = self.shape
        if self.rules.block is not None and scales.ndim == 2 and scales.shape != (rows, 1):
            scales, groups = self._of_blocks(scales)
        zeros = None if zeros is None else self._points(zeros, scales)
        scales = self._by_row(scales)
        count = scales.shape[1]
        if groups is None:
            self._check("columns that the scales leave over", columns % count, 0)
            groups = torch.arange(columns) // (columns // count)
        self._check("columns with a group", tuple(groups.shape), (columns,))
        self._check("smallest and largest group", (int(groups.min()), int(groups.max())), (0, count - 1))
        for step in self._steps():
            if zeros is not None:
                numbers[step] -= zeros[step][:, groups]
            numbers[step] *= scales[step][:, groups]
        return numbers

    def _by_row(self, values: Tensor) -> Tensor:
        """One number for all weights, one a row, or several a row: [outputs, groups]."""
        rows = self.shape[0]
        values = values.reshape(-1, 1) if values.ndim < 2 else values
        sound = values.ndim == 2 and values.shape[1] > 0
        limit = "[rows, groups]"
        require(sound, f"{self.place}: shape of scales or zero points", tuple(values.shape), limit, DOWNLOAD_AGAIN)
        self._check("rows of scales and zero points", len(values), rows if len(values) > 1 else 1)
        return values.expand(rows, -1)

    def _numbers(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Unpack: float32 numbers [outputs, inputs], zero points and scales [outputs, groups], and each column's group."""
        rows, columns = self.shape
        if "qweight" in self.parts:
            return self._columns()
        scales = self._scales()
        groups = self.parts["weight_g_idx"].read().long() if "weight_g_idx" in self.parts else None
        if groups is not None and (groups == -1).any():  # compressed-tensors' value for columns that are in order
            groups = None
        if self.first.kind == "U8":
            self._check("scales", tuple(scales.shape), (rows, columns // FP4_GROUP))
            self._check("scales of all weights", sum(name in self.parts for name in OF_ALL), 1)
            return self._fp4(), None, scales, None
        zeros = self.parts.get("weight_zero_point")
        if "weight_packed" not in self.parts:
            return self.first.read().float(), None if zeros is None else zeros.read().float(), scales, groups
        self._check(f"columns beyond a multiple of {WORD}", columns % WORD, 0)  # else the words do not tell the bits
        bits = self.first.shape[1] * WORD // columns
        require(1 <= bits <= 8, f"{self.place}: bits of a number", bits, "1 to 8", DOWNLOAD_AGAIN)
        self._check("columns of packed numbers", self.first.shape, (rows, -(-columns * bits // WORD)))
        half = 1 << (bits - 1)
        numbers = self._unpacked(self.first.read(), bits, columns) - half
        if zeros is None:
            return numbers, None, scales, groups
        points = zeros.read()
        if points.dtype is torch.int32:
            self._check("packed zero points", points.shape[:-1], (-(-rows * bits // WORD),))
            points = _unpack(points.T, bits, rows).T - half
        return numbers, points.float(), scales, groups

    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Unpack AWQ's and GPTQ's, whose tensors have a column for each output."""
        rows, columns = self.shape
        order = torch.tensor(AWQ_ORDER) if self.rules.method == "awq" else None
        stored = self.parts["scales"].shape
        self._check("axes of scales", len(stored), 2)
        self._check("scales", stored[1], rows)
        self._check("packed zero points", self.parts["qzeros"].shape, (stored[0], -(-rows * self._bits // WORD)))
        scales = self.parts["scales"].read().float().T.contiguous()
        zeros = _unpack(self.parts["qzeros"].read(), self._bits, rows, order).T + self.rules.zero_offset
        if self.rules.method == "awq":
            numbers = self._unpacked(self.first.read(), self._bits, rows, order).T.contiguous()
        else:
            numbers = self._unpacked(self.first.read().T.contiguous(), self._bits, columns)
        groups = self.parts["g_idx"].read().long() if "g_idx" in self.parts else None
        return numbers, zeros.float(), scales, groups

    def _scales(self) -> Tensor:
        names = [name for name in ("weight_scale", "weight_scale_inv") if name in self.parts]
        self._check("scales beside it", len(names), 1)
        scales = self.parts[names[0]].read().float()
        for name in (name for name in OF_ALL if name in self.parts):
            self._check(name, math.prod(self.parts[name].shape), 1)
        if "weight_scale_2" in self.parts:
            scales *= self.parts["weight_scale_2"].read().float()
        if "weight_global_scale" in self.parts:
            scales /= self.parts["weight_global_scale"].read().float()
        return scales

    def _fp4(self) -> Tensor:
        values = torch.tensor([*FP4, *(-one for one in FP4)])
        packed, out = self.first.read(), torch.empty(self.shape)
        for step in self._steps():
            part = packed[step].int()
            out[step] = values[torch.stack((part & 15, part >> 4), dim=-1).flatten(1)]
        return out

    def _unpacked(self, words: Tensor, bits: int, count: int, order: Tensor | None = None) -> Tensor:
        """`_unpack` into float32, some rows at a time."""
        out = torch.empty(words.shape[0], count)
        for step in _steps(words.shape[0], count):
            out[step] = _unpack(words[step], bits, count, order)
        return out

    def _steps(self) -> Iterator[slice]:
        return _steps(*self.shape)

    @property
    def _bits(self) -> int:
        assert self.rules.bits is not None, "Quantisation.read has checked it"
        return self.rules.bits

    def _check(self, what: str, found: Any, expected: Any) -> None:
        require(found == expected, f"{self.place}: {what}", found, str(expected), DOWNLOAD_AGAIN)


def _steps(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, NUMBERS // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _unpack(words: Tensor, bits: int, count: int, order: Tensor | None = None) -> Tensor:
    """Take the first `count` numbers of `bits` bits out of each row of int32 words, the lowest bits first: int64 [rows, count].

    Parameters
    ----------
    order : Tensor, int64 [8], optional
        Where in a word each of its numbers stands.
    """
    wide = words.long() & (1 << WORD) - 1
    wide = torch.cat((wide, wide.new_zeros(len(wide), 1)), dim=1)  # behind a number that ends with the last word
    places = torch.arange(count)
    if order is not None:
        places = places // len(order) * len(order) + order[places % len(order)]
    word, shift = places * bits // WORD, places * bits % WORD
    return (wide[:, word] >> shift | wide[:, word + 1] << WORD - shift) & (1 << bits) - 1


class QuantisedTensors:
    """The weights of a checkpoint some of which are quantised.

    Parameters
    ----------
    rules : Quantisation
    tensors : mapping of str to StoredTensor
        All of the files, by name.
    """

    def __init__(self, rules: Quantisation, tensors: Mapping[str, StoredTensor]) -> None:
        self.rules, self._tensors = rules, tensors

    def find(self, name: str) -> QuantisedWeight | None:
        """Return a quantised weight by its Hugging Face name; None if it is none, or not there.

        Raises
        ------
        ConfigError
            If its tensors are of a format that the checkpoint's rules do not have.
        """
        if not name.endswith(".weight"):
            return None
        module = name.removesuffix("weight")
        kinds = [kind for kind in PARTS if module + kind in self._tensors]
        if not kinds:
            return None
        kind = kinds[0]
        parts = {one: self._tensors[module + one] for one in (kind, *PARTS[kind]) if module + one in self._tensors}
        own, place = parts[kind], parts[kind].place
        if kind == "weight" and own.kind in FLOAT_TYPES and len(parts) == 1:
            return None
        allowed = {one: KINDS[one] for one in RULES[self.rules.method].kinds}
        require(
            kind in allowed, f"{place}: its name", kind, f"{' or '.join(allowed)} by quantization_config", UNQUANTISED
        )
        for name, part in parts.items():
            types = allowed[kind] if name == kind else TYPES.get(name, SCALES)
            require(part.kind in types, f"{part.place}: dtype", part.kind, f"one of {', '.join(types)}", UNQUANTISED)
        missing = [name for name in NEEDED[kind] if name not in parts]
        require(not missing, f"{place}: missing beside it", missing, "nothing", DOWNLOAD_AGAIN)
        return QuantisedWeight(self.rules, parts)

    def used(self, names: set[str]) -> set[str]:
        """List the tensors that weights of these names are made from, and those that an engine has no use for by design.

        The latter are scales of activations and of the KV cache, and the zeros that GPTQ's tools write as biases of modules
        which have none.
        """
        used = set(names)
        for name in names:
            if name.endswith(".weight"):
                module, found = name.removesuffix("weight"), self.find(name)
                used |= {module + part for part in (() if found is None else found.parts)}
                used |= {module + part for part in (*ACTIVATION_SCALES, *CACHE_SCALES)}
                used |= {f"{module.removesuffix('.').rpartition('.')[0]}.{part}" for part in CACHE_SCALES}
        return used | {name for name in self._tensors if name not in used and self._is_no_bias(name)}

    def _is_no_bias(self, name: str) -> bool:
        module = name.removesuffix("bias")
        if self.rules.method != "gptq" or not name.endswith(".bias") or f"{module}qweight" not in self._tensors:
            return False
        return not self._tensors[name].read().any()

    @property
    def reduces_activations(self) -> bool:
        """Whether the publisher's scales of activations or of the KV cache are there, which an engine does not apply."""
        return any(name.rpartition(".")[2] in (*ACTIVATION_SCALES, *CACHE_SCALES) for name in self._tensors)
