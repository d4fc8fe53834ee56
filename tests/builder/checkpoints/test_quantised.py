"""Quantised checkpoints: every format's numbers, and engines that compute with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.builder.checkpoints.quantised_checkpoints import (
    CHANNEL,
    FORMATS,
    FOUR_BITS,
    blocks,
    compressed,
    drawn,
    fp8,
    gptq,
    integers,
    nvfp4,
    packed,
    quantise_checkpoint,
)
from tests.builder.test_capacity import document
from tests.conftest import BuildEngine, RandomModel
from tests.support.prefill import run_prefill

from kvseek.builder.build import main as build
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.quantised import Quantisation, QuantisedWeight
from kvseek.builder.checkpoints.weights import WeightFormat, check_tensors, own_numbers, write_weights
from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError
from kvseek.core.request import Request
from kvseek.core.weight_only import dequantise, unpack
from kvseek.engine.engine import Engine
from kvseek.engine.model.weights import list_weights, load_weights

FLAGS = ("--device", "cpu", "--max_seq_len", "64", "--max_batch_size", "2")
PROMPT = tuple(range(3, 40))
QUERY = "model.layers.0.self_attn.q_proj.weight"
# Classes of transformers that dequantise on a CPU, with packages that install there, by the method.
JUDGES: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed-tensors": ("CompressedTensorsConfig", {"run_compressed": False}),
    "fp8": ("FineGrainedFP8Config", {"weight_block_size": (32, 32), "dequantize": True}),
}
# compressed-tensors 0.20 has removed the first; transformers' FP8 reads whole blocks alone, and no scale of a tensor.
NOT_JUDGED = ("packed 4 in order of activations", "fp8 a block", "fp8 a tensor")

JUDGED = [name for name, (config, *_) in FORMATS.items() if config["quant_method"] in JUDGES and name not in NOT_JUDGED]


@pytest.fixture(scope="module")
def plain(random_model: RandomModel) -> Path:
    return random_model("llama", hidden_size=192, intermediate_size=160)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_mean_what_their_format_says(name: str, plain: Path, tmp_path: Path) -> None:
    expected = quantise_checkpoint(plain, tmp_path / "quantised", name)
    checkpoint = open_checkpoint(tmp_path / "quantised")
    for weight, values in expected.items():
        found = checkpoint.tensor(weight)
        assert found.dtype is torch.float32
        assert checkpoint.header(weight).shape == tuple(values.shape)
        torch.testing.assert_close(found.double(), values, rtol=3e-7, atol=0)
        narrow = checkpoint.quantised(weight)
        assert narrow is not None
        for precision in narrow.precisions:
            numbers, scale = narrow.as_stored(precision, narrow.group)
            kept = dequantise(numbers, scale, torch.float64)
            limit = 2.0**-11 * kept.abs()
            if scale.ndim == 3:  # a factor and a value of 0, each rounded to float16
                number = (unpack(numbers) if numbers.dtype is torch.uint8 else numbers).double()
                factor, zero = scale.double().repeat_interleave(number.shape[1] // scale.shape[1], 1).unbind(-1)
                limit = 2.0**-11 * (number.abs() * factor + zero.abs()) + (number.abs() + 1) * 2.0**-25
            assert ((kept - values).abs() <= 1.01 * limit).all(), precision


@pytest.mark.parametrize("name", JUDGED)
def test_transformers_reads_the_same(name: str, plain: Path, tmp_path: Path) -> None:
    """With scales in float32, as transformers dequantises into their dtype."""
    import transformers

    expected = quantise_checkpoint(plain, tmp_path / "m", name)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    wide = {key: value.float() if value.dtype is torch.bfloat16 else value for key, value in tensors.items()}
    save_file(wide, file, {"format": "pt"})
    judge, settings = JUDGES[FORMATS[name][0]["quant_method"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, quantization_config=getattr(transformers, judge)(**settings)
    )
    found = dict(model.named_parameters())
    checkpoint = open_checkpoint(tmp_path / "m")
    for weight in expected:
        torch.testing.assert_close(checkpoint.tensor(weight), found[weight].detach(), rtol=1e-6, atol=0)


def tokens_of(directory: Path) -> list[int]:
    engine = Engine.load(directory)
    try:
        return list(engine.generate([Request(PROMPT, 12)])[0])
    finally:
        engine.close()


# Every format with one architecture, those whose numbers an engine keeps with all.
ARCHITECTURES = ("llama", "qwen2", "qwen2_moe", "qwen3")
COMPUTED = [
    (name, architecture)
    for number, (name, (*_, precision)) in enumerate(FORMATS.items())
    for place, architecture in enumerate(ARCHITECTURES)
    if precision != "none" or place == number % len(ARCHITECTURES)
]


@pytest.mark.parametrize(("name", "architecture"), COMPUTED)
def test_engines_compute_with_the_numbers(
    name: str, architecture: str, random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path
) -> None:
    model = random_model(architecture, hidden_size=192, intermediate_size=160)
    quantise_checkpoint(model, tmp_path / "quantised", name)
    own = build_engine(tmp_path / "quantised", "full", *FLAGS)
    assert read_config(own).weight_only_precision == FORMATS[name][2]
    assert tokens_of(own) == tokens_of(build_engine(tmp_path / "quantised-plain", "full", *FLAGS))


def test_every_number_of_eight_bits_multiplies(plain: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    """With 16-bit activations, by the kernels of 8-bit weights. Theirs end at -127 where kvseek rounds, and at -128 here."""
    quantise_checkpoint(plain, tmp_path / "m", "int8")
    logits = []
    for name, dtype in (("m", "bfloat16"), ("m-plain", "float32")):
        engine = Engine.load(build_engine(tmp_path / name, "full", *FLAGS, "--dtype", dtype))
        logits.append(run_prefill(engine.decoder, 0, list(PROMPT), 5).float())
        engine.close()
    assert (logits[0] - logits[1]).norm() <= 2e-2 * logits[1].norm()


def test_numbers_of_eight_bits_are_kept(plain: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    for name in ("int8", "fp8 a row", "fp8 a tensor"):
        quantise_checkpoint(plain, tmp_path / name, name)
        stored = load_file(tmp_path / name / "model.safetensors")
        engine = load_file(next(build_engine(tmp_path / name, "full", *FLAGS).glob("rank0-*")))
        parts = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
        weights = torch.cat([stored[f"{part}.weight"] for part in parts])
        rows = [stored[f"{part}.weight"].shape[0] for part in parts]
        scales = torch.cat(
            [stored[f"{part}.weight_scale"].float().reshape(-1).expand(n) for part, n in zip(parts, rows, strict=True)]
        )
        assert torch.equal(engine["layers.1.qkv.weight"].view(torch.uint8), weights.view(torch.uint8))
        assert torch.equal(engine["layers.1.qkv.weight_scale"], scales)


BFLOAT16 = (*FLAGS, "--dtype", "bfloat16")
WIDE = {"hidden_size": 384, "intermediate_size": 256, "head_dim": 64}
GROUPS = (32, 64, 128, None)
WHOLE_BLOCKS = (blocks(128, 128, "weight_scale_inv"), {"weight_block_size": [128, 128]})


@pytest.mark.parametrize("place", range(len(GROUPS)))
@pytest.mark.parametrize("number", range(len(FOUR_BITS)))
def test_numbers_of_four_bits_are_kept_and_multiplied(
    number: int, place: int, random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path
) -> None:
    """Integers and scales are the checkpoint's, a row's scale for each 128 inputs; the value of 0 is rounded to float16.

    What the kernels of 4-bit weights compute with 16-bit activations is near the plain computation in float32.
    """
    name, group = list(FOUR_BITS)[number], GROUPS[place]
    model = random_model(("llama", "qwen2", "qwen3")[(number + place) % 3], **WIDE)
    expected = quantise_checkpoint(model, tmp_path / "m", name, own=FOUR_BITS[name](group))
    directory = build_engine(tmp_path / "m", "full", *BFLOAT16)
    config = read_config(directory)
    assert (config.weight_only_precision, config.weight_group) == ("int4", group or 128)
    engine = load_file(next(directory.glob("rank0-*")))
    for weight in list_weights(config.model):
        if f"{weight.name}_scale" not in engine:
            continue
        numbers, scale = engine[weight.name], engine[f"{weight.name}_scale"]
        inputs = weight.shape[1]
        drawings = [drawn(*expected[one].shape, 4, inputs // (group or inputs)) for one in weight.sources]
        integers, zeros, factors = (torch.cat(parts) for parts in zip(*drawings, strict=True))
        factors = factors.bfloat16() if name.startswith("packed") else factors
        assert torch.equal(unpack(numbers).long(), integers)
        assert torch.equal(scale[..., 0], factors.half().repeat_interleave(scale.shape[1] // factors.shape[1], 1))
        values = torch.cat([expected[one] for one in weight.sources])
        zeros = torch.full_like(zeros, 8) if name == "packed 4" else zeros
        rounding = 2.0**-11 * (zeros * factors.double()).repeat_interleave(inputs // zeros.shape[1], 1)
        assert ((dequantise(numbers, scale, torch.float32).double() - values).abs() <= rounding + 1e-8).all()
    assert set(engine) & {"lm_head.weight_scale", "embed.weight_scale"} == set()
    logits = []
    for path, flags in (("m", BFLOAT16), ("m-plain", FLAGS)):
        engine = Engine.load(build_engine(tmp_path / path, "full", *flags))
        rows = [run_prefill(engine.decoder, 0, list(PROMPT), 5)]
        logits.append(torch.stack(rows + [engine.decoder.decode([token], [0])[0][0] for token in (5, 17, 80)]).float())
        engine.close()
    assert (logits[0] - logits[1]).norm() <= 2e-2 * logits[1].norm()


def test_groups_of_several_sizes_are_divided(
    random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path
) -> None:
    expected = quantise_checkpoint(
        random_model("llama", **WIDE), tmp_path / "m", "packed 4", own=FOUR_BITS["packed 4"](128)
    )
    parts, expected[f"{GATE}.weight"] = packed(4, 64, symmetric=True)(256, 384)
    change_gate(tmp_path / "m", dict(parts))
    directory = build_engine(tmp_path / "m", "full", *BFLOAT16)
    assert read_config(directory).weight_group == 64
    engine = load_file(next(directory.glob("rank0-*")))
    for layer, name in ((1, "gate_up"), (0, "down")):
        sources = [f"mlp.{part}_proj" for part in ("gate", "up")] if name == "gate_up" else ["mlp.down_proj"]
        values = torch.cat([expected[f"model.layers.{layer}.{one}.weight"] for one in sources])
        found = dequantise(*(engine[f"layers.{layer}.{name}.weight{end}"] for end in ("", "_scale")), torch.float32)
        assert torch.equal(found.double(), values), "symmetric: the value of 0 is -8 scales, which is exact"


def test_a_head_of_four_bits_gets_eight(random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path) -> None:
    quantise_checkpoint(random_model("llama", **WIDE), tmp_path / "m", "awq", own=FOUR_BITS["awq"](128))
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    parts, values = FOUR_BITS["awq"](128)(*tensors.pop("lm_head.weight").shape)
    save_file(tensors | {f"lm_head.{part}": tensor for part, tensor in parts.items()}, file, {"format": "pt"})
    directory = build_engine(tmp_path / "m", "full", *BFLOAT16)
    found = read_config(directory)
    assert (found.weight_only_precision, found.weight_formats) == ("int4", {"lm_head": "int8_asymmetric"})
    engine = load_file(next(directory.glob("rank0-*")))
    head = dequantise(engine["lm_head.weight"], engine["lm_head.weight_scale"], torch.float32)
    torch.testing.assert_close(head.double(), values, rtol=2.0**-10, atol=2.0**-10 * float(values.abs().max()))


def test_a_rank_has_whole_groups(random_model: RandomModel, tmp_path: Path) -> None:
    """Where a part of the inputs ends within a group, the group is divided: its halves have its scales."""
    model = random_model("llama", hidden_size=256, intermediate_size=256, head_dim=64, num_attention_heads=4)
    cases = (
        ("awq", FOUR_BITS["awq"](128), {}, "int4", {1: 128, 2: 128, 4: 64}, 2.5e-4),
        ("fp8 a block", *WHOLE_BLOCKS, "fp8_groups", {1: 32, 2: 32}, 1e-7),
    )
    for name, form, changes, precision, groups, rounding in cases:
        expected = quantise_checkpoint(model, tmp_path / name, name, own=form)["model.layers.2.self_attn.o_proj.weight"]
        change_config(tmp_path / name, changes)
        for size, group in groups.items():
            written = WeightFormat(torch.bfloat16, precision, weight_group=group)
            write_weights(open_checkpoint(tmp_path / name), tmp_path / name, written, tp_size=size)
            ranks = [load_weights(tmp_path / name, torch.device("cpu"), rank=rank) for rank in range(size)]
            parts = [(one["layers.2.o.weight"], one["layers.2.o.weight_scale"]) for one in ranks]
            values = torch.cat([dequantise(*part, torch.float32) for part in parts], 1)
            torch.testing.assert_close(values.double(), expected, rtol=0, atol=rounding)


def test_what_a_gpu_keeps(random_model: RandomModel, tmp_path: Path) -> None:
    """By the plan, as it is found before a build; blocks whose scales a row does not have are expanded."""
    model = random_model("llama", **WIDE)
    plan = ["--plan", "--method", "full", "--host_memory", "8GiB", "--gpu_memory", "8GiB"]
    cases = (
        ("awq", FOUR_BITS["awq"](64), {}, "int4"),
        ("packed 4", None, {}, "int4"),
        ("fp8 a block", *WHOLE_BLOCKS, "fp8_groups"),
        ("fp8 a block", None, {}, "none"),
        ("gptq 4 in order of activations", None, {}, "none"),
    )
    for number, (name, form, changes, precision) in enumerate(cases):
        directory = tmp_path / str(number)
        quantise_checkpoint(model, directory, name, own=form)
        change_config(directory, changes)
        for dtype, wanted in (("bfloat16", precision), ("float16", precision), ("float32", "none")):
            assert document([*plan, "--model", str(directory), "--dtype", dtype])["weight_only_precision"] == wanted
        own = own_numbers(open_checkpoint(directory), "cpu")
        assert own is not None
        assert own.precision == ("none" if precision == "fp8_groups" else precision)


def change_config(directory: Path, changes: dict[str, Any]) -> None:
    """Change the quantization_config."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= changes
    path.write_text(json.dumps(values))


def test_scales_beyond_float16_are_expanded(random_model: RandomModel, tmp_path: Path) -> None:
    """bfloat16's of less than 2^-17 may have digits that float16 has not."""
    quantise_checkpoint(random_model("llama", **WIDE), tmp_path / "m", "packed 4", own=FOUR_BITS["packed 4"](128))
    for scale, why in (
        (2.0**-17 * 1.5, ""),
        (2.0**-20 * 1.0078125, "beyond the range of float16"),
        (5000.0, "beyond the range"),
    ):
        change_gate(tmp_path / "m", {"weight_scale": torch.full((256, 3), scale).bfloat16()})
        own = own_numbers(open_checkpoint(tmp_path / "m"), "cpu")
        assert own is not None
        assert (own.precision, why in own.why) == ("int4", True)
        assert own.formats == ({"layers.1.gate_up": "none"} if why else {})


def test_the_same_precision_is_the_same_build(
    random_model: RandomModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantise_checkpoint(random_model("llama", **WIDE), tmp_path / "m", "awq", own=FOUR_BITS["awq"](64))
    flags = ["--model", str(tmp_path / "m"), "--method", "full", "--output_dir", str(tmp_path / "engine"), *BFLOAT16]
    assert build(flags) == 0
    assert "weights quantised by awq: kept as they are, int4 in groups of 64" in capsys.readouterr().err
    assert build([*flags, "--weight_only_precision", "int4", "--weight_group", "64"]) == 0
    assert "is up to date" in " ".join(capsys.readouterr().err.split())
    assert build([*flags, "--weight_group", "32"]) == 0
    assert read_config(tmp_path / "engine").weight_group == 32
    assert build([*flags, "--weight_group", "128"]) == 1
    assert "weight_group = 128: must be <= 64, the checkpoint's; leave it out" in capsys.readouterr().err


def test_bits_of_some_modules_are_named() -> None:
    config = FORMATS["gptq 4"][0] | {"dynamic": {"-:lm_head": {}, r"+:.*down_proj": {"bits": 4, "group_size": 64}}}
    assert Quantisation.read(config).bits == 4
    config["dynamic"][r"+:.*gate_proj"] = {"bits": 8}
    with pytest.raises(ConfigError, match=r"dynamic: bits of '\+:\.\*gate_proj' = 8: must be 4, those of all modules"):
        Quantisation.read(config)


def test_layers_that_were_left_out_are_read_as_they_are(plain: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    for name, precision in (("int8", "int8"), ("awq", "int4")):
        quantise_checkpoint(plain, tmp_path / name, name, left_out=("layers.0.", "down_proj"))
        own = build_engine(tmp_path / name, "full", *FLAGS)
        assert tokens_of(own) == tokens_of(build_engine(tmp_path / f"{name}-plain", "full", *FLAGS))
        found = read_config(build_engine(tmp_path / name, "full", *FLAGS, *BFLOAT16))
        layers = range(found.model.num_layers)
        left = {f"layers.0.{part}" for part in ("qkv", "o", "gate_up")} | {f"layers.{layer}.down" for layer in layers}
        assert (found.weight_only_precision, set(found.weight_formats)) == (precision, left)
        numbers = own_numbers(open_checkpoint(tmp_path / name), "cpu")
        assert numbers is not None
        assert numbers.why == f"{QUERY} is not quantised"


def test_a_second_rounding_is_refused(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--method", "full", "--output_dir", str(tmp_path / "engine"), *FLAGS)
    cases = (
        ("awq", "int8", "int4, which the checkpoint has, or none"),
        ("int8", "fp8", "int8, which the checkpoint has, or none"),
        ("gptq 4 in order of activations", "int4", f"none: {QUERY} has its columns in the order of activations"),
        ("gptq 3", "int4", "int8_asymmetric, which the checkpoint has, or none"),
        ("nvfp4", "int8", "int8_asymmetric, which the checkpoint has, or none"),
        ("fp8 a block", "fp8", f"none: {QUERY} has 192 columns in blocks of 32"),
    )
    for name, asked, own in cases:
        quantise_checkpoint(plain, tmp_path / name, name)
        assert build(["--model", str(tmp_path / name), *flags, "--weight_only_precision", asked]) == 1
        assert (
            f"weight_only_precision = '{asked}': must be {own}; the checkpoint is quantised" in capsys.readouterr().err
        )
        assert not (tmp_path / "engine").exists()
    assert build(["--model", str(tmp_path / "int8"), *flags, "--weight_only_precision", "none"]) == 0
    assert read_config(tmp_path / "engine").weight_only_precision == "none"
    assert "weights quantised by compressed-tensors: rounded to float32" in capsys.readouterr().err


def test_what_is_not_applied_is_said(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantise_checkpoint(plain, tmp_path / "m", "modelopt fp8")
    flags = ("--method", "full", "--output_dir", str(tmp_path / "engine"), *FLAGS)
    assert build(["--model", str(tmp_path / "m"), *flags]) == 0
    printed = capsys.readouterr().err
    assert "weights quantised by modelopt: rounded to float32" in printed
    assert "activations and rows keep the engine's dtype" in printed
    assert "compared with transformers" in printed


def test_a_wrong_scale_of_kept_numbers_is_found(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the dtype may round: the limit of weights that kvseek has rounded itself would hide it."""
    quantise_checkpoint(plain, tmp_path / "m", "int8")
    as_stored = QuantisedWeight.as_stored

    def wrong(weight: QuantisedWeight, precision: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = as_stored(weight, precision, group)
        return numbers, scales * 1.25

    monkeypatch.setattr(QuantisedWeight, "as_stored", wrong)
    flags = ("--method", "full", "--output_dir", str(tmp_path / "engine"), *FLAGS)
    assert build(["--model", str(tmp_path / "m"), *flags]) == 1
    assert "the engine does not compute what transformers computes" in capsys.readouterr().err


def test_modelopt_states_it_in_a_file_of_its_own(plain: Path, tmp_path: Path) -> None:
    expected = quantise_checkpoint(plain, tmp_path / "m", "modelopt fp8")
    document = json.loads((tmp_path / "m" / "config.json").read_text())
    values = document.pop("quantization_config")
    values.pop("quant_method")
    (tmp_path / "m" / "config.json").write_text(json.dumps(document))
    (tmp_path / "m" / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": values})
    )
    checkpoint = open_checkpoint(tmp_path / "m")
    weight, wanted = next(iter(expected.items()))
    torch.testing.assert_close(checkpoint.tensor(weight).double(), wanted, rtol=3e-7, atol=0)


BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
NVFP4_GROUP = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 16,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor_group",
    "symmetric": True,
    "type": "float",
}
# quantization_config as publications state them: facts of their config.json.
PUBLISHED: dict[str, tuple[dict[str, Any], Quantisation]] = {
    "Qwen3-8B-FP8": (BLOCKS, Quantisation("fp8", block=(128, 128))),
    "DeepSeek-V4-Flash": (BLOCKS | {"scale_fmt": "ue8m0"}, Quantisation("fp8", block=(128, 128))),
    "Llama-2-7B-Chat-GPTQ": (
        {
            "bits": 4,
            "group_size": 128,
            "damp_percent": 0.01,
            "desc_act": True,
            "sym": True,
            "true_sequential": True,
            "model_name_or_path": None,
            "model_file_base_name": "model",
            "quant_method": "gptq",
        },
        Quantisation("gptq", bits=4, zero_offset=1),
    ),
    "Qwen2.5-7B-Instruct-AWQ": (
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        Quantisation("awq", bits=4),
    ),
    "as llm-compressor writes NVFP4": (
        {
            "config_groups": {
                "group_0": {
                    "input_activations": NVFP4_GROUP | {"dynamic": "local"},
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": NVFP4_GROUP,
                }
            },
            "format": "nvfp4-pack-quantized",
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        Quantisation("compressed-tensors"),
    ),
    "as ModelOpt writes NVFP4 weights": (
        {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
            "quant_algo": "W4A16_NVFP4",
            "group_size": 16,
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "quant_method": "modelopt",
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.35.0"},
        },
        Quantisation("modelopt", cache=True),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    values, expected = PUBLISHED[name]
    assert Quantisation.read(values) == expected


AWQ, GPTQ_INT4 = (
    PUBLISHED["Qwen2.5-7B-Instruct-AWQ"][0],
    {
        "batch_size": 1,
        "bits": 4,
        "block_name_to_quantize": None,
        "cache_block_outputs": True,
        "damp_percent": 0.01,
        "dataset": None,
        "desc_act": False,
        "exllama_config": {"version": 1},
        "group_size": 128,
        "max_input_length": None,
        "model_seqlen": None,
        "module_name_preceding_first_block": None,
        "modules_in_block_to_quantize": None,
        "pad_token_id": None,
        "quant_method": "gptq",
        "sym": True,
        "tokenizer": None,
        "true_sequential": True,
        "use_cuda_fp16": False,
        "use_exllama": True,
    },
)
OBSERVED = {"actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}
FP8_OF_ALL = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
FOUR, ROWS_FP8 = {name: FOUR_BITS[name](128) for name in FOUR_BITS}, FORMATS["fp8 a row"][1]
# Most used publications: quantization_config, how their modules are packed, and what they become on a GPU and on a CPU: the
# format of all matrices of the layers, or words of the reason why they are rounded.
BECOMES: dict[str, tuple[dict[str, Any], Any, str, str]] = {
    "Qwen/Qwen2.5-7B-Instruct-AWQ": (AWQ, FOUR["awq"], "int4", "int4"),
    "Qwen/Qwen3-8B-AWQ": (AWQ, FOUR["awq"], "int4", "int4"),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": (AWQ, FOUR["awq"], "int4", "int4"),
    "TheBloke/Mistral-7B-Instruct-v0.2-AWQ": (
        {name: AWQ[name] for name in AWQ if name != "modules_to_not_convert"},
        FOUR["awq"],
        "int4",
        "int4",
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": (GPTQ_INT4, FOUR["gptq 4"], "int4", "int4"),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": (
        GPTQ_INT4 | {"bits": 8},
        gptq(8, 1, 128),
        "int8_asymmetric",
        "int8_asymmetric",
    ),
    "TheBloke/Llama-2-7B-Chat-GPTQ": (
        PUBLISHED["Llama-2-7B-Chat-GPTQ"][0],
        gptq(4, 1, 128, shuffled=True),
        "order of activations",
        "order of activations",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": (
        compressed("float-quantized", **OBSERVED, **FP8_OF_ALL, strategy="tensor") | {"quantization_status": "frozen"},
        fp8("weight_scale", lambda rows: (1,), torch.bfloat16),
        "fp8",
        "fp8",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": (
        compressed("float-quantized", **OBSERVED, **FP8_OF_ALL, strategy="channel"),
        ROWS_FP8,
        "fp8",
        "fp8",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": (
        compressed("int-quantized", **OBSERVED, **integers(8, **CHANNEL)),
        FORMATS["int8"][1],
        "int8",
        "int8",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16": (
        compressed("pack-quantized", **OBSERVED, **integers(8, **CHANNEL)),
        packed(8, None, symmetric=True),
        "int8_asymmetric",
        "int8_asymmetric",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": (
        compressed("pack-quantized", **OBSERVED | integers(4, group_size=128, actorder="weight")),
        FOUR["packed 4"],
        "int4",
        "int4",
    ),
    "Qwen/Qwen3-8B-FP8": (BLOCKS, WHOLE_BLOCKS[0], "fp8_groups", "has FP8 in blocks, which a GPU multiplies"),
    "Qwen/Qwen3-32B-FP8": (BLOCKS, WHOLE_BLOCKS[0], "fp8_groups", "has FP8 in blocks, which a GPU multiplies"),
    "nvidia/Llama-3.1-8B-Instruct-FP8": (
        MODELOPT | {"quant_algo": "FP8"},
        FORMATS["modelopt fp8"][1],
        "fp8",
        "has scales with more digits than bfloat16",
    ),
    "nvidia/Llama-3.1-8B-Instruct-FP4": (
        MODELOPT | {"quant_algo": "NVFP4", "group_size": 16},
        nvfp4(modelopt=True),
        "int8_asymmetric",
        "int8_asymmetric",
    ),
    "RedHatAI/Qwen3-8B-NVFP4": (
        PUBLISHED["as llm-compressor writes NVFP4"][0],
        nvfp4(modelopt=False),
        "int8_asymmetric",
        "int8_asymmetric",
    ),
    "meta-llama/Llama-3.1-405B-Instruct-FP8": (
        FORMATS["fbgemm"][0],
        FORMATS["fbgemm"][1],
        "fp8",
        "has scales with more digits than bfloat16",
    ),
}


@pytest.mark.parametrize("name", BECOMES)
def test_what_published_checkpoints_become(name: str, random_model: RandomModel, tmp_path: Path) -> None:
    config, form, on_gpu, on_cpu = BECOMES[name]
    quantise_checkpoint(random_model("llama", **WIDE), tmp_path / "m", "awq", own=form)
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    for device, expected in (("cuda", on_gpu), ("cpu", on_cpu)):
        own = own_numbers(open_checkpoint(tmp_path / "m"), device)
        assert own is not None
        assert own.formats == {}
        assert own.precision == expected or (own.precision == "none" and expected in own.why)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "method": (
        "awq",
        {"quant_method": "bitsandbytes"},
        "quant_method = 'bitsandbytes': must be one of fp8.*; its numbers are entries of a table",
    ),
    "gpt-oss": (
        "awq",
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "'mxfp4': must be one of .*; it is published of gpt-oss, which kvseek does not serve: use the unquantised",
    ),
    "no object": ("awq", {}, "quant_method = None"),
    "version": ("awq", {"version": "gemv"}, "version = 'gemv': must be one of gemm"),
    "bits": ("gptq 4", {"bits": 5}, "bits = 5: must be one of 2, 3, 4, 8"),
    "unknown key": ("awq", {"surprise": 1}, "surprise = 1: must be a key that kvseek knows"),
    "rotations": (
        "int8",
        {"transform_config": {"config_groups": {"R1": {}}}},
        "transform_config = .*: must be {} or null",
    ),
    "sparse": ("int8", {"format": "marlin-24"}, "format = 'marlin-24': must be one of int-quantized"),
    "status": ("int8", {"quantization_status": "calibration"}, "quantization_status = 'calibration'"),
    "two formats": ("gptq 4", {"format": "gptq", "checkpoint_format": "gptq_v2"}, "formats = .*: must be the same"),
    "algorithm": ("modelopt fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ': must be one of FP8, NVFP4"),
    "block": ("fp8 a block", {"weight_block_size": [128]}, r"block of weights = \[128\]: must be \[rows, columns\]"),
    "other tensors": ("awq", {"quant_method": "fp8", "bits": None}, "bits = None: must be a key"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case: str, plain: Path, tmp_path: Path) -> None:
    name, changes, message = REFUSED[case]
    quantise_checkpoint(plain, tmp_path / "m", name)
    path = tmp_path / "m" / "config.json"
    document = json.loads(path.read_text())
    document["quantization_config"] = document["quantization_config"] | changes if changes else {}
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tmp_path / "m").header("model.layers.0.mlp.up_proj.weight")


GATE = "model.layers.1.mlp.gate_proj"


@pytest.mark.parametrize("name", ["awq", "gptq 4", "fp8 a block", "int8"])
def test_configurations_that_transformers_saves_are_read(name: str) -> None:
    import transformers

    config = FORMATS[name][0]
    judges = {"awq": "AwqConfig", "gptq": "GPTQConfig"} | {method: judge for method, (judge, _) in JUDGES.items()}
    saved = getattr(transformers, judges[config["quant_method"]]).from_dict(dict(config)).to_dict()
    assert Quantisation.read(json.loads(json.dumps(saved, default=lambda one: one.value))) == Quantisation.read(config)


def test_weights_that_are_called_frozen_are_read(plain: Path, tmp_path: Path) -> None:
    """As older tools of compressed-tensors called compressed ones."""
    expected = quantise_checkpoint(plain, tmp_path / "m", "int8")
    path = tmp_path / "m" / "config.json"
    document = json.loads(path.read_text())
    document["quantization_config"]["quantization_status"] = "frozen"
    path.write_text(json.dumps(document))
    found = open_checkpoint(tmp_path / "m").tensor(f"{GATE}.weight")
    torch.testing.assert_close(found.double(), expected[f"{GATE}.weight"], rtol=3e-7, atol=0)


def change_gate(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace parts of a module, by their names, or remove them."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for part, tensor in changes.items():
        tensors.pop(f"{GATE}.{part}", None)
        if tensor is not None:
            tensors[f"{GATE}.{part}"] = tensor
    save_file(tensors, file, {"format": "pt"})


def test_columns_without_a_group_are_in_order(plain: Path, tmp_path: Path) -> None:
    """-1 is what compressed-tensors writes where columns have not been sorted."""
    expected = quantise_checkpoint(plain, tmp_path / "m", "packed 4")[f"{GATE}.weight"]
    change_gate(tmp_path / "m", {"weight_g_idx": torch.full((expected.shape[1],), -1, dtype=torch.int32)})
    torch.testing.assert_close(open_checkpoint(tmp_path / "m").tensor(f"{GATE}.weight").double(), expected)


def test_numbers_of_eight_bits_are_read_in_the_order_of_activations(plain: Path, tmp_path: Path) -> None:
    rows, columns = quantise_checkpoint(plain, tmp_path / "m", "int8")[f"{GATE}.weight"].shape
    groups = torch.randperm(columns, generator=torch.Generator().manual_seed(1)) % 6
    scales = torch.rand(rows, 6, generator=torch.Generator().manual_seed(2))
    change_gate(tmp_path / "m", {"weight_scale": scales, "weight_g_idx": groups.int()})
    numbers = load_file(tmp_path / "m" / "model.safetensors")[f"{GATE}.weight"]
    assert torch.equal(open_checkpoint(tmp_path / "m").tensor(f"{GATE}.weight"), numbers.float() * scales[:, groups])


def test_parts_of_another_format_are_not_passed_over(plain: Path, tmp_path: Path) -> None:
    quantise_checkpoint(plain, tmp_path / "m", "packed 4")
    change_gate(tmp_path / "m", {"weight_scale_2": torch.ones(1)})
    assert open_checkpoint(tmp_path / "m").unused({f"{GATE}.weight"}) >= {f"{GATE}.weight_scale_2 of model.safetensors"}


def changed(tensor: torch.Tensor) -> list[torch.Tensor | None]:
    """A tensor that has been lost, and some of other shapes and types."""
    shapes = [tensor[None], tensor.reshape(-1), tensor.reshape(-1)[0]]
    cuts = [tensor.narrow(dim, 0, size) for dim in range(tensor.ndim) for size in (0, 1, tensor.shape[dim] - 1)]
    longer = [torch.cat((tensor, tensor), dim) for dim in range(tensor.ndim)]
    return [None, *shapes, *cuts, *longer, tensor.half(), tensor.to(torch.uint8), tensor.long(), tensor.bool()]


@pytest.mark.parametrize("name", FORMATS)
def test_damage_of_any_part_raises_nothing_but_config_errors(name: str, plain: Path, tmp_path: Path) -> None:
    quantise_checkpoint(plain, tmp_path / "m", name)
    tensors, refused = load_file(tmp_path / "m" / "model.safetensors"), 0
    for part in [one for one in tensors if one.startswith((f"{GATE}.weight", f"{GATE}.q"))]:
        for tensor in changed(tensors[part]):
            change_gate(tmp_path / "m", {part.removeprefix(f"{GATE}."): None if tensor is None else tensor.clone()})
            checkpoint = open_checkpoint(tmp_path / "m")
            try:
                own_numbers(checkpoint, "cpu")
                check_tensors(checkpoint, list_weights(checkpoint.config))
                checkpoint.tensor(f"{GATE}.weight")
                if (narrow := checkpoint.quantised(f"{GATE}.weight")) is not None:
                    for precision in narrow.precisions:
                        narrow.as_stored(precision, narrow.group)
            except ConfigError:
                refused += 1
        change_gate(tmp_path / "m", {part.removeprefix(f"{GATE}."): tensors[part]})
    assert refused > 10


DAMAGED: dict[str, tuple[str, str, Any, str]] = {
    "no scales": ("awq", "scales", None, "missing beside it = .'scales'.: must be nothing"),
    "short scales": ("awq", "scales", lambda t: t[:, :-8].contiguous(), "scales = 152: must be 160"),
    "no group": ("gptq 4", "g_idx", lambda t: t - 1, r"smallest and largest group = \(-1, 4\): must be \(0, 5\)"),
    "groups": ("gptq 4", "g_idx", lambda t: t + 1, r"smallest and largest group = \(1, 6\)"),
    "packed": ("packed 4", "weight_packed", lambda t: t[:, :-1].contiguous(), "columns"),
    "blocks": (
        "fp8 a block",
        "weight_scale_inv",
        lambda t: t[:-1].contiguous(),
        r"scales = \(2, 6\): must be \(3, 6\)",
    ),
    "zero points": (
        "awq",
        "qzeros",
        lambda t: t[:, :-1].contiguous(),
        r"packed zero points = \(6, 19\): must be \(6, 20\)",
    ),
    "scale of all": ("nvfp4", "weight_global_scale", None, "scales of all weights = 0: must be 1"),
    "type": ("int8", "weight", lambda t: t.short(), "dtype = 'I16': must be one of F8_E4M3, I8, U8"),
    "no scale": ("int8", "weight_scale", None, "scales beside it = 0: must be 1"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_parts_are_found(case: str, plain: Path, tmp_path: Path) -> None:
    name, part, change, message = DAMAGED[case]
    quantise_checkpoint(plain, tmp_path / "m", name)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    found = tensors.pop(f"{GATE}.{part}")
    if change is not None:
        tensors[f"{GATE}.{part}"] = change(found)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tmp_path / "m").tensor(f"{GATE}.weight")


def test_a_bias_of_gptq_that_is_not_zero_is_refused(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantise_checkpoint(plain, tmp_path / "m", "gptq 4")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{GATE}.bias"] += 0.5
    save_file(tensors, file, {"format": "pt"})
    assert build(["--model", str(tmp_path / "m"), "--method", "full", "--output_dir", str(tmp_path / "e"), *FLAGS]) == 1
    assert f"tensor {GATE}.bias of model.safetensors (1 in all) has no place" in capsys.readouterr().err
