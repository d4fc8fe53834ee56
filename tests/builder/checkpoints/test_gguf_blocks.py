"""GGUF files of 4-bit blocks: engines that compute with the file's own numbers, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.builder.test_capacity import document
from tests.support.checkpoint_files import edit_tensors, write_gguf
from tests.support.prefill import run_prefill
from tests.support.random_models import save_random_model
from torch import Tensor

from kvseek.builder import build
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import fuse, own_numbers
from kvseek.core.config import EngineConfig, read_config
from kvseek.core.weight_only import INT4, INT8_GROUPS, dequantise
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.model.weights import list_weights, load_weights

CPU = torch.device("cpu")
BFLOAT16 = ("--dtype", "bfloat16")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
Types = Callable[[tuple[int, ...]], str]


def all_of_8_bits(shape: tuple[int, ...]) -> str:
    return "Q8_0"


def head_of_8_bits(shape: tuple[int, ...]) -> str:
    """Q4_0 and Q4_1 side by side, also in one fused weight, and the vocabulary's rows in Q8_0."""
    return "Q8_0" if shape[0] == 320 else "Q4_0" if shape[0] < 64 else "Q4_1"


def write(folder: Path, types: Types = head_of_8_bits, architecture: str = "llama", **sizes: Any) -> Path:
    """Write a file of random weights in blocks, and the model that its tokenizer is read from."""
    import gguf

    def encode(tensor: Tensor) -> tuple[np.ndarray, Any]:
        kind = gguf.GGMLQuantizationType[types(tuple(tensor.shape))]
        if kind.name == "Q4_K":
            return drawn_k_blocks(tensor), kind
        return gguf.quants.quantize(tensor.numpy(), kind), kind

    shape = {**SIZES, "vocab_size": 320, "tie_word_embeddings": True, **sizes}
    model = save_random_model(folder / "model", architecture, **shape)
    if shape["tie_word_embeddings"]:
        edit_tensors(model / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight", None))
    return write_gguf(folder / "m.gguf", model, architecture, encode=encode)


def drawn_k_blocks(tensor: Tensor) -> np.ndarray:
    """Random numbers, which the package gguf cannot round to; a block's halves come first."""
    generator = np.random.default_rng(tensor.numel())
    blocks = generator.integers(0, 256, (tensor.numel() // 256, 144), np.uint8)
    halves = generator.uniform(1e-4, 3e-4, (len(blocks), 2)) * [1, 4]
    blocks[:, :4] = halves.astype(np.float16).view(np.uint8)
    return blocks.reshape(len(tensor), -1)


def run(model: Path, output_dir: Path, *flags: str) -> int:
    tokenizer = model.with_name("model")
    arguments = ["--model", str(model), "--tokenizer", str(tokenizer), "--output_dir", str(output_dir), "--no-check"]
    return build.main([*arguments, "--quiet", "--method", "full", "--max_seq_len", "256", *flags])


def built(model: Path, output_dir: Path, *flags: str) -> EngineConfig:
    assert run(model, output_dir, *flags) == 0
    return read_config(output_dir)


def logits_of(directory: Path) -> Tensor:
    """Of a prompt, and of steps with given tokens."""
    with closing(load_decoder(directory, read_config(directory))) as decoder:
        rows = [run_prefill(decoder, 0, [i * i % 290 + 3 for i in range(70)], 40)[None]]
        return torch.cat(rows + [decoder.decode([token], [0])[0] for token in range(5, 25)])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("types", "precision"), [(head_of_8_bits, INT4), (all_of_8_bits, INT8_GROUPS)])
def test_the_files_numbers_are_kept_and_computed_with(
    types: Types, precision: str, architecture: str, tied: bool, tmp_path: Path
) -> None:
    model = write(tmp_path, types, architecture, tie_word_embeddings=tied)
    found = built(model, tmp_path / "own", *BFLOAT16)
    assert (found.weight_only_precision, found.quantize_lm_head) == (precision, True)
    checkpoint, weights = open_checkpoint(model), load_weights(tmp_path / "own", CPU)
    listed = {one.name: one for one in list_weights(checkpoint.config, quantize_lm_head=True)}
    scaled = {name.removesuffix("_scale") for name in weights if name.endswith("_scale")}
    assert scaled == {
        name for name in listed if name.endswith(("qkv.weight", "o.weight", "up.weight", "down.weight"))
    } | {"lm_head.weight"}
    for name in scaled:
        assert torch.equal(
            dequantise(weights[name], weights[f"{name}_scale"], torch.float32), fuse(checkpoint, listed[name])
        )
    built(model, tmp_path / "exact")
    expected, logits = logits_of(tmp_path / "exact"), logits_of(tmp_path / "own")
    assert (logits - expected).norm() <= 2e-2 * expected.norm()


def test_blocks_are_stored_as_the_file_has_them(tmp_path: Path) -> None:
    import gguf

    model = write(tmp_path)
    built(model, tmp_path / "own", *BFLOAT16)
    engine = load_file(next((tmp_path / "own").glob("rank0-*")))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model).tensors}
    blocks = torch.from_numpy(np.array(tensors["blk.1.ffn_down.weight"].data)).view(64, 4, 20)
    assert torch.equal(engine["layers.1.down.weight"].view(64, 4, 16), blocks[..., 4:])
    assert torch.equal(engine["layers.1.down.weight_scale"].view(torch.uint8).view(64, 4, 4), blocks[..., :4])
    blocks = torch.from_numpy(np.array(tensors["token_embd.weight"].data)).view(320, 2, 34)
    assert torch.equal(engine["lm_head.weight"].view(torch.uint8).view(320, 2, 32), blocks[..., 2:])
    assert torch.equal(engine["lm_head.weight_scale"].view(torch.uint8).view(320, 2, 2), blocks[..., :2])


@pytest.mark.parametrize("others", ["Q4_K", "Q4_0"])
def test_blocks_of_256_are_those_of_32(others: str, tmp_path: Path) -> None:
    """Factors and values of 0 are rounded by no more than is said."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}

    def types(shape: tuple[int, ...]) -> str:
        return "F16" if shape[0] == 320 else others if shape[1] == 512 else "Q4_K"

    model = write(tmp_path, types, **sizes)
    assert built(model, tmp_path / "own", *BFLOAT16).weight_only_precision == INT4
    checkpoint, weights = open_checkpoint(model), load_weights(tmp_path / "own", CPU)
    for one in list_weights(checkpoint.config):
        if (scale := weights.get(f"{one.name}_scale")) is not None:
            error = (dequantise(weights[one.name], scale, torch.float32) - fuse(checkpoint, one)).abs()
            limit = 2.0**-11 * (15 * scale[..., 0].float().abs() + scale[..., 1].float().abs()) + 15 * 2.0**-25
            assert (error.view(*limit.shape, 32) <= limit[..., None] * 1.01).all()
            assert error.mean() < 1e-4
    built(model, tmp_path / "exact")
    expected, logits = logits_of(tmp_path / "exact"), logits_of(tmp_path / "own")
    assert (logits - expected).norm() <= 2e-2 * expected.norm()


def test_what_else_may_be_chosen(tmp_path: Path) -> None:
    """A second rounding of a GGUF file is allowed, as ever; a head of other numbers stays in 16 bits, or is rounded."""
    model = write(tmp_path)
    for precision in ("int8", "none"):
        found = built(model, tmp_path / precision, *BFLOAT16, "--weight_only_precision", precision)
        assert (found.weight_only_precision, found.quantize_lm_head) == (precision, False)
    assert built(model, tmp_path / "wide").weight_only_precision == "none", "in float32"
    own, reference = (tmp_path / name for name in ("own", "reference"))
    assert built(model, own, "--weight_only_precision", "int4").dtype == "float32"
    torch.testing.assert_close(logits_of(own), logits_of(tmp_path / "wide"), rtol=1e-4, atol=1e-4)
    built(model, reference, *BFLOAT16, "--kernels", "reference")
    expected = logits_of(own)
    assert (logits_of(reference) - expected).norm() <= 3e-2 * expected.norm()
    plain = write(tmp_path / "plain", lambda shape: "F16" if shape[0] == 320 else "Q4_1")
    assert not built(plain, tmp_path / "plain head", *BFLOAT16).quantize_lm_head
    asked = built(plain, tmp_path / "rounded head", *BFLOAT16, "--quantize_lm_head")
    assert (asked.weight_only_precision, asked.quantize_lm_head) == (INT4, True)
    expected = logits_of(tmp_path / "plain head")
    assert (logits_of(tmp_path / "rounded head") - expected).norm() <= 2e-2 * expected.norm()


def test_other_blocks_are_rounded_to_the_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = (
        (
            lambda shape: "Q8_0" if shape[0] == 64 else "Q4_0",
            "k_proj.weight has other numbers than model.layers.0.self",
        ),
        (lambda shape: "Q5_0" if shape[0] == 128 else "Q4_0", "q_proj.weight is of another type"),
    )
    for number, (types, why) in enumerate(cases):
        model = write(tmp_path / str(number), types)
        own = own_numbers(open_checkpoint(model), "cpu")
        assert own is not None
        assert own.precision == "none"
        assert f"model.layers.0.self_attn.{why}" in own.why
        assert built(model, tmp_path / str(number) / "engine", *BFLOAT16).weight_only_precision == "none"
        assert run(model, tmp_path / "refused", *BFLOAT16, "--weight_only_precision", "int8_groups") == 1
        message = (
            "weight_only_precision = 'int8_groups': must be left out: not all matrices of this checkpoint's layers are"
        )
        message += " GGUF's blocks Q8_0; choose int8, or such a file"
        assert message in capsys.readouterr().err
    assert run(model.with_name("model"), tmp_path / "refused", "--weight_only_precision", "int8_groups") == 1
    assert message in capsys.readouterr().err, "of a Hugging Face checkpoint, too"


def test_plans_and_where_there_is_no_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, four = write(tmp_path), ("--weight_only_precision", "int4")
    cuda = ("--device", "cuda", "--cuda_archs", "90", *BFLOAT16)
    assert run(model, tmp_path / "engine", *cuda, "--dtype", "float32", *four) == 1
    assert "weight_only_precision = 'int4': must be 'none' with dtype = 'float32' on cuda" in capsys.readouterr().err
    assert run(model, tmp_path / "engine", *cuda, *four, "--runtime", "tensorrt") == 1
    assert "weight_only_precision = 'int4': must be 'none' with runtime = 'tensorrt'" in capsys.readouterr().err
    plan = ["--plan", "--model", str(model), "--method", "full", "--host_memory", "64GiB", *BFLOAT16]
    assert document([*plan, "--gpu_memory", "64GiB"])["weight_only_precision"] == INT4
    assert document([*plan, "--gpu_memory", "64GiB", "--dtype", "float32"])["weight_only_precision"] == "none"
    built(model, tmp_path / "own", *BFLOAT16)
    planned = document([*plan, "--device", "cpu"])
    assert (planned["weight_only_precision"], planned["quantize_lm_head"]) == (INT4, True)
    loaded = load_weights(tmp_path / "own", CPU).values()
    assert planned["bytes"]["weights"] == sum(tensor.nbytes for tensor in loaded), (
        "read where they lie, and nothing copied"
    )


def test_ranks_have_whole_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path)
    assert built(model, tmp_path / "one", *BFLOAT16).weight_only_precision == INT4
    assert built(model, tmp_path / "two", *BFLOAT16, "--tp_size", "2").weight_only_precision == INT4
    expected = logits_of(tmp_path / "one")
    assert (logits_of(tmp_path / "two") - expected).norm() <= 5e-2 * expected.norm()
    model = write(tmp_path / "narrow", intermediate_size=96)
    assert built(model, tmp_path / "wide", *BFLOAT16, "--tp_size", "2").weight_only_precision == "none"
    four = ("--weight_only_precision", "int4", "--tp_size", "2")
    assert run(model, tmp_path / "refused", *BFLOAT16, *four) == 1
    message = "intermediate_size = 48: must be a multiple of 32 with weight_only_precision = 'int4' in each of 2 ranks"
    assert message in capsys.readouterr().err
