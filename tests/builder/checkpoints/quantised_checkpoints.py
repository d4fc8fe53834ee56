"""Random checkpoints in the formats of quantised ones, packed here by the specifications, and what their numbers mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS = tuple(f"{name}_proj" for name in (*"qkvo", "gate", "up", "down"))
GROUP = 32
Packed = tuple[dict[str, Tensor], Tensor]  # the parts of a module, and its weight, float64 [outputs, inputs]


def words(numbers: Tensor, bits: int) -> Tensor:
    """Pack each row of unsigned numbers [rows, n] into int32, the lowest bits first."""
    each = (numbers[..., None] >> torch.arange(bits) & 1).flatten(1)  # bit by bit
    each = torch.nn.functional.pad(each, (0, -each.shape[1] % 32))
    return (each.unflatten(1, (-1, 32)) << torch.arange(32)).sum(2).to(torch.int32)  # wraps around


def drawn(outputs: int, inputs: int, bits: int, groups: int, *, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned numbers [outputs, inputs], zero points and float16 scales [outputs, groups]."""
    generator = torch.Generator().manual_seed(seed + outputs * inputs)
    numbers = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)
    zeros = torch.randint(1, 1 << bits, (outputs, groups), generator=generator)
    scales = (torch.rand(outputs, groups, generator=generator) * 0.02 + 0.01) / (1 << bits - 4 if bits > 4 else 1)
    return numbers, zeros, scales.half()


def values(numbers: Tensor, zeros: Tensor, scales: Tensor, columns: Tensor) -> Tensor:
    return (numbers - zeros[:, columns]).double() * scales[:, columns].double()


def spread(inputs: int, groups: int) -> Tensor:
    return torch.arange(inputs) // (inputs // groups)


def awq(outputs: int, inputs: int, group: int = GROUP) -> Packed:
    """AutoAWQ's GEMM: a word has the columns 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
    groups = inputs // group
    numbers, zeros, scales = drawn(outputs, inputs, 4, groups)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(rows: Tensor) -> Tensor:
        return words(rows.reshape(len(rows), -1, 8)[..., order].flatten(1), 4)

    parts = {"qweight": interleaved(numbers.T), "qzeros": interleaved(zeros.T), "scales": scales.T.contiguous()}
    return parts, values(numbers, zeros, scales, spread(inputs, groups))


def gptq(bits: int, less: int, group: int = GROUP, *, shuffled: bool = False) -> Callable[[int, int], Packed]:
    def pack(outputs: int, inputs: int) -> Packed:
        groups = inputs // group
        numbers, zeros, scales = drawn(outputs, inputs, bits, groups)
        columns = spread(inputs, groups)
        if shuffled:
            columns = columns[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        parts = {
            "qweight": words(numbers.T.contiguous().T, bits).T.contiguous(),
            "qzeros": words((zeros - less).T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": columns.int(),
            "bias": torch.zeros(outputs),
        }
        return parts, values(numbers, zeros, scales, columns)

    return pack


def packed(
    bits: int, group: int | None = GROUP, *, symmetric: bool, shuffled: bool = False
) -> Callable[[int, int], Packed]:
    """compressed-tensors' pack-quantized: numbers from -2^(bits - 1), which are packed from 0."""

    def pack(outputs: int, inputs: int) -> Packed:
        count = 1 if group is None else inputs // group
        numbers, zeros, scales = drawn(outputs, inputs, bits, count)
        columns = spread(inputs, count)
        scales = scales.bfloat16()
        parts = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if shuffled:
            columns = columns[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
            parts["weight_g_idx"] = columns.int()
        if symmetric:
            zeros = torch.full_like(zeros, 1 << bits - 1)
        else:
            parts["weight_zero_point"] = words(zeros.T.contiguous(), bits).T.contiguous()
        return parts, values(numbers, zeros, scales, columns)

    return pack


def int8(outputs: int, inputs: int) -> Packed:
    numbers, _, scales = drawn(outputs, inputs, 8, 1)
    numbers, scales = numbers - 128, scales.bfloat16()
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales.double()


def int8_with_zeros(outputs: int, inputs: int) -> Packed:
    parts, _ = int8(outputs, inputs)
    points = torch.arange(outputs)[:, None] % 9 - 4
    parts["weight_zero_point"] = points.to(torch.int8)
    return parts, (parts["weight"].double() - points) * parts["weight_scale"].double()


def eights(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(outputs + inputs)
    return (torch.randn(outputs, inputs, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8(name: str, shape: Callable[[int], tuple[int, ...]], dtype: torch.dtype) -> Callable[[int, int], Packed]:
    """FP8 with a scale for all, or for each row."""

    def pack(outputs: int, inputs: int) -> Packed:
        weight, sizes = eights(outputs, inputs), shape(outputs)
        generator = torch.Generator().manual_seed(inputs)
        scale = (torch.rand(sizes, generator=generator) * 1e-3 + 3e-4).to(dtype)
        by_row = scale.double().reshape(-1, 1)
        return {"weight": weight, name: scale, "input_scale": torch.ones(1)}, weight.double() * by_row

    return pack


def blocks(high: int, wide: int, name: str) -> Callable[[int, int], Packed]:
    """FP8 with a scale for each block; those at the right and lower ends are smaller."""

    def pack(outputs: int, inputs: int) -> Packed:
        weight = eights(outputs, inputs)
        scale = (
            torch.rand(-(-outputs // high), -(-inputs // wide), generator=torch.Generator().manual_seed(inputs)) * 1e-3
        )
        whole = scale.repeat_interleave(high, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
        return {"weight": weight, name: scale}, weight.double() * whole.double()

    return pack


def nvfp4(modelopt: bool) -> Callable[[int, int], Packed]:
    """E2M1, an E4M3 scale for 16 weights, and one for all, which ModelOpt multiplies with, and compressed-tensors divides by."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

    def pack(outputs: int, inputs: int) -> Packed:
        generator = torch.Generator().manual_seed(outputs + inputs)
        codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
        numbers = torch.tensor([(-1) ** (code >> 3) * magnitudes[code & 7] for code in range(16)]).double()[codes]
        scale = (torch.rand(outputs, inputs // 16, generator=generator) * 200 + 20).to(torch.float8_e4m3fn)
        bytes_ = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        of_all = torch.tensor(1 / 8192.0 if modelopt else 8192.0)
        names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
        parts = {names[0]: bytes_, "weight_scale": scale, names[1]: of_all}
        return parts, numbers * scale.double().repeat_interleave(16, 1) / 8192

    return pack


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    group = {
        "format": form,
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.15.0",
    }


def integers(bits: int, **own: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    } | own


CHANNEL = {"strategy": "channel", "group_size": None}
GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": False}
FP8 = {"activation_scheme": "dynamic", "quant_method": "fp8"}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}

# Names of formats: quantization_config, how a module is packed, and the precision that an engine keeps.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int], Packed], str]] = {
    "awq": (
        {"bits": 4, "group_size": GROUP, "quant_method": "awq", "version": "gemm", "zero_point": True},
        awq,
        "none",
    ),
    "gptq 4": (GPTQ | {"bits": 4}, gptq(4, 1), "none"),
    "gptq 4 in order of activations": (GPTQ | {"bits": 4, "desc_act": True}, gptq(4, 1, shuffled=True), "none"),
    "gptq 3": (GPTQ | {"bits": 3}, gptq(3, 1), "none"),
    "gptq 8, version 2": (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, 0), "none"),
    "packed 4": (compressed("pack-quantized", **integers(4)), packed(4, symmetric=True), "none"),
    "packed 4 with zeros": (
        compressed("pack-quantized", **integers(4, symmetric=False)),
        packed(4, symmetric=False),
        "none",
    ),
    "packed 4 in order of activations": (
        compressed("pack-quantized", **integers(4, actorder="group")),
        packed(4, symmetric=True, shuffled=True),
        "none",
    ),
    "packed 8, a scale a row": (
        compressed("pack-quantized", **integers(8, **CHANNEL)),
        packed(8, None, symmetric=True),
        "none",
    ),
    "int8": (compressed("int-quantized", **integers(8, **CHANNEL)), int8, "int8"),
    "int8 with zeros": (
        compressed("int-quantized", **integers(8, symmetric=False, **CHANNEL)),
        int8_with_zeros,
        "none",
    ),
    "fp8 a row": (
        compressed("float-quantized", **FLOAT, strategy="channel"),
        fp8("weight_scale", lambda rows: (rows, 1), torch.bfloat16),
        "fp8",
    ),
    "fp8 a tensor": (
        FP8 | {"ignored_layers": ["lm_head"]},
        fp8("weight_scale", lambda rows: (), torch.bfloat16),
        "fp8",
    ),
    "fp8 a block": (FP8 | {"fmt": "e4m3", "weight_block_size": [64, 32]}, blocks(64, 32, "weight_scale_inv"), "none"),
    "fp8 a block, all whole": (FP8 | {"weight_block_size": [32, 32]}, blocks(32, 32, "weight_scale_inv"), "none"),
    "fp8 a block, compressed-tensors": (
        compressed("float-quantized", **FLOAT, strategy="block", block_structure=[64, 32]),
        blocks(64, 32, "weight_scale"),
        "none",
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        fp8("weight_scale", lambda rows: (rows, 1), torch.float32),
        "none",  # on a CPU
    ),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        fp8("weight_scale", lambda rows: (), torch.float32),
        "none",  # on a CPU
    ),
    "modelopt fp8 a row": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        fp8("weight_scale", lambda rows: (rows,), torch.float32),
        "none",  # on a CPU
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        nvfp4(modelopt=True),
        "none",
    ),
    "nvfp4": (
        compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16
        ),
        nvfp4(modelopt=False),
        "none",
    ),
}

# Those whose integers an engine keeps, by the size of their groups; with None a row has one.
FOUR_BITS: dict[str, Callable[[int | None], Callable[[int, int], Packed]]] = {
    "awq": lambda group: lambda outputs, inputs: awq(outputs, inputs, group or inputs),
    "gptq 4": lambda group: lambda outputs, inputs: gptq(4, 1, group or inputs)(outputs, inputs),
    "packed 4": lambda group: packed(4, group, symmetric=True),
    "packed 4 with zeros": lambda group: packed(4, group, symmetric=False),
}


def quantise_checkpoint(
    plain: Path,
    directory: Path,
    name: str,
    *,
    left_out: tuple[str, ...] = (),
    own: Callable[[int, int], Packed] | None = None,
) -> dict[str, Tensor]:
    """Write a checkpoint in a format to `directory`, and beside it, in `directory`-plain, one of the same numbers in float32.

    Parameters
    ----------
    own : callable, optional
        Packs a module, where FORMATS has other groups.

    Returns
    -------
    dict
        The values, float64, of the weights that are quantised.
    """
    config, pack, _ = FORMATS[name]
    pack = own or pack
    same = directory.with_name(f"{directory.name}-plain")
    for path in (directory, same):
        path.mkdir(parents=True)
        for file in plain.iterdir():
            if file.suffix != ".safetensors":
                (path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(plain / "model.safetensors")
    expected: dict[str, Tensor] = {}
    wide = dict(tensors)
    for weight in [one for one in tensors if one.endswith(tuple(f"{layer}.weight" for layer in LAYERS))]:
        if any(part in weight for part in left_out):
            continue
        module = weight.removesuffix(".weight")
        parts, expected[weight] = pack(*tensors.pop(weight).shape)
        if f"{module}.bias" in tensors:
            parts.pop("bias", None)
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        wide[weight] = expected[weight].float()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    save_file(wide, same / "model.safetensors", {"format": "pt"})
    document = json.loads((plain / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(document | {"quantization_config": config}))
    return expected
