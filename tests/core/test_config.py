"""Configuration: round trips through JSON, and errors that name the field, the value, the limit and the remedy."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvseek.core.config import (
    CONFIG_FILE,
    FORMAT_VERSION,
    PRETRAINED,
    CacheConfig,
    EngineConfig,
    read_config,
    write_config,
)
from kvseek.core.errors import ConfigError, EngineDirectoryError, from_dict
from kvseek.core.model_config import DeltaNetConfig, ExpertsConfig, ModelConfig, RopeScaling
from kvseek.plugins.registry import get_method

MODEL = ModelConfig(
    "qwen3", 100, 64, 96, 2, 4, 2, 16, 1e-6, 1e6, 8192, RopeScaling("yarn", 4.0, 2048), eos_token_ids=(2, 6)
)
MIXTURE = dataclasses.replace(
    MODEL,
    intermediate_size=128,
    architecture="qwen3_moe",
    experts=ExpertsConfig(8, 2, 48, norm_topk_prob=True, dense_layers=(1,)),
)
OBJECTS = ("pretrained_config", "build_config")


def change(directory: Path, *places: str, **values: object) -> None:
    """Set keys of config.json, of the object that the names of `places` lead to."""
    path = directory / CONFIG_FILE
    document: dict[str, Any] = json.loads(path.read_text())
    inner = document
    for place in places:
        inner = inner[place]
    inner.update(values)
    path.write_text(json.dumps(document))


def check_refused(directory: Path, message: str, *places: str, **values: object) -> None:
    """An engine directory whose config.json is changed so is refused with this message."""
    write_config(EngineConfig(MODEL, "full"), directory)
    change(directory, *places, **values)
    with pytest.raises(ConfigError) as caught:
        read_config(directory)
    assert message in str(caught.value)


ON_CPU = EngineConfig(MODEL, "pariskv", {"top_k": 7}, CacheConfig(sink=3), dtype="bfloat16", max_batch_size=9)
NEVER = CacheConfig(offload="never", kv_cache_device_memory_bytes=1 << 40)


@pytest.mark.parametrize("config", [ON_CPU, EngineConfig(MIXTURE, "full", cache=NEVER, dtype="float16", device="cuda")])
def test_round_trip(tmp_path: Path, config: EngineConfig) -> None:
    write_config(config, tmp_path)
    assert read_config(tmp_path) == config


def names_of(config_class: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def test_each_field_lies_in_its_object(tmp_path: Path) -> None:
    write_config(ON_CPU, tmp_path)
    document = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert list(document) == ["format_version", "version", *OBJECTS]
    assert (document["format_version"], document["version"]) == (FORMAT_VERSION, version("kvseek"))
    pretrained, built = (document[name] for name in OBJECTS)
    assert pretrained == json.loads(json.dumps(dataclasses.asdict(MODEL))) | {"dtype": "bfloat16"}
    assert set(built) == names_of(EngineConfig) - {"model", "dtype"}
    assert (built["method"], built["method_config"], built["max_batch_size"]) == ("pariskv", {"top_k": 7}, 9)
    assert built["cache"] == dataclasses.asdict(ON_CPU.cache)


def test_no_two_fields_of_an_object_share_a_name() -> None:
    assert set(PRETRAINED) <= names_of(EngineConfig)
    assert not set(PRETRAINED) & names_of(ModelConfig)


def test_an_engine_directory_without_the_new_fields_is_for_the_cpu(tmp_path: Path) -> None:
    write_config(EngineConfig(MODEL, "full"), tmp_path)
    path = tmp_path / CONFIG_FILE
    document = json.loads(path.read_text())
    built = document["build_config"]
    del built["device"], built["cache"]["offload"], built["cache"]["kv_cache_device_memory_bytes"]
    path.write_text(json.dumps(document))
    assert read_config(tmp_path) == EngineConfig(MODEL, "full")


BAD_VALUES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "build_config": [
        ({"colour": "red"}, "config.json: build_config: unknown key 'colour'; known keys: block_sparse, cache, device"),
        ({"max_batch_size": 0}, "max_batch_size = 0: must be >= 1"),
        ({"max_batch_size": True}, "config.json: build_config: max_batch_size = True: must be int"),
        ({"max_seq_len": 9000}, "max_seq_len = 9000: must be <= max_position_embeddings = 8192"),
        ({"max_input_len": 4000, "max_seq_len": 300}, "max_input_len = 4000: must be <= max_seq_len = 300"),
        ({"cache": {"sink": -1}}, "cache.sink = -1: must be >= 0"),
        ({"cache": {"lokal": 1}}, "config.json: build_config: cache: unknown key 'lokal'"),
        ({"cache": 3}, "config.json: build_config: cache = 3: must be an object"),
        ({"device": "tpu"}, "device = 'tpu': must be one of ('cpu', 'cuda')"),
        ({"weight_group": 48}, "weight_group = 48: must be one of (32, 64, 128); set --weight_group"),
        (
            {"weight_group": 64},
            "weight_group = 64: must be left out with weight_only_precision = 'none'; it belongs to",
        ),
        (
            {"weight_only_precision": "int4", "weight_group": 128},
            "hidden_size = 64: must be a multiple of 128 with weight_only_precision = 'int4'; build with --weight_group 32",
        ),
        (
            {"weight_only_precision": "int4", "tp_size": 2},
            "intermediate_size = 48: must be a multiple of 32 with weight_only_precision = 'int4' in each of 2 ranks; build",
        ),
        (
            {"weight_only_precision": "int8", "weight_formats": {"layers.0.o": "int8_asymmetric"}},
            "weight_formats: layers.0.o = 'int8_asymmetric': must be none beside weight_only_precision = 'int8'; build",
        ),
        (
            {"prefill_precision": "fp8", "weight_only_precision": "fp8"},
            "dtype = 'float32': must be 'bfloat16' with prefill_precision = 'fp8'; build with --dtype bfloat16, or leave",
        ),
        (
            {"weight_only_precision": "fp8_groups"},
            "hidden_size = 64: must be a multiple of 128 with weight_only_precision = 'fp8_groups'",
        ),
        ({"device": "cuda", "kernels": "reference"}, "kernels = 'reference': must be 'native' with device = 'cuda'"),
        (
            {"device": "cuda", "runtime": "tensorrt", "cache": {"reuse": True}},
            "cache.reuse = True: must be left out with runtime = 'tensorrt'; plans read",
        ),
        (
            {"cache": {"reuse": False, "reuse_host_bytes": 1}},
            "cache.reuse_host_bytes = 1: must be left out with cache.reuse = False",
        ),
        ({"device": "cuda", "cache": {"offload": "often"}}, "cache.offload = 'often': must be one of ('auto',"),
        ({"cache": {"offload": "always"}}, "cache.offload = 'always': must be 'auto' with device = 'cpu'"),
        (
            {"cache": {"kv_cache_device_memory_bytes": 1}},
            "cache.kv_cache_device_memory_bytes = 1: must be None with device = 'cpu'; leave it out, or build with",
        ),
        (
            {"device": "cuda", "cache": {"kv_cache_device_memory_bytes": 0}},
            "cache.kv_cache_device_memory_bytes = 0: must be > 0",
        ),
        (
            {"device": "cuda", "cache": {"offload": "always", "kv_cache_device_memory_bytes": 1}},
            "cache.kv_cache_device_memory_bytes = 1: must be left out with offload = 'always'",
        ),
    ],
    "pretrained_config": [
        ({"dtype": "int8"}, "dtype = 'int8': must be one of"),
        ({"dtype": "float16"}, "dtype = 'float16': must be float32 or bfloat16 with device = 'cpu'; choose bfloat16"),
        ({"dtype": 16}, "config.json: pretrained_config: dtype = 16: must be str"),
        ({"method": "full"}, "config.json: pretrained_config: unknown key 'method'; known keys: architecture, "),
        ({"head_dim": 15}, "head_dim = 15: must be even;"),
        ({"rope_scaling": {"size": 1}}, "config.json: pretrained_config: rope_scaling: unknown key 'size'"),
    ],
    "": [
        ({"plugin_config": {}}, "config.json: unknown key 'plugin_config'; known keys: build_config, format_version, "),
        ({"build_config": []}, "config.json: build_config = []: must be dict"),
    ],
}


@pytest.mark.parametrize(
    ("place", "values", "message"), [(place, *row) for place, table in BAD_VALUES.items() for row in table]
)
def test_bad_values_are_named(tmp_path: Path, place: str, values: dict[str, object], message: str) -> None:
    check_refused(tmp_path, message, *filter(None, [place]), **values)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (("version",), "config.json: key 'version' is missing"),
        (("pretrained_config",), "config.json: key 'pretrained_config' is missing"),
        (("build_config",), "config.json: key 'build_config' is missing"),
        (("pretrained_config", "head_dim"), "config.json: pretrained_config: key 'head_dim' is missing"),
        (("build_config", "method"), "config.json: build_config: key 'method' is missing"),
    ],
)
def test_missing_keys_are_named(tmp_path: Path, places: tuple[str, ...], message: str) -> None:
    write_config(EngineConfig(MODEL, "full"), tmp_path)
    path = tmp_path / CONFIG_FILE
    document = json.loads(path.read_text())
    del (document if len(places) == 1 else document[places[0]])[places[-1]]
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path)
    assert message in str(caught.value)


def test_broken_file(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(EngineDirectoryError, match="is not JSON"):
        read_config(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("[]")
    with pytest.raises(ConfigError, match="= 'list': must be a JSON object; build the engine again"):
        read_config(tmp_path)


def test_no_engine_directory(tmp_path: Path) -> None:
    with pytest.raises(EngineDirectoryError, match="is no engine directory; run kvseek build"):
        read_config(tmp_path)


def test_unknown_method_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="method = 'pariskw': unknown; choose one of full, clusterkv"):
        get_method("pariskw")


def test_unknown_method_field() -> None:
    with pytest.raises(ConfigError, match=r"pariskv: unknown key 'topk'; known keys: .*top_k"):
        get_method("pariskv").configure({"topk": 5})


def test_how_far_dynamic_and_longrope_reach() -> None:
    """Dynamic frequencies change with every token beyond max_position_embeddings; TensorRT's plans have the short factors."""
    longrope = RopeScaling("longrope", 4.0, 2048, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
    dynamic = dataclasses.replace(MODEL, rope_scaling=RopeScaling("dynamic", 4.0))
    EngineConfig(dynamic, "full", max_seq_len=8192)
    message = (
        r"max_seq_len = 8193: must be <= max_pos.* = 8192; dynamic RoPE .* build with --max_seq_len 8192, or use yarn"
    )
    with pytest.raises(ConfigError, match=message):
        EngineConfig(dynamic, "full", max_seq_len=8193)
    model = dataclasses.replace(MODEL, rope_scaling=longrope)
    assert (model.short_reach, dynamic.short_reach) == (2048, 2**31 - 1)
    EngineConfig(model, "full", max_seq_len=8192)
    tensorrt: dict[str, Any] = {"device": "cuda", "runtime": "tensorrt", "max_input_len": 2048}
    EngineConfig(model, "full", max_seq_len=2048, **tensorrt)
    message = (
        "max_seq_len = 2049: must be <= original_max_position_embeddings = 2048 with runtime = 'tensorrt'; a plan has"
    )
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model, "full", max_seq_len=2049, **tensorrt)


EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 0}, "experts.num_experts = 0: must be between 1 and"),
    ({"num_experts": 1000}, "experts.num_experts = 1000: must be <= 512; choose another model"),
    ({"num_experts_per_tok": 9}, r"experts.num_experts_per_tok = 9: must be between 1 and min\(num_experts, 32\) = 8"),
]


@pytest.mark.parametrize(("change", "message"), EXPERTS)
def test_bad_experts_are_named(change: dict[str, Any], message: str) -> None:
    assert MIXTURE.experts is not None
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(MIXTURE, experts=dataclasses.replace(MIXTURE.experts, **change))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 5}, "tp_size = 5: must be a divisor of num_heads = 4"),
        ({"tp_size": 2, "weight_only_precision": "int4"}, "experts.intermediate_size = 24: must be a multiple of 32"),
        (
            {"device": "cuda"},
            "dtype = 'float32': must be bfloat16 or float16 with a mixture of experts on cuda; choose",
        ),
        (
            {"device": "cuda", "dtype": "bfloat16", "runtime": "tensorrt"},
            "runtime = 'tensorrt': must be 'torch' with a mixture of experts; plans have no experts",
        ),
        (
            {"device": "cuda", "dtype": "bfloat16", "weight_only_precision": "fp8", "prefill_precision": "fp8"},
            "must be 'none' with a mixture of experts and weight_only_precision = 'fp8'; grouped products take 16 bits",
        ),
    ],
)
def test_what_experts_cannot_be_computed_with(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(MIXTURE, "full", **fields)
    apart = dataclasses.replace(MIXTURE, num_heads=6, num_kv_heads=3, intermediate_size=96)
    assert apart.experts is not None
    apart = dataclasses.replace(apart, experts=dataclasses.replace(apart.experts, intermediate_size=50))
    with pytest.raises(ConfigError, match=r"tp_size = 3: must be a divisor of experts\.intermediate_size = 50; choose"):
        apart.check_ranks(3)


HYBRID = dataclasses.replace(
    MODEL, architecture="qwen3_5", gated_attention=True, delta_net=DeltaNetConfig((0,), 2, 6, 16, 8, 4), rotary_dim=4
)
STATES: list[tuple[dict[str, Any], str]] = [
    ({"layers": (0, 1)}, r"delta_net.layers = \(0, 1\): must be ascending, of layers 0 to 1, and not all of these"),
    ({"layers": (0, 0)}, r"delta_net.layers = \(0, 0\): must be ascending"),
    ({"num_value_heads": 5}, "delta_net.num_value_heads = 5: must be a multiple of num_key_heads = 2"),
    ({"conv_kernel": 0}, "delta_net.conv_kernel = 0: must be between 1 and"),
]


@pytest.mark.parametrize(("change", "message"), STATES)
def test_bad_states_are_named(change: dict[str, Any], message: str) -> None:
    assert HYBRID.delta_net is not None
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(HYBRID, delta_net=dataclasses.replace(HYBRID.delta_net, **change))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 4}, "tp_size = 4: must be a divisor of delta_net.num_key_heads = 2"),
        (
            {"tp_size": 2, "cache": CacheConfig(reuse=True)},
            "cache.reuse = True: must be false, or left out, with Gated DeltaNet",
        ),
        (
            {"cache": CacheConfig(cached_prefill="sparse")},
            "cache.cached_prefill = 'sparse': must be 'dense' with Gated DeltaNet",
        ),
        ({"device": "cuda", "runtime": "tensorrt"}, "runtime = 'tensorrt': must be 'torch' with Gated DeltaNet layers"),
        ({"weight_only_precision": "int4"}, "delta_net values = 48: must be a multiple of 32"),
    ],
)
def test_what_states_cannot_be_computed_with(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(HYBRID, "full", **fields)


def test_states_belong_to_hybrids() -> None:
    with pytest.raises(ConfigError, match="delta_net = None: must be stated with architecture = 'qwen3_5'"):
        dataclasses.replace(HYBRID, delta_net=None)
    with pytest.raises(ConfigError, match="must be stated with architecture = 'qwen3' if that is one of"):
        dataclasses.replace(HYBRID, architecture="qwen3")
    for rotary_dim in (3, 18):
        with pytest.raises(ConfigError, match=f"rotary_dim = {rotary_dim}: must be even, between 2 and head_dim = 16"):
            dataclasses.replace(HYBRID, rotary_dim=rotary_dim)
    with pytest.raises(
        ConfigError, match=r"cache\.reuse_state_tokens = 128: must be left out with architecture = 'qwen3'"
    ):
        EngineConfig(MODEL, "full", cache=CacheConfig(reuse_state_tokens=128))
    with pytest.raises(ConfigError, match=r"cache\.reuse_state_tokens = 100: must be a multiple of 64"):
        CacheConfig(reuse_state_tokens=100)


def test_experts_belong_to_their_architectures() -> None:
    for model, other in ((MODEL, MIXTURE.experts), (MIXTURE, None)):
        with pytest.raises(
            ConfigError, match=f"must be stated with architecture = '{model.architecture}' if that has any"
        ):
            dataclasses.replace(model, experts=other)


def test_unknown_scaling_kind() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling.kind = 'proportional'"):
        from_dict(RopeScaling, {"kind": "proportional", "factor": 2}, "model")
