"""Checkpoints of each kind: what is none, GGUF files beside the same Hugging Face directory, heads of tied models."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import BuildEngine
from tests.engine.model.test_logits import compare
from tests.support.checkpoint_files import (
    LLAMA,
    LLAMA3,
    edit_gguf,
    edit_json,
    edit_tensors,
    finish,
    run_build,
    write_gguf,
)
from tests.support.random_models import save_random_model

from kvseek.builder import build
from kvseek.builder.checkpoints import gguf as gguf_checkpoint
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import weight_reader
from kvseek.core.config import RopeScaling
from kvseek.core.errors import ConfigError
from kvseek.core.rope import frequencies

PROMPT = torch.arange(150).mul(11).remainder(100).tolist()
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_refused_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; pass a Hugging Face directory"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is an adapter; merge it into its base model with peft's merge_and_unload"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        checkpoint.tensor("lm_head.weight")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        checkpoint.tokenizer()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_equals_the_hugging_face_checkpoint(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "BLOCK_WEIGHTS", 1000)  # tensors are read in several blocks
    model = save_random_model(tmp_path / "model", architecture)
    expected, found = open_checkpoint(model), open_checkpoint(write_gguf(tmp_path / "m.gguf", model, architecture))
    changes = {"rms_norm_eps": pytest.approx(1e-6), "bos_token_id": None, "pad_token_id": None}
    assert vars(found.config) == vars(expected.config) | changes
    tensors = load_file(model / "model.safetensors")
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in tensors.items())
    assert found.unused(set(tensors)) == set()
    assert found.unused(set(tensors) - {"model.norm.weight"}) == {"output_norm.weight"}


def test_gguf_files_of_several_parts(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    whole = open_checkpoint(write_gguf(tmp_path / "whole.gguf", model, "llama"))
    path = write_gguf(tmp_path / "m.gguf", model, "llama", part_tensors=12)
    assert path.name == "m-00001-of-00003.gguf"
    found = open_checkpoint(path)
    assert found.config == whole.config
    assert [file.name for file in found.files] == [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    tensors = load_file(model / "model.safetensors")
    assert found.unused(set(tensors)) == set()
    assert all(torch.equal(found.tensor(name), whole.tensor(name)) for name in tensors)
    assert {found.header(name).place.partition(":")[0] for name in tensors} == set(map(str, found.files))
    arguments = ["--model", str(path), "--tokenizer", str(model), "--output_dir", str(tmp_path / "engine"), "--quiet"]
    assert build.main([*arguments, "--method", "full", "--kernels", "reference"]) == 0, (
        "compared with transformers, too"
    )


def test_gguf_parts_that_are_refused(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    first = write_gguf(tmp_path / "m.gguf", model, "llama", part_tensors=12)
    second, third = (first.with_name(f"m-0000{part}-of-00003.gguf") for part in (2, 3))

    def refused(path: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            _ = open_checkpoint(path).unused(set())

    refused(second, r"split\.no = 1: must be 0, that of the first part; download all parts .* and pass the first")
    refused(first.rename(tmp_path / "renamed.gguf"), r"split\.count = 3: must be 1, or the number in a name such as")
    (tmp_path / "renamed.gguf").rename(first)
    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    refused(first, r"00003-of-00003\.gguf: split\.no and split\.count = \[1, 3\]: must be \[2, 3\]")
    third.write_bytes(content[:100])
    refused(first, r"cannot read .*00003-of-00003\.gguf: .*cut short")
    third.unlink()
    refused(first, r"00003-of-00003\.gguf is missing, one of the 3 parts of the model")


def test_gguf_with_llama3_rope_factors(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    scaled = model_config(LLAMA | {"head_dim": 32, "rope_scaling": {"type": "llama3", **LLAMA3}})
    plain = model_config(LLAMA | {"head_dim": 32})
    factors = frequencies(plain)[0] / frequencies(scaled)[0]
    found = open_checkpoint(write_gguf(tmp_path / "a.gguf", model, "llama", factors)).config.rope_scaling
    assert dataclasses.replace(found, factor=round(found.factor, 5)) == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight = .* must be those of Llama 3\.1's scaling"):
        _ = open_checkpoint(write_gguf(tmp_path / "b.gguf", model, "llama", factors.sqrt())).config


def test_gguf_files_of_another_byte_order(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    finish(writer)
    with pytest.raises(ConfigError, match=r"byte order of .*big\.gguf = 'foreign': must be this machine's"):
        _ = open_checkpoint(tmp_path / "big.gguf").config


LINEAR = {"type": "linear", "factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
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
    kinds = {float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}
    new = {f"llama.{key}": value for key, value in stated.items()}
    edit_gguf(path, lambda metadata, _: metadata.update(new), {key: kinds[type(value)] for key, value in new.items()})
    edit_json(model / "config.json", rope_scaling=scaling, rope_parameters=None)
    assert open_checkpoint(path).config.rope_scaling == open_checkpoint(model).config.rope_scaling


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_equals_what_transformers_reads(smollm2_gguf: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    checkpoint = open_checkpoint(smollm2_gguf)
    tensors = {name: value for name, value in reference.state_dict().items() if name != "lm_head.weight"}
    assert len(tensors) == 272
    assert all(torch.equal(checkpoint.tensor(name), value) for name, value in tensors.items())


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_splits_words_as_it_was_trained(smollm2_gguf: Path) -> None:
    tokenizer = open_checkpoint(smollm2_gguf).tokenizer()
    backend = tokenizer.backend
    assert backend.encode("a  1931").tokens == ["a", "ĠĠ", "1", "9", "3", "1"], "digits are words of their own"
    assert backend.encode("It's 5").tokens == ["It", "'s", "Ġ", "5"]
    text = "Log of 3 May:  wind 12 knots\n\n\tfog – ünïcode 🙂"
    assert backend.decode(backend.encode(text).ids) == text
    assert backend.token_to_id("<|im_end|>") == tokenizer.special_id("eos_token") == 2


def test_weight_reader(tmp_path: Path) -> None:
    """Weights one by one, fused as in an engine; a checkpoint with tensors to spare is refused before any is read."""
    model = save_random_model(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    projections = [tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    found = weight_reader(open_checkpoint(model), torch.bfloat16)("layers.1.qkv.weight")
    assert torch.equal(found, torch.cat(projections).to(torch.bfloat16))
    edit_json(model / "config.json", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="has no place in a llama decoder"):
        weight_reader(open_checkpoint(model), torch.bfloat16)


def test_head_of_a_tied_model(tmp_path: Path, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """A head that repeats the embedding is left out; another one is refused, and served once the file says so."""
    model = save_random_model(tmp_path / "model", "qwen2")
    edit_tensors(model / "model.safetensors", lambda it: it.update({HEAD: it[EMBEDDING].clone()}))
    compare(model, build_engine(model, "full"), PROMPT)
    edit_tensors(model / "model.safetensors", lambda it: it[HEAD].mul_(torch.linspace(0.5, 1.5, it[HEAD].shape[1])))
    assert run_build(model, tmp_path / "engine") == 1
    assert f"tie_word_embeddings = True: must be false, because the checkpoint has a {HEAD}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*engine*"))
    edit_json(model / "config.json", tie_word_embeddings=False)
    compare(model, build_engine(model, "full", "--max_batch_size", "2"), PROMPT)


def test_adapter_beside_the_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    (copy / "adapter_config.json").write_text("{}")
    assert run_build(copy, tmp_path / "engine") == 1
    assert "adapter_config.json belongs to an adapter" in capsys.readouterr().err
