"""Configuration: round trips through JSON, and errors that name the field, the value, the limit and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvseek.engine.config import CONFIG_FILE, CacheConfig, EngineConfig, ModelConfig, RopeScaling, from_dict
from kvseek.engine.errors import ConfigError, EngineDirectoryError
from kvseek.plugins.registry import get_method

MODEL = ModelConfig(
    "qwen3", 100, 64, 96, 2, 4, 2, 16, 1e-6, 1e6, 8192, RopeScaling("yarn", 4.0, 2048), eos_token_ids=(2, 6)
)


def test_round_trip(tmp_path: Path) -> None:
    config = EngineConfig(MODEL, "pariskv", {"top_k": 7}, CacheConfig(sink=3), dtype="bfloat16", max_batch_size=9)
    config.save(tmp_path)
    assert EngineConfig.load(tmp_path) == config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip_of_a_gpu_engine(tmp_path: Path, dtype: str) -> None:
    cache = CacheConfig(offload="never", kv_cache_device_memory_bytes=1 << 40)
    config = EngineConfig(MODEL, "full", cache=cache, dtype=dtype, device="cuda")
    config.save(tmp_path)
    assert EngineConfig.load(tmp_path) == config


def test_an_engine_directory_without_the_new_fields_is_for_the_cpu(tmp_path: Path) -> None:
    EngineConfig(MODEL, "full").save(tmp_path)
    path = tmp_path / CONFIG_FILE
    document = json.loads(path.read_text())
    del document["device"], document["cache"]["offload"], document["cache"]["kv_cache_device_memory_bytes"]
    path.write_text(json.dumps(document))
    assert EngineConfig.load(tmp_path) == EngineConfig(MODEL, "full")


def test_gpu_macros_come_from_the_method() -> None:
    assert get_method("full").cuda_defines(get_method("full").configure({}), 128, 4) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "unknown key 'colour'; known keys: cache, device, dtype"),
        ({"max_batch_size": 0}, "max_batch_size = 0: must be >= 1"),
        ({"max_batch_size": True}, "max_batch_size = True: must be int"),
        ({"max_batch_size": "4"}, "max_batch_size = '4': must be int"),
        ({"dtype": "int8"}, "dtype = 'int8': must be one of"),
        ({"max_seq_len": 9000}, "max_seq_len = 9000: must be <= max_position_embeddings = 8192"),
        ({"max_input_len": 4000, "max_seq_len": 300}, "max_input_len = 4000: must be <= max_seq_len = 300"),
        ({"cache": {"sink": -1}}, "cache.sink = -1: must be >= 0"),
        ({"cache": {"lokal": 1}}, "config.json: cache: unknown key 'lokal'"),
        ({"model": 3}, "model = 3: must be an object"),
        ({"device": "tpu"}, "device = 'tpu': must be one of ('cpu', 'cuda')"),
        ({"dtype": "float16"}, "dtype = 'float16': must be float32 or bfloat16 with device = 'cpu'; choose bfloat16"),
        ({"device": "cuda", "kernels": "reference"}, "kernels = 'reference': must be 'native' with device = 'cuda'"),
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
)
def test_bad_values_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    EngineConfig(MODEL, "full").save(tmp_path)
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(tmp_path)
    assert message in str(caught.value)


def test_missing_key(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"format_version": 1, "method": "full"}')
    with pytest.raises(ConfigError, match="key 'model' is missing"):
        EngineConfig.load(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ('{"format_version": 99}', "format_version = 99")])
def test_broken_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(EngineDirectoryError, match=message):
        EngineConfig.load(tmp_path)


def test_no_engine_directory(tmp_path: Path) -> None:
    with pytest.raises(EngineDirectoryError, match="is no engine directory; run kvseek build"):
        EngineConfig.load(tmp_path)


def test_unknown_method_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="method = 'pariskw': unknown; choose one of full, flat, pariskv"):
        get_method("pariskw")


def test_unknown_method_field() -> None:
    with pytest.raises(ConfigError, match=r"pariskv: unknown key 'topk'; known keys: .*top_k"):
        get_method("pariskv").configure({"topk": 5})


def test_unknown_scaling_kind() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling.kind = 'longrope'"):
        from_dict(RopeScaling, {"kind": "longrope", "factor": 2}, "model")
