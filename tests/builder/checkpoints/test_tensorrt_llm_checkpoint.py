"""TensorRT-LLM checkpoints: the same model as its Hugging Face directory, and every error of a damaged one."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.checkpoint_files import edit_json, edit_tensors, save_tensorrt_llm
from tests.support.random_models import ARCHITECTURES, VOCABULARY, save_random_model

from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.tensorrt_llm import TensorRtLlmCheckpoint
from kvseek.builder.checkpoints.weights import WeightFormat, own_numbers, write_weights
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ModelConfig, RopeScaling
from kvseek.core.weight_only import dequantise
from kvseek.engine.model.weights import list_weights

# Eight heads are shared by 4 ranks, two KV heads not: they are copied. The vocabulary needs padding.
SHAPE = {"num_attention_heads": 8, "hidden_size": 256, "vocab_size": VOCABULARY + 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
QKV = "transformer.layers.1.attention.qkv.weight"
PRODUCTS = tuple(f"{name}.weight" for name in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    changes: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": True, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    }
    return {
        name: save_random_model(folder / name, name, **SHAPE, **changes.get(name, {}))
        for name in (*ARCHITECTURES, "mistral")
    }


@pytest.fixture
def four_ranks(models: dict[str, Path], tmp_path: Path) -> Path:
    """A Llama checkpoint of 2 × 2 ranks that a test may damage."""
    return save_tensorrt_llm(tmp_path / "four", models["llama"], tp=2, pp=2)


def names_of(config: ModelConfig) -> set[str]:
    return {source for weight in list_weights(config) for source in weight.sources}


SPREADS = [(1, 1, None), (2, 1, None), (4, 1, None), (4, 1, 0), (2, 1, 1), (1, 2, None), (2, 3, 0)]


@pytest.mark.parametrize(("tp", "pp", "embedding_axis"), SPREADS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral"])
def test_equals_the_hugging_face_checkpoint(
    name: str, tp: int, pp: int, embedding_axis: int | None, models: dict[str, Path], tmp_path: Path
) -> None:
    directory = save_tensorrt_llm(tmp_path / "trt", models[name], tp=tp, pp=pp, embedding_axis=embedding_axis)
    expected, found = open_checkpoint(models[name]), open_checkpoint(directory)
    assert isinstance(found, TensorRtLlmCheckpoint)
    assert found.config == expected.config
    assert found.config.eos_token_ids == (1,)
    names = names_of(expected.config)
    assert len(names) > 20
    for tensor in names:
        assert torch.equal(found.tensor(tensor), expected.tensor(tensor)), tensor
    assert found.unused(names | {"lm_head.weight"}) == set()
    assert {path.name for path in found.files} >= {"config.json", "tokenizer.json", f"rank{tp * pp - 1}.safetensors"}


def test_half_precision_is_kept(models: dict[str, Path], tmp_path: Path) -> None:
    directory = save_tensorrt_llm(tmp_path / "trt", models["qwen3"], tp=2)
    for rank in range(2):
        edit_tensors(
            directory / f"rank{rank}.safetensors",
            lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}),
        )
    name = "model.layers.1.self_attn.k_proj.weight"
    found = open_checkpoint(directory).tensor(name)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, load_file(models["qwen3"] / "model.safetensors")[name].bfloat16())


def test_tied_embeddings_need_no_head(models: dict[str, Path], tmp_path: Path) -> None:
    flags = {"tie_word_embeddings": False, "share_embedding_table": True}
    directory = save_tensorrt_llm(tmp_path / "trt", models["qwen2"], **flags)
    edit_tensors(directory / "rank0.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    checkpoint = open_checkpoint(directory)
    write_weights(checkpoint, tmp_path, WeightFormat(torch.float32))
    assert checkpoint.config.tie_word_embeddings
    edit_json(directory / "config.json", share_embedding_table=False)
    with pytest.raises(ConfigError, match=r"rank0\.safetensors: tensor lm_head\.weight is missing"):
        write_weights(open_checkpoint(directory), tmp_path, WeightFormat(torch.float32))


def test_scales_of_the_kv_cache_are_no_weights(four_ranks: Path) -> None:
    scale = {f"transformer.layers.0.attention.kv_cache_{kind}scaling_factor": torch.ones(1) for kind in ("", "rcp_")}
    edit_tensors(four_ranks / "rank3.safetensors", lambda tensors: tensors.update(scale))
    edit_json(four_ranks / "config.json", quantization={"quant_algo": None, "kv_cache_quant_algo": "FP8"})
    checkpoint = open_checkpoint(four_ranks)
    assert checkpoint.unused(names_of(checkpoint.config)) == set()
    adapter = {"transformer.layers.0.attention.lora_a": torch.ones(1)}
    edit_tensors(four_ranks / "rank3.safetensors", lambda tensors: tensors.update(adapter))
    with pytest.raises(ConfigError, match=r"lora_a of rank3\.safetensors \(1 in all\) has no place in a llama decoder"):
        write_weights(open_checkpoint(four_ranks), four_ranks, WeightFormat(torch.float32))


def test_weights_in_fp8(models: dict[str, Path], tmp_path: Path) -> None:
    """Each rank's module has a scale of its own; what is left out, such as the head, is read as it is."""
    directory = save_tensorrt_llm(tmp_path / "trt", models["llama"], tp=2, quantization={"quant_algo": "FP8"})
    plain = save_tensorrt_llm(tmp_path / "plain", models["llama"], tp=2)

    def quantise(tensors: dict[str, torch.Tensor], scale: float, *, packed: bool) -> None:
        for name in [name for name in tensors if name.endswith(PRODUCTS)]:
            numbers = (tensors[name] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[name] = numbers if packed else numbers.float() * torch.tensor(scale)
            if packed:
                module = name.removesuffix("weight")
                tensors[f"{module}weights_scaling_factor"] = torch.tensor([scale])
                tensors[f"{module}activation_scaling_factor"] = torch.ones(1)

    for rank, scale in enumerate((0.001, 0.0013)):
        for folder, packed in ((directory, True), (plain, False)):
            edit_tensors(folder / f"rank{rank}.safetensors", partial(quantise, scale=scale, packed=packed))
    expected, found = open_checkpoint(plain), open_checkpoint(directory)
    names = names_of(found.config)
    for tensor in names:
        assert torch.equal(found.tensor(tensor), expected.tensor(tensor)), tensor
    assert found.unused(names) == set()
    found_numbers = own_numbers(found, "cuda")
    assert found_numbers is not None
    alone = {f"layers.{layer}.{part}": "none" for layer in range(found.config.num_layers) for part in ("o", "down")}
    assert (found_numbers.precision, found_numbers.formats) == ("fp8", alone)
    assert "o_proj.weight has other scales in each rank's file" in found_numbers.why
    narrow = found.quantised("model.layers.1.self_attn.k_proj.weight")
    assert narrow is not None
    values = dequantise(*narrow.as_stored("fp8", 0), torch.float32)
    assert torch.equal(values, expected.tensor("model.layers.1.self_attn.k_proj.weight"))
    scale = f"{QKV.removesuffix('weight')}weights_scaling_factor"
    edit_tensors(directory / "rank1.safetensors", lambda tensors: tensors.pop(scale))
    with pytest.raises(ConfigError, match=r"rank1.*attention\.qkv\.weight: scales beside it = 0: must be 1"):
        open_checkpoint(directory).header("model.layers.1.self_attn.q_proj.weight")


def test_weights_of_4_bits(tmp_path: Path) -> None:
    """As ModelOpt writes W4A16_AWQ. What has factors of its inputs is expanded, all else is kept."""
    model = save_random_model(tmp_path / "model", "llama", **SHAPE, intermediate_size=192)
    directory = save_tensorrt_llm(tmp_path / "trt", model, tp=2, quantization={"quant_algo": "W4A16_AWQ"})
    plain = save_tensorrt_llm(tmp_path / "plain", model, tp=2)

    def quantise(tensors: dict[str, torch.Tensor], *, packed: bool) -> None:
        for name in [name for name in tensors if name.endswith(PRODUCTS)]:
            weight, module = tensors[name], name.removesuffix("weight")
            groups = weight.unflatten(1, (-1, 32))
            scale = (groups.abs().amax(-1) / 7).half().float()
            numbers = (groups / scale[..., None]).round().clamp(-8, 7).flatten(1)
            factors = torch.linspace(0.5, 2, weight.shape[1]) if "dense" in name else torch.ones(weight.shape[1])
            tensors[name] = numbers * scale.repeat_interleave(32, 1) * factors
            if packed:
                even, odd = numbers.to(torch.int8).unflatten(0, (-1, 2)).unbind(1)
                tensors[name] = (even & 15) | (odd << 4)
                tensors[f"{module}weights_scaling_factor"] = scale
                tensors |= {f"{module}prequant_scaling_factor": factors} if "dense" in name else {}

    for rank in range(2):
        for folder, packed in ((directory, True), (plain, False)):
            edit_tensors(folder / f"rank{rank}.safetensors", partial(quantise, packed=packed))
    expected, found = open_checkpoint(plain), open_checkpoint(directory)
    names = names_of(found.config)
    for tensor in names:
        assert torch.equal(found.tensor(tensor), expected.tensor(tensor)), tensor
    assert found.unused(names) == set()
    own = own_numbers(found, "cuda")
    assert own is not None
    layers = range(found.config.num_layers)
    assert (own.precision, own.group, own.formats) == ("int4", 32, {f"layers.{layer}.o": "none" for layer in layers})
    assert own.why == "model.layers.0.self_attn.o_proj.weight has a factor for each input"
    narrow, name = found.quantised("model.layers.1.mlp.down_proj.weight"), "model.layers.1.mlp.down_proj.weight"
    assert narrow is not None
    for precision in narrow.precisions:
        values = dequantise(*narrow.as_stored(precision, 32), torch.float32)
        assert torch.equal(values, expected.tensor(name)), "scales of float16 are exact, and so is -8 of them"
    for part, change, message in (
        (
            "weights_scaling_factor",
            lambda it: it[:, :1].repeat(1, 5),
            r"shape of .*weights_scaling_factor = \(\d+, 5\)",
        ),
        ("prequant_scaling_factor", lambda it: it[:-1], r"shape of .*prequant_scaling_factor = \(\d+,\): must be"),
    ):
        broken = tmp_path / part
        shutil.copytree(directory, broken)
        key = f"transformer.layers.1.attention.dense.{part}"
        edit_tensors(broken / "rank1.safetensors", lambda it, key=key, change=change: it.update({key: change(it[key])}))
        with pytest.raises(ConfigError, match=rf"rank1.*attention\.dense\.weight: {message}"):
            own_numbers(open_checkpoint(broken), "cpu")


CONFIGURATIONS = [
    ({"architecture": "QWenForCausalLM", "qwen_type": "qwen2"}, {"architecture": "qwen2", "qkv_bias": True}),
    ({"architecture": "QWenForCausalLM", "qwen_type": "qwen3"}, {"architecture": "qwen3", "qk_norm": True}),
    ({"architecture": "Qwen2ForCausalLM"}, {"architecture": "qwen2", "output_bias": False}),
    ({"architecture": "Qwen3ForCausalLM", "attn_bias": True}, {"architecture": "qwen3", "output_bias": False}),
    ({"architecture": "MistralForCausalLM", "sliding_window": 512}, {"architecture": "llama", "sliding_window": 512}),
    ({"num_key_value_heads": None}, {"num_kv_heads": 8}),
    ({"head_size": None}, {"head_dim": 32}),
    ({"attn_bias": False}, {"qkv_bias": False, "output_bias": False}),
    ({"rotary_base": 1234}, {"rope_theta": 1234.0}),
    ({"rotary_scaling": {"type": "llama3"}}, {"rope_scaling": RopeScaling("llama3", 8.0, 8192)}),
    ({"rotary_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": RopeScaling("linear", 2.0)}),
    ({"mapping": None}, {}),
]


@pytest.mark.parametrize(("change", "expected"), CONFIGURATIONS)
def test_configurations(
    change: dict[str, Any], expected: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    found = vars(open_checkpoint(save_tensorrt_llm(tmp_path / "trt", models["llama"], **change)).config)
    assert {name: found[name] for name in expected} == expected


REFUSED = [
    ({"architecture": "FalconForCausalLM"}, "architecture = 'FalconForCausalLM': must be one of LlamaForCausalLM"),
    ({"architecture": "QWenForCausalLM"}, "qwen_type = None: must be 'qwen2' or 'qwen3'"),
    ({"architecture": "QWenForCausalLM", "qwen_type": "qwen"}, "qwen_type = 'qwen': must be 'qwen2' or 'qwen3'"),
    ({"architecture": "Qwen2ForCausalLM", "qwen_type": "qwen3"}, "qwen_type = 'qwen3': must be 'qwen2' with"),
    ({"architecture": "Qwen3ForCausalLM", "head_size": None}, "head_size is missing"),
    ({"norm_epsilon": None}, "norm_epsilon is missing; convert the model again"),
    ({"rotary_base": None}, "rotary_base is missing"),
    (
        {"quantization": {"quant_algo": "W4A8_AWQ"}},
        "quant_algo = 'W4A8_AWQ': must be FP8, W4A16_AWQ or null; convert .* without",
    ),
    (
        {"quantization": {"quant_algo": "W8A16"}},
        "quant_algo = 'W8A16': must be FP8, .*; its weights lie in the order of one GPU's kernels, which is not stated",
    ),
    (
        {"quantization": {"quant_algo": "W4A16_AWQ", "has_zero_point": True}},
        "has_zero_point = True: must be false or null; convert",
    ),
    ({"quantization": "FP8"}, "quantization = 'FP8': must be an object or null"),
    ({"moe": {"num_experts": 8}}, r"moe\.num_experts = 8: must be 0"),
    ({"moe_num_experts": 8}, "moe_num_experts = 8: must be 0"),
    ({"mlp_bias": True}, "mlp_bias = True: must be false"),
    ({"remove_duplicated_kv_heads": True}, "remove_duplicated_kv_heads = True"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi': must be \"rope_gpt_neox\""),
    ({"rotary_embedding_dim": 16}, "rotary_embedding_dim = 16: must be head_size = 32"),
    ({"rotary_scaling": {"type": "mrope", "factor": 2.0}}, "rope_scaling.rope_type = 'mrope'"),
    (
        {"rotary_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        "rotary_scaling.original_max_position_embeddings = None: must be stated with rotary_scaling of type longrope",
    ),
    ({"runtime_defaults": {"max_attention_window": [512]}}, r"max_attention_window = \[512\]: must be null"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': must be 'silu'"),
    ({"hidden_size": "256"}, "hidden_size = '256': must be an integer"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refused_configurations(change: dict[str, Any], message: str, models: dict[str, Path], tmp_path: Path) -> None:
    directory = save_tensorrt_llm(tmp_path / "trt", models["llama"], **change)
    with pytest.raises(ConfigError, match=message):
        _ = open_checkpoint(directory).config


MAPPINGS = [
    ({"mapping": {"tp_size": 0}}, r"mapping\.tp_size = 0: must be an integer > 0"),
    ({"mapping": {"tp_size": 2, "pp_size": 2, "cp_size": 2}}, r"mapping\.cp_size = 2: must be 1"),
    ({"mapping": {"tp_size": 2, "pp_size": 2, "world_size": 8}}, r"world_size = 8: must be tp_size × pp_size = 4"),
    ({"mapping": {"tp_size": 3, "pp_size": 1}}, r"rank3\.safetensors belongs to none of the 3 ranks"),
    ({"mapping": {"tp_size": 8}}, r"rank4\.safetensors is missing \(4 of the 8 ranks' files\)"),
    ({"use_parallel_embedding": True, "embedding_sharding_dim": 2}, "embedding_sharding_dim = 2: must be 0 or 1"),
    (
        {"num_attention_heads": 9, "num_key_value_heads": 1},
        "num_attention_heads = 9: must be a multiple of mapping.tp_size = 2",
    ),
    ({"num_attention_heads": 6, "num_key_value_heads": 3}, "num_key_value_heads = 3: must be a multiple or a divisor"),
    ({"intermediate_size": 161}, "intermediate_size = 161: must be a multiple of mapping.tp_size = 2"),
    ({"num_hidden_layers": 4}, r"layers in the ranks' files = \[2, 1\]: must be 4 together"),
    (
        {"use_parallel_embedding": True, "embedding_sharding_dim": 1, "hidden_size": 255, "head_size": 32},
        "hidden_size = 255: must be a multiple of mapping.tp_size = 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), MAPPINGS)
def test_refused_mappings(change: dict[str, Any], message: str, four_ranks: Path) -> None:
    edit_json(four_ranks / "config.json", **change)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(four_ranks).tensor("model.embed_tokens.weight")


def test_copies_that_differ(four_ranks: Path, tmp_path: Path) -> None:
    """What else may be wrong with a rank's file: test_bad_checkpoints.py."""
    name = "transformer.layers.0.post_layernorm.weight"
    edit_tensors(four_ranks / "rank3.safetensors", lambda tensors: tensors[name].add_(1))
    with pytest.raises(
        ConfigError, match=r"rank3\.safetensors: .*post_layernorm\.weight differs from that of rank2\.saf"
    ):
        write_weights(open_checkpoint(four_ranks), tmp_path, WeightFormat(torch.float32))


def test_kv_heads_that_should_be_copies(models: dict[str, Path], tmp_path: Path) -> None:
    """With four ranks and two KV heads, rank 3 repeats the KV head of rank 2."""
    directory = save_tensorrt_llm(tmp_path / "trt", models["qwen3"], tp=4)
    edit_tensors(directory / "rank3.safetensors", lambda tensors: tensors[QKV][-1].add_(1))
    checkpoint = open_checkpoint(directory)
    assert checkpoint.tensor("model.layers.1.self_attn.k_proj.weight").shape == (64, 256)
    with pytest.raises(ConfigError, match=r"rank3\.safetensors: .*qkv\.weight differs from that of rank2"):
        checkpoint.tensor("model.layers.1.self_attn.v_proj.weight")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"pretrained_config": {}, "build_config": {}}, "is a compiled TensorRT-LLM engine; pass the checkpoint"),
        (
            {"format_version": 2, "pretrained_config": {}},
            "is an engine directory of kvseek; pass the checkpoint that it",
        ),
        ({"format_version": 1, "model": {}}, "is an engine directory of kvseek; pass the checkpoint that it was built"),
    ],
)
def test_engines_are_no_checkpoints(document: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tmp_path)
