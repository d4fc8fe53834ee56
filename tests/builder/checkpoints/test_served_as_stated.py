"""Checkpoints that say a thing twice, or where transformers looks first: served as transformers serves them, or refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.builder.checkpoints.damage import configure, tensors
from tests.conftest import BuildEngine
from tests.engine.model.test_logits import compare
from tests.support.gguf_files import edit_gguf, write_gguf
from tests.support.llama_config import LLAMA
from tests.support.random_models import save_random_model, save_tokenizer

from kvseek.builder import build
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.tokenizer import load_tokenizer_directory
from kvseek.core.config import ModelConfig, RopeScaling
from kvseek.core.errors import ConfigError

PROMPT = torch.arange(150).mul(11).remainder(100).tolist()
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "finetuned": True}
DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}


def run(model: Path, output: Path, *flags: str) -> int:
    arguments = ["--model", str(model), "--output_dir", str(output), "--method", "full", "--kernels", "reference"]
    return build.main([*arguments, "--quiet", *flags])


ROPE: dict[str, dict[str, Any]] = {
    "rope_scaling beside rope_parameters": {"rope_parameters": DEFAULT, "rope_scaling": LINEAR},
    "rope_scaling beside rope_parameters and rope_theta": {
        "rope_parameters": DEFAULT,
        "rope_theta": 1e6,
        "rope_scaling": YARN,
    },
    "empty rope_scaling": {"rope_parameters": {**DEFAULT, **LLAMA3}, "rope_scaling": {}},
    "rope_theta beside that of rope_parameters": {"rope_parameters": DEFAULT, "rope_theta": 1e6},
    "type beside rope_type": {"rope_scaling": {**LINEAR, "rope_type": "linear", "type": "yarn"}},
    "outer original length, yarn": {"rope_scaling": YARN, "original_max_position_embeddings": 256},
    "outer original length, llama3": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 256},
    "outer original length, rope_parameters": {
        "rope_parameters": {**DEFAULT, **LLAMA3},
        "original_max_position_embeddings": 256,
    },
    "outer original length, linear": {"rope_scaling": LINEAR, "original_max_position_embeddings": 256},
    "yarn, all fields": {
        "rope_scaling": {
            **YARN,
            "beta_fast": 16,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1,
            "truncate": False,
        }
    },
    "yarn, nulls": {"rope_scaling": {**YARN, "beta_fast": None, "attention_factor": None}},
    "yarn, attention_factor": {"rope_scaling": {**YARN, "attention_factor": 1.5}},
    "yarn, ramp of no width": {"rope_scaling": {**YARN, "beta_fast": 2, "beta_slow": 2, "truncate": False}},
}


@pytest.mark.parametrize("name", ROPE)
def test_rope(name: str, tmp_path: Path, build_engine: BuildEngine) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    configure(lambda values: values.update(ROPE[name]))(model)
    compare(model, build_engine(model, "full"), PROMPT)


def test_head_of_a_tied_model(tmp_path: Path, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """A head that repeats the embedding is left out; another one is refused, and served once the file says so."""
    model = save_random_model(tmp_path / "model", "qwen2")
    tensors(lambda it: it.update({HEAD: it[EMBEDDING].clone()}))(model)
    compare(model, build_engine(model, "full"), PROMPT)
    tensors(lambda it: it[HEAD].mul_(torch.linspace(0.5, 1.5, it[HEAD].shape[1])))(model)
    assert run(model, tmp_path / "engine") == 1
    assert f"tie_word_embeddings = True: must be false, because the checkpoint has a {HEAD}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*engine*"))
    configure(lambda values: values.update(tie_word_embeddings=False))(model)
    compare(model, build_engine(model, "full", "--max_batch_size", "2"), PROMPT)


def test_single_file_beside_shards(tmp_path: Path, build_engine: BuildEngine) -> None:
    """Transformers reads model.safetensors, whatever an index names."""
    model = save_random_model(tmp_path / "model", "llama", max_shard_size="500KB")
    shards = sorted(model.glob("model-*.safetensors"))
    assert len(shards) > 1
    weights = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    other = {name: tensor.flip(0).contiguous() for name, tensor in weights.items()}
    save_file(other, model / "model.safetensors", metadata={"format": "pt"})
    compare(model, build_engine(model, "full"), PROMPT)


GGUF_SCALINGS = [
    ({"rope.scaling.factor": 4.0}, LINEAR),
    ({"rope.scale_linear": 4.0}, LINEAR),
    ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, LINEAR),
    ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, LINEAR),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    ({"rope.scaling.type": "linear"}, None),
    ({"rope.scaling.factor": 0.0}, None),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}, YARN),
]


@pytest.mark.parametrize(("stated", "scaling"), GGUF_SCALINGS)
def test_gguf_scaling(stated: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    """As llama.cpp reads it: linear is the default, an older name of the factor counts, and no factor means 1."""
    model = save_random_model(tmp_path / "model", "llama")
    path = write_gguf(tmp_path / "model.gguf", model, "llama")
    set_scaling(path, stated)
    configure(lambda values: values.update(rope_scaling=scaling, rope_parameters=None))(model)
    assert open_checkpoint(path).config.rope_scaling == open_checkpoint(model).config.rope_scaling


def test_gguf_scaling_of_no_stated_type(tmp_path: Path, build_engine: BuildEngine) -> None:
    model = save_random_model(tmp_path / "model", "llama", rms_norm_eps=2.0**-20)
    path = write_gguf(tmp_path / "model.gguf", model, "llama")
    set_scaling(path, {"rope.scaling.factor": 4.0})
    configure(lambda values: values.update(rope_scaling=LINEAR))(model)
    compare(model, build_engine(path, "full", "--tokenizer", str(model)), PROMPT)


def set_scaling(path: Path, stated: dict[str, Any]) -> None:
    kinds = {float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}
    new = {f"llama.{key}": value for key, value in stated.items()}
    edit_gguf(path, lambda metadata, _: metadata.update(new), {key: kinds[type(value)] for key, value in new.items()})


def test_adapter_beside_the_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    (copy / "adapter_config.json").write_text("{}")
    assert run(copy, tmp_path / "engine") == 1
    assert "adapter_config.json belongs to an adapter" in capsys.readouterr().err


def test_own_tokenizer_with_more_ids_than_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_random_model(tmp_path / "model", "qwen2", vocab_size=300)
    assert run(model, tmp_path / "engine") == 1
    message = capsys.readouterr().err
    assert f"largest id of the tokenizer of {model} = " in message
    assert "must be < vocab_size = 300 of the model" in message
    assert "or remove added tokens from its files" in message
    assert not list(tmp_path.glob("*engine*"))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", {"version": 5}),
        ("tokenizer.json", {"added_tokens": [1]}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}),
    ],
)
def test_tokenizers_that_transformers_cannot_load(file: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Code of the publisher's is not run, and not asked about at the terminal."""
    save_tokenizer(tmp_path)
    configure(lambda values: values.update(change), file)(tmp_path)
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer_directory(tmp_path, "")


STATED = LLAMA | {"model_type": "llama", "bos_token_id": 1}
LLAMA_3 = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
REFUSED = [
    ({"rope_parameters": {"full_attention": DEFAULT}}, r"keys of rope_parameters = \['full_attention'\]"),
    (
        {"rope_parameters": {**DEFAULT, "factor": 8.0}},
        r"\['factor'\]: must be among those of rope_type 'default': none",
    ),
    ({"rope_scaling": {**LINEAR, "beta_fast": 1}}, r"keys of rope_scaling = \['beta_fast'\]"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (
        {"rope_scaling": {"rope_type": None, "factor": 2.0}},
        "rope_scaling.rope_type = None: must be one of default, lin",
    ),
    ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "rope_scaling: factor = None: must be float"),
    ({"rope_scaling": [1]}, r"rope_scaling = \[1\]: must be an object or null"),
    ({"rope_scaling": YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings is missing"),
    ({"rope_scaling": {**YARN, "rope_type": "linear"}}, r"\['original_max_position_embeddings'\]: must be among"),
    ({"is_causal": False}, "is_causal = False: must be true, or absent"),
    ({"sliding_window": 4096}, "sliding_window = 4096: must be null or absent"),
    ({"eos_token_id": 100}, "eos_token_id = 100: must be between 0 and vocab_size - 1 = 99"),
    ({"eos_token_id": [7, -1]}, "eos_token_id = -1: must be between 0"),
    ({"bos_token_id": 100}, "bos_token_id = 100: must be between 0"),
    (
        {"pad_token_id": -2},
        "pad_token_id = -2: must be between 0 and vocab_size - 1 = 99; state another one .* or null",
    ),
    *(({"rope_theta": theta}, "rope_theta = .*: must be finite and > 1") for theta in (-5, 0, 1, float("nan"), 1e400)),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0.0: must be finite and > 1"),
    ({"rope_theta": None}, "rope_theta = None: must be float"),
    ({"rope_theta": 10**400}, "rope_theta has 401 digits"),
    *(({"rms_norm_eps": eps}, "rms_norm_eps = .*: must be finite and > 0") for eps in (-1e-6, 0, float("inf"))),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings = 2147483648: must be between 1 and"),
    ({"rope_scaling": {**YARN, "beta_fast": 0}}, "rope_scaling.beta_fast = 0.0: must be finite and > 0"),
    ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "rope_scaling.beta_fast = 0.5: must be >= beta_slow"),
    ({"rope_scaling": {**YARN, "beta_slow": -1}}, "rope_scaling.beta_slow = -1.0: must be finite and > 0"),
    ({"rope_scaling": {**YARN, "attention_factor": 0}}, "rope_scaling.attention_factor = 0.0: must be finite and > 0"),
    ({"rope_scaling": {**YARN, "mscale": -10}}, "rope_scaling.mscale = -10.0: must be finite and >= 0"),
    ({"rope_scaling": {**YARN, "truncate": None}}, "rope_scaling: truncate = None: must be bool"),
    ({"rope_scaling": {**YARN, "factor": 1e300}}, r"rope_scaling.factor = 1e\+300: must be <= 2147483647 / original"),
    ({"rope_scaling": {**LINEAR, "factor": 0.5}}, "rope_scaling.factor = 0.5: must be finite and >= 1"),
    (
        {"rope_scaling": YARN, "original_max_position_embeddings": 2**31},
        "embeddings = 2147483648: must be <= 2147483647",
    ),
    ({"head_dim": 2**25}, "head_dim = 33554432: must be between 1 and 16777216"),
    ({"num_labels": 10**9}, "num_labels = 1000000000: must be 1 or 2, or absent"),
    ({"rope_scaling": {**YARN, "factor": float("nan")}}, "rope_scaling.factor = nan: must be finite and >= 1"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "rope_scaling.high_freq_factor = 4.0: must be > low_freq"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0}}, "rope_scaling.low_freq_factor = 0.0: must be finite and > 0"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings = None: must be true or false"),
    ({"attention_bias": "no"}, "attention_bias = 'no': must be true or false"),
    ({"dual_chunk_attention_config": {"chunk_size": 8, "local_size": 8}}, r"local_size = 8: must be < chunk_size"),
    ({"dual_chunk_attention_config": {"chunk": 8}}, "chunk = 8: must be a key that kvseek knows"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refused_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(STATED | change)


# Names under which messages speak of a field, where it is not the field's own.
SPOKEN = {
    "num_attention_heads": "num_heads|hidden_size",
    "vocab_size": "token_id",
    "num_key_value_heads": "num_kv_heads",
}
VALUES = [None, True, -1, 0, 3, 0.5, float("nan"), 10**400, "", "x", [], [None], ["x"], {}, {"x": None}]


@pytest.mark.parametrize("name", [*STATED, "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "layer_types"])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:9])
def test_any_value_of_any_field(name: str, value: Any) -> None:
    """No value ends in anything but a configuration or an error that names the field."""
    message = ""
    try:
        assert isinstance(model_config(STATED | {name: value}), ModelConfig)
    except ConfigError as error:
        message = str(error)
    names = [name, *SPOKEN.get(name, name).split("|")]
    assert not message or any(one in message for one in names), message


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3, YARN], ids=["linear", "llama3", "yarn"])
@pytest.mark.parametrize(
    "name", [*RopeScaling.__dataclass_fields__, "rope_type", "rope_theta", "partial_rotary_factor"]
)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:9])
def test_any_value_of_any_scaling_field(name: str, value: Any, scaling: dict[str, Any]) -> None:
    outer = {"original_max_position_embeddings": 64}
    with contextlib.suppress(ConfigError):
        assert isinstance(model_config(STATED | outer | {"rope_scaling": {**scaling, name: value}}), ModelConfig)


def test_numbers_that_no_file_should_hold(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(STATED)[:-1] + ', "rope_theta": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        open_checkpoint(tmp_path)


def test_dual_chunk_attention_reaches_to_the_end_of_its_first_chunk() -> None:
    chunks = {"chunk_size": 1024, "local_size": 64, "original_max_position_embeddings": 1024}
    config = model_config(STATED | {"dual_chunk_attention_config": chunks})
    assert config.max_position_embeddings == 960
    assert config.rope_scaling is None


def test_finetuned_tells_nothing() -> None:
    assert model_config(STATED | {"rope_scaling": YARN}).rope_scaling == RopeScaling("yarn", 4.0, 64)
