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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "unknown key 'colour'; known keys: cache, dtype"),
        ({"max_batch_size": 0}, "max_batch_size = 0: must be >= 1"),
        ({"max_batch_size": True}, "max_batch_size = True: must be int"),
        ({"max_batch_size": "4"}, "max_batch_size = '4': must be int"),
        ({"dtype": "int8"}, "dtype = 'int8': must be one of"),
        ({"max_seq_len": 9000}, "max_seq_len = 9000: must be <= max_position_embeddings = 8192"),
        ({"max_input_len": 4000, "max_seq_len": 300}, "max_input_len = 4000: must be <= max_seq_len = 300"),
        ({"cache": {"sink": -1}}, "cache.sink = -1: must be >= 0"),
        ({"cache": {"lokal": 1}}, "config.json: cache: unknown key 'lokal'"),
        ({"model": 3}, "model = 3: must be an object"),
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
