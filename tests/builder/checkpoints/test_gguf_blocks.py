"""GGUF files of 4-bit blocks: engines that compute with the file's own numbers, and those that do not."""

from __future__ import annotations

import re
import shutil
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
from tests.support.random_models import MIXTURES, save_random_model
from torch import Tensor

from kvseek.builder import build
from kvseek.builder.checkpoints.gguf import UNITS
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import fuse, own_numbers
from kvseek.core.config import EngineConfig, read_config
from kvseek.core.weight_only import INT4, INT8_ASYMMETRIC, INT8_GROUPS, dequantise
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.model.weights import EXPERTS, list_weights, load_weights

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
        if kind.name.endswith("_K"):
            return drawn_k_blocks(tensor, kind), kind
        return gguf.quants.quantize(tensor.numpy(), kind), kind

    shape = {**SIZES, "vocab_size": 320, "tie_word_embeddings": True, **sizes}
    model = save_random_model(folder / "model", architecture, **shape)
    if shape["tie_word_embeddings"]:
        edit_tensors(model / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight", None))
    return write_gguf(folder / "m.gguf", model, architecture, encode=encode)


# Of blocks of 256 weights: where the halves begin, and about how large they are, so that weights are as those of models.
HALVES = {
    "Q2_K": (80, 2e-3, 2e-3),
    "Q3_K": (108, 5e-4),
    "Q4_K": (0, 1e-4, 4e-4),
    "Q5_K": (0, 5e-5, 4e-4),
    "Q6_K": (208, 2e-5),
}


def drawn_k_blocks(tensor: Tensor, kind: Any) -> np.ndarray:
    """Random numbers, which the package gguf cannot round to."""
    import gguf

    generator = np.random.default_rng(tensor.numel())
    blocks = generator.integers(0, 256, (tensor.numel() // 256, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    start, *sizes = HALVES[kind.name]
    halves = generator.uniform(1, 3, (len(blocks), len(sizes))) * sizes
    blocks[:, start : start + 2 * len(sizes)] = halves.astype(np.float16).view(np.uint8)
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


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}


@pytest.mark.parametrize("kind", UNITS)
def test_any_block_fits_into_eight_bits(kind: str, tmp_path: Path) -> None:
    """The numbers exactly, factors and values of 0 rounded by no more than is said: not at all where they are halves."""
    model = write(tmp_path, lambda shape: kind, **WIDE)
    checkpoint = open_checkpoint(model)
    for one in list_weights(checkpoint.config):
        for name in one.sources:
            if (narrow := checkpoint.quantised(name)) is None:
                continue
            numbers, scale = narrow.as_stored(INT8_ASYMMETRIC, 32)
            found, expected = dequantise(numbers, scale, torch.float32), checkpoint.tensor(name)
            limit = 2.0**-11 * (numbers.view(*scale.shape[:2], 16) * scale[..., :1].float()).abs()
            limit += 2.0**-11 * scale[..., 1:].float().abs() + 40 * 2.0**-25
            limit *= 1.01 if kind.endswith("K") else 0
            assert ((found - expected).abs() <= limit.flatten(1)).all()


def q4_k_m(shape: tuple[int, ...]) -> str:
    """As llama.cpp's Q4_K_M: values, the last product of an MLP and the vocabulary in Q6_K."""
    return "Q6_K" if shape[0] in (64, 320) or shape[1] == 512 else "Q4_K"


def q4_k_m_of_odd_columns(shape: tuple[int, ...]) -> str:
    """As llama.cpp writes it where 256 does not divide a row."""
    return "Q8_0" if shape[0] == 320 else "Q5_0" if shape[1] == 128 else "Q4_0"


def q5_k_m(shape: tuple[int, ...]) -> str:
    return "Q6_K" if shape[0] == 320 or shape[1] == 512 else "Q5_K"


def one_left_out(shape: tuple[int, ...]) -> str:
    return "F16" if shape[1] == 512 else q4_k_m(shape)


@pytest.mark.parametrize(
    ("types", "sizes", "precision", "others", "tied"),
    [
        (q4_k_m, WIDE, INT4, {"qkv": INT8_ASYMMETRIC, "down": INT8_ASYMMETRIC}, True),
        (q4_k_m, WIDE, INT4, {"qkv": INT8_ASYMMETRIC, "down": INT8_ASYMMETRIC}, False),
        (q4_k_m_of_odd_columns, {}, INT4, {"o": INT8_ASYMMETRIC, "down": INT8_ASYMMETRIC}, False),
        (q5_k_m, WIDE, INT8_ASYMMETRIC, {}, True),
        (one_left_out, WIDE, INT4, {"qkv": INT8_ASYMMETRIC, "down": "none"}, False),
    ],
)
def test_each_matrix_has_its_own_format(
    types: Types, sizes: dict[str, int], precision: str, others: dict[str, str], tied: bool, tmp_path: Path
) -> None:
    model = write(tmp_path, types, tie_word_embeddings=tied, **sizes)
    found = built(model, tmp_path / "own", *BFLOAT16)
    expected_formats = {f"layers.{layer}.{name}": one for layer in range(3) for name, one in others.items()}
    if types not in (q5_k_m, q4_k_m_of_odd_columns):
        expected_formats["lm_head"] = INT8_ASYMMETRIC
    assert (found.weight_only_precision, found.weight_formats) == (precision, expected_formats)
    assert found.quantize_lm_head
    checkpoint, weights = open_checkpoint(model), load_weights(tmp_path / "own", CPU)
    for one in list_weights(checkpoint.config, quantize_lm_head=True):
        values = weights[one.name].float()
        if (scale := weights.get(f"{one.name}_scale")) is not None:
            values = dequantise(weights[one.name], scale, torch.float32)
        expected = fuse(checkpoint, one)
        assert (values - expected).norm() <= (2.0**-11 if scale is not None else 2.0**-8) * expected.norm()
    built(model, tmp_path / "exact")
    expected, logits = logits_of(tmp_path / "exact"), logits_of(tmp_path / "own")
    assert (logits - expected).norm() <= 2e-2 * expected.norm()
    built(model, tmp_path / "two", *BFLOAT16, "--tp_size", "2")
    assert (logits_of(tmp_path / "two") - expected).norm() <= 5e-2 * expected.norm()


def mixture_k_m(shape: tuple[int, ...]) -> str:
    """As llama.cpp's Q4_K_M of a mixture: what experts multiply last in Q6_K."""
    return "Q6_K" if shape[0] == 320 or shape[1] == 512 else "Q4_K"


def mixture_of_5_bits(shape: tuple[int, ...]) -> str:
    return "Q8_0" if shape[0] == 320 else "Q5_K"


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize(
    ("types", "precision", "others"),
    [
        (mixture_k_m, INT4, ("experts.down", "shared.down")),
        (mixture_of_5_bits, INT8_ASYMMETRIC, ()),
        (all_of_8_bits, INT8_GROUPS, ()),
    ],
)
def test_experts_have_the_files_numbers(
    architecture: str, types: Types, precision: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    """On the CPU and on a GPU, where kernels multiply experts of both formats."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 5, "num_experts_per_tok": 2}
    own = {"shared_expert_intermediate_size": 512} if architecture == "qwen2_moe" else {"head_dim": 64}
    model = write(tmp_path, types, architecture, num_hidden_layers=2, mlp_only_layers=[], **sizes, **own)
    kept = {one for one in others if architecture == "qwen2_moe" or "shared" not in one}
    checkpoint = open_checkpoint(model)
    for device in ("cpu", "cuda"):
        numbers = own_numbers(checkpoint, device)
        assert numbers is not None
        names = {name.split(".", 2)[2] for name in numbers.formats if name.startswith("layers")}
        assert (numbers.precision, names) == (precision, kept)
        assert set(numbers.formats.values()) <= {INT8_ASYMMETRIC}
    built(model, tmp_path / "own", *BFLOAT16)
    weights = load_weights(tmp_path / "own", CPU)
    for one in list_weights(checkpoint.config):
        if f".{EXPERTS}." in one.name:
            values = dequantise(weights[one.name], weights[f"{one.name}_scale"], torch.float32)
            expected = fuse(checkpoint, one)
            assert (values - expected).norm() <= 2.0**-11 * expected.norm()
    built(model, tmp_path / "exact")
    expected, logits = logits_of(tmp_path / "exact"), logits_of(tmp_path / "own")
    # Where two experts are nearly as likely, rounding may choose the other one.
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() <= 4e-2


def test_what_is_rounded_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a build and by a plan; numbers that a file has not are refused."""
    model = write(tmp_path, one_left_out, **WIDE)
    told = "weights of the GGUF file's blocks: kept as they are, int4 in groups of 32; "
    told += "4 matrices int8_asymmetric; 3 matrices in bfloat16: model.layers.0.mlp.down_proj.weight is of another type"
    arguments = ["--model", str(model), "--tokenizer", str(tmp_path / "model"), "--method", "full", *BFLOAT16]
    assert build.main([*arguments, "--output_dir", str(tmp_path / "engine"), "--no-check"]) == 0
    assert told in " ".join(capsys.readouterr().err.split())
    planned = document(["--plan", *arguments, "--device", "cpu", "--host_memory", "64GiB"])
    assert planned["notes"][0] == told
    loaded = load_weights(tmp_path / "engine", CPU).values()
    tied = planned["model"]["vocab_size"] * 256 * 2
    assert planned["bytes"]["weights"] - sum(tensor.nbytes for tensor in loaded) in (0, tied)
    for precision in ("int8_groups", "int8_asymmetric"):
        message = (
            f"weight_only_precision = '{precision}': must be left out: not all layers have such numbers in the file"
        )
        for name in (model, model.with_name("model")):
            assert run(name, tmp_path / "refused", *BFLOAT16, "--weight_only_precision", precision) == 1
            assert message in capsys.readouterr().err


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


def test_damage_is_refused_or_was_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever bytes of a mixed file are changed or missing: an error that names the file and a remedy, and no engine, or one."""
    model, generator = write(tmp_path, q4_k_m, **WIDE, num_hidden_layers=1), np.random.default_rng(0)
    whole = model.read_bytes()
    for number in range(40):
        damaged = bytearray(whole)
        at, kind = int(generator.integers(len(whole) if number % 3 == 0 else 4000)), number % 4
        if kind == 0:
            del damaged[at:]
        elif kind == 1:
            damaged[at : at + 64] = b"\xff" * len(damaged[at : at + 64])
        else:
            damaged[at] ^= 1 << int(generator.integers(8))
        model.write_bytes(damaged)
        code = run(model, tmp_path / "engine", *BFLOAT16, "--force")
        message = capsys.readouterr().err
        assert code in (0, 1), message
        assert (code == 0) == (tmp_path / "engine").exists()
        if code:
            assert re.search(r"error: .*\bm\.gguf.*; \S", message), message
        else:
            shutil.rmtree(tmp_path / "engine")


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
