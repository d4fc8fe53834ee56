"""GGUF's tensor types through the whole loader, from the file to the engine's fused weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from tests.support.gguf_files import interleave, write_gguf
from tests.support.random_models import ARCHITECTURES, save_random_model

from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, write_weights
from kvseek.engine.model.weights import load_weights

HEAD_DIM = 32
# A super-block holds 256 weights of a row, so every row length is a multiple of that.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}
# Type → bytes of a block of 256 weights, and where its float16 scales lie.
SUPER_BLOCKS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}


def engine_weights(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    write_weights(open_checkpoint(path), folder, WeightFormat(torch.float32))
    return load_weights(folder, torch.device("cpu"))


def fused_names(layer: int) -> dict[str, tuple[str, ...]]:
    """Fused weight of an engine → its parts, as a GGUF file names them."""
    block, own = f"blk.{layer}.", f"layers.{layer}."
    return {
        f"{own}qkv.weight": (f"{block}attn_q.weight", f"{block}attn_k.weight", f"{block}attn_v.weight"),
        f"{own}o.weight": (f"{block}attn_output.weight",),
        f"{own}gate_up.weight": (f"{block}ffn_gate.weight", f"{block}ffn_up.weight"),
        f"{own}down.weight": (f"{block}ffn_down.weight",),
    }


@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_super_blocks_of_random_bytes(name: str, tmp_path: Path) -> None:
    """The package cannot quantise to these types, so the blocks are random bytes with finite scales."""
    kind, generator = GGMLQuantizationType[name], np.random.default_rng(7)
    size, scales = SUPER_BLOCKS[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (256, size)

    def encode(tensor: torch.Tensor) -> tuple[np.ndarray, GGMLQuantizationType]:
        rows, columns = tensor.shape
        blocks = generator.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
        for offset in scales:
            values = generator.uniform(1e-4, 1e-2, (rows, columns // 256, 1)).astype(np.float16)
            blocks[:, :, offset : offset + 2] = values.view(np.uint8)
        return blocks.reshape(rows, -1), kind

    model = save_random_model(tmp_path / "model", "llama", **SHAPE)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", encode=encode)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = engine_weights(path, tmp_path / "engine")

    def dequantised(part: str) -> torch.Tensor:
        assert stored[part].tensor_type == kind
        return torch.tensor(gguf.dequantize(stored[part].data, kind))

    for ours, parts in itertools.chain.from_iterable(fused_names(layer).items() for layer in range(2)):
        found = weights[ours]
        if ours.endswith("qkv.weight"):  # the file has the queries' and keys' rows in llama's own order
            values = 2 * HEAD_DIM
            found = torch.cat((interleave(found[:-values], HEAD_DIM), found[-values:]))
        assert torch.equal(found, torch.cat([dequantised(part) for part in parts]))
        assert found.isfinite().all()
        assert found.std() > 0
    assert torch.equal(weights["embed.weight"], dequantised("token_embd.weight"))
    assert torch.equal(weights["lm_head.weight"], dequantised("output.weight"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "tolerance"), [("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", None)])
def test_types_that_the_package_writes(name: str, tolerance: float | None, architecture: str, tmp_path: Path) -> None:
    """Rounding to a 16-bit type errs by at most half a unit of a weight, to Q8_0 by half a step of its block of 32."""
    kind = GGMLQuantizationType[name]

    def encode(tensor: torch.Tensor) -> tuple[np.ndarray, GGMLQuantizationType]:
        return gguf.quantize(tensor.numpy(), kind).view(np.uint8), kind

    model = save_random_model(tmp_path / "model", architecture, **SHAPE)
    expected = load_file(model / "model.safetensors")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, architecture, encode=encode))
    for tensor_name, original in expected.items():
        found = checkpoint.tensor(tensor_name)
        if original.dim() == 1:
            assert torch.equal(found, original)
            continue
        if tolerance is None:
            largest = original.unflatten(1, (-1, 32)).abs().amax(dim=2, keepdim=True)
            limit = (largest / 127 * 0.57).expand(-1, -1, 32).flatten(1)  # the scale is a float16: 127 / 2048 more
        else:
            limit = original.abs() * tolerance + 2**-25
        assert ((found - original).abs() <= limit).all()
        assert not torch.equal(found, original)
