"""Quantised checkpoints: every format's numbers, and engines that compute with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.builder.checkpoints.quantised_checkpoints import FORMATS, quantise_checkpoint
from tests.conftest import BuildEngine, RandomModel
from tests.support.prefill import run_prefill

from kvseek.builder.build import main as build
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.quantised import Quantisation, QuantisedWeight
from kvseek.builder.checkpoints.weights import check_tensors
from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.engine.model.weights import list_weights

FLAGS = ("--device", "cpu", "--max_seq_len", "64", "--max_batch_size", "2")
PROMPT = tuple(range(3, 40))
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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", FORMATS)
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


def test_layers_that_were_left_out_are_read_as_they_are(plain: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    for name in ("int8", "awq"):
        quantise_checkpoint(plain, tmp_path / name, name, left_out=("layers.0.", "down_proj"))
        own = build_engine(tmp_path / name, "full", *FLAGS)
        assert read_config(own).weight_only_precision == "none"
        assert tokens_of(own) == tokens_of(build_engine(tmp_path / f"{name}-plain", "full", *FLAGS))


def test_a_second_rounding_is_refused(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--method", "full", "--output_dir", str(tmp_path / "engine"), *FLAGS)
    for name, asked, own in (("awq", "int8", "none"), ("int8", "fp8", "int8, which the checkpoint has, or none")):
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

    def wrong(weight: QuantisedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = as_stored(weight)
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


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "method": ("awq", {"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes': must be one of fp8"),
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
                check_tensors(checkpoint, list_weights(checkpoint.config))
                checkpoint.tensor(f"{GATE}.weight")
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
