"""What the GPU benchmarks compute without a GPU: shapes, weights, figures, settings.

tests/gpu/bench/test_device_bench.py runs the whole of them.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from tests.bench.speed.device.configs import KIB, METHODS, config_for

from kvseek.bench.speed import decode
from kvseek.bench.speed.device.bench import RandomWeights, quantised
from kvseek.bench.speed.device.memory_plan import IndexNeeds, Needs
from kvseek.bench.speed.device.options import parse
from kvseek.bench.speed.shapes import LLAMA_3_1_8B, QWEN3_8B, get_shape, matrix_bytes, row_numbers
from kvseek.bench.timing import part_groups
from kvseek.builder.checkpoints.weights import WeightFormat, list_weights
from kvseek.core.config import ModelConfig
from kvseek.core.errors import ConfigError
from kvseek.engine.model.layer import Layer
from kvseek.engine.model.random_weights import weight_shapes

CPU = torch.device("cpu")
TINY = ModelConfig("qwen3", 100, 32, 48, 2, 4, 2, 8, 1e-6, 1e4, 512, qk_norm=True, qkv_bias=True, output_bias=True)


def test_shapes_are_of_their_size() -> None:
    """Matrices as the models' names say: 8.03 and 8.19 thousand million numbers with the embedding; 128 and 144 KiB a token."""
    sizes = {LLAMA_3_1_8B: 8.03e9, QWEN3_8B: 8.19e9}
    for model, size in sizes.items():
        numbers = sum(math.prod(shape) for shape in weight_shapes(model).values())
        assert numbers == pytest.approx(size, rel=2e-3)
        norms = sum(math.prod(shape) for shape in weight_shapes(model).values() if len(shape) == 1)
        config, ends = config_for(model, "full", 1, 1), model.vocab_size * model.hidden_size
        assert matrix_bytes(config) == 2 * (numbers - norms - ends)
        narrow = dataclasses.replace(config, weight_only_precision="fp8")
        assert matrix_bytes(narrow) == numbers - norms, "one a number of the layers, two of the head"
        narrow = dataclasses.replace(config, weight_only_precision="int8", quantize_lm_head=True)
        assert matrix_bytes(narrow) == numbers - norms - ends, "one a number of layers and head"
    assert [row_numbers(model) * 2 for model in sizes] == [128 * KIB, 144 * KIB]
    assert get_shape("llama-3.1-8b", 1 << 20).max_position_embeddings == 1 << 20
    assert get_shape("llama-3.1-8b", 10) == LLAMA_3_1_8B
    with pytest.raises(ConfigError, match="--shape = 'gpt': must be one of"):
        get_shape("gpt", 10)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("precision", "head"), [("int8", False), ("int8", True), ("fp8", False)])
def test_quantised_weights_are_those_that_the_builder_stores(precision: str, head: bool, tied: bool) -> None:
    model = dataclasses.replace(TINY, tie_word_embeddings=tied)
    plain = RandomWeights(model, torch.bfloat16, CPU).tensors
    own, stored = quantised(plain, precision, quantize_lm_head=head), WeightFormat(torch.bfloat16, precision, head)
    listed = [one for weight in list_weights(model, quantize_lm_head=head) for one in stored.stored(weight)]
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()} == {
        one.name: (one.shape, one.dtype) for one in listed
    }
    assert own["embed.weight"] is plain["embed.weight"], "shared"
    config = dataclasses.replace(
        config_for(model, "full", 1, 1), weight_only_precision=precision, quantize_lm_head=head
    )
    needs = Needs.of(config, 2, IndexNeeds())
    matrices = sum(tensor.nbytes for tensor in own.values() if tensor.dim() == 2)
    assert needs.weights == matrices


def test_random_weights_are_what_a_decoder_reads() -> None:
    weights = RandomWeights(TINY, torch.float32, CPU)
    layer = Layer(TINY, weights.tensors, 1)
    parts = (layer.attention_norm, layer.qkv.bias, layer.q_norm, layer.o.bias, layer.mlp_norm, layer.down.weight)
    assert all(part is not None for part in parts)
    assert layer.qkv.weight.shape == ((4 + 2 * 2) * 8, 32)
    assert layer.qkv.weight.var().item() == pytest.approx(1 / 32, rel=0.2)
    assert layer.down.weight.var().item() == pytest.approx(1 / 48 / 4, rel=0.2)
    assert weights.flat.numel() >= sum(tensor.numel() for tensor in weights.tensors.values())
    again = RandomWeights(TINY, torch.float32, CPU)
    assert torch.equal(weights.flat, again.flat)
    assert layer.qkv.weight.untyped_storage().data_ptr() == weights.flat.untyped_storage().data_ptr()


def test_parts_of_a_step_are_grouped_and_none_is_lost() -> None:
    parts = {"qkv": 1.0, "o": 2.0, "select": 4.0, "attend": 8.0, "norm": 16.0, "a new one": 32.0}
    assert part_groups(parts) == {"GEMMs": 3.0, "select": 4.0, "attend": 8.0, "others": 48.0}


def test_lists_are_sorted_and_checked() -> None:
    flags = ["--contexts", "262144,131072,131072", "--batches", "4,1", "--offload", "always,auto"]
    arguments = parse([*METHODS, *flags])
    assert (arguments.contexts, arguments.batches) == ([131_072, 262_144], [1, 4])
    assert [variant.label for variant in arguments.methods] == ["full", "pariskv"]
    assert arguments.offload == ["always", "auto"]


BAD = {
    "contexts": (["--contexts", "100"], "--contexts = '100': must be a comma list of numbers >= 4096"),
    "batches": (["--batches", "1,x"], "--batches = '1,x': must be a comma list"),
    "steps": (["--steps", "201"], "--steps = 201: must be between 1 and 200, so that no timed step evicts"),
    "dtype": (["--dtype", "int8"], "--dtype = 'int8': must be one of bfloat16, float16, float32"),
    "twice": (["--methods", "full,full"], "--methods = 'full,full': must name each once"),
    "offload twice": (["--offload", "auto,auto"], "--offload = 'auto,auto': must name each once"),
    "repeats": (["--repeats", "0"], "--repeats = 0: must be >= 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, message = BAD[case]
    assert decode.main(["--device", "cuda", *METHODS, *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--shape", "qwen3-8b", *METHODS, "--output", str(tmp_path / "out.json")]) == 1
    assert "PyTorch sees no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
