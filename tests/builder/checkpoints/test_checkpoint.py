"""Checkpoints of each kind: what is none, GGUF files beside the same Hugging Face directory, their tensors and vocabularies."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.conftest import BuildEngine
from tests.engine.model.test_logits import compare
from tests.support import random_models
from tests.support.checkpoint_files import (
    LLAMA,
    LLAMA3,
    add_tokenizer,
    edit_gguf,
    edit_json,
    edit_tensors,
    finish,
    interleave,
    run_build,
    write_gguf,
)
from tests.support.random_models import (
    ARCHITECTURE_SHAPE,
    ARCHITECTURES,
    MIXTURES,
    class_prefix,
    randomise,
    save_random_model,
    save_tokenizer,
)
from tests.support.sentencepiece import BYTES, SPACE, SPECIAL, sentencepiece_backend
from tokenizers import AddedToken, Tokenizer

from kvseek.builder import build
from kvseek.builder.checkpoints import gguf as gguf_checkpoint
from kvseek.builder.checkpoints.gguf_tokenizer import ARRAYS, SCORES, TOKENS, TYPES, load_tokenizer
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, check_tensors, weight_reader, write_weights
from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import RopeScaling
from kvseek.core.rope import frequencies
from kvseek.engine.model.weights import list_weights, load_weights

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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", *MIXTURES])
def test_gguf_equals_the_hugging_face_checkpoint(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "BLOCK_WEIGHTS", 1000)  # tensors are read in several blocks
    mixed = {"mlp_only_layers": []} if architecture in MIXTURES else {}
    model = save_random_model(tmp_path / "model", architecture, **mixed)
    expected, found = open_checkpoint(model), open_checkpoint(write_gguf(tmp_path / "m.gguf", model, architecture))
    changes = {"rms_norm_eps": pytest.approx(1e-6), "bos_token_id": None, "pad_token_id": None}
    assert vars(found.config) == vars(expected.config) | changes
    tensors = load_file(model / "model.safetensors")
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in tensors.items())
    assert found.unused(set(tensors)) == set()
    assert found.unused(set(tensors) - {"model.norm.weight"}) == {"output_norm.weight"}


def test_what_a_gguf_file_of_a_mixture_states(tmp_path: Path) -> None:
    """Older files leave sizes of experts to the tensors; what cannot be is refused."""
    model = save_random_model(tmp_path / "model", "qwen2_moe", mlp_only_layers=[])
    path = write_gguf(tmp_path / "m.gguf", model, "qwen2_moe")
    expected, sizes = open_checkpoint(path).config, ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    edit_gguf(path, lambda metadata, _: [metadata.pop(f"qwen2moe.{name}") for name in sizes])
    assert open_checkpoint(path).config == expected

    def refused(change: Callable[..., Any], message: str, kinds: dict[str, Any] | None = None) -> None:
        copy = tmp_path / "bad.gguf"
        shutil.copy(path, copy)
        edit_gguf(copy, change, kinds)
        bad = open_checkpoint(copy)
        with pytest.raises(ConfigError, match=message):
            check_tensors(bad, list_weights(bad.config))

    name = "blk.1.ffn_up_exps.weight"
    refused(lambda metadata, _: metadata.pop("qwen2moe.expert_count"), "qwen2moe.expert_count is missing")
    refused(lambda _, tensors: tensors.pop(name), f"tensor {name} is missing")
    refused(
        lambda _, tensors: tensors.update({name: tensors[name][1:]}),
        rf"bad.gguf: shape of {name} = \(5, 32, 192\): must be \(6, rows, columns\)",
    )
    key = "qwen2moe.expert_weights_norm"
    kinds = {key: gguf.GGUFValueType.BOOL}
    refused(lambda metadata, _: metadata.update({key: True}), f"{key} = True: must be a key that kvseek knows", kinds)
    model = save_random_model(tmp_path / "qwen3", "qwen3_moe")
    path = write_gguf(tmp_path / "m.gguf", model, "qwen3_moe")
    key = "qwen3moe.expert_shared_feed_forward_length"
    kinds = {key: gguf.GGUFValueType.UINT32}
    refused(lambda metadata, _: metadata.update({key: 8}), f"{key} = 8: must be 0 or absent", kinds)


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


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_model_that_reads_images(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All other tensors are named, and left out if that is asked for; transformers computes the same from the files."""
    model, engine = save_with_images(tmp_path / "model", architecture), tmp_path / "engine"
    arguments = ["--model", str(model), "--output_dir", str(engine), "--method", "full", "--kernels", "reference"]
    assert build.main(arguments) == 1
    assert "ForConditionalGeneration': reads images, which kvseek does not: pass --text_only" in capsys.readouterr().err
    assert build.main([*arguments, "--text_only"]) == 0
    told = capsys.readouterr().err
    assert re.search(r"\d+ tensors for images \(model\.visual\.\*\) are left out: --text_only", told)
    assert "2 tensors of the multi-token-prediction head (mtp.*) are not used" in told
    assert "8 greedy tokens are equal" in told
    assert read_config(engine).model.architecture == architecture
    assert build.main(["--check", "--output_dir", str(engine), "--model", str(model)]) == 0


@pytest.mark.parametrize("original", [True, False])
def test_the_text_part_of_a_gemma(original: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of published files, and with those of transformers' modules."""
    import transformers

    text = random_models.SHAPE | ARCHITECTURE_SHAPE["gemma3"]
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    images |= {"image_size": 28, "patch_size": 14}
    ids = {name: number for number, name in enumerate(("image_token_index", "boi_token_index", "eoi_token_index"), 5)}
    config = transformers.Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4, **ids)
    model = transformers.Gemma3ForConditionalGeneration(config)
    randomise(model)
    model.save_pretrained(tmp_path / "model", save_original_format=original)
    save_tokenizer(tmp_path / "model")
    engine = tmp_path / "engine"
    arguments = ["--model", str(tmp_path / "model"), "--output_dir", str(engine), "--method", "full"]
    assert build.main([*arguments, "--kernels", "reference", "--text_only"]) == 0
    told = capsys.readouterr().err
    named = ", ".join(f"{'' if original else 'model.'}{name}.*" for name in ("multi_modal_projector", "vision_tower"))
    assert f" tensors for images ({named}) are" in told
    assert "8 greedy tokens are equal" in told
    assert read_config(engine).model.architecture == "gemma3"


def save_with_images(directory: Path, architecture: str) -> Path:
    """A model that reads images, with a head that predicts further tokens; of a mixture all experts are in one tensor."""
    import transformers

    prefix, sizes = class_prefix(architecture), {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1}
    text = random_models.SHAPE | ARCHITECTURE_SHAPE[architecture]
    ids = {name: number for number, name in enumerate(("image_token_id", "video_token_id", "vision_start_token_id"), 5)}
    images = sizes | {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 16}
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=images, **ids)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    randomise(model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors |= {f"mtp.{name}.weight": torch.ones(4) for name in ("fc", "norm")}
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(directory)
    return directory


def test_text_only_needs_something_to_leave_out(model: Path, tmp_path: Path) -> None:
    for path in (model, write_gguf(tmp_path / "model.gguf", model, "llama")):
        with pytest.raises(ConfigError, match="text_only = True: must be left out with a model that reads no images"):
            open_checkpoint(path, text_only=True)


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


HEAD_DIM = 32
# A super-block holds 256 weights of a row, so every row length is a multiple of that.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}
# Type → bytes of a block of 256 weights, and where its float16 scales lie.
SUPER_BLOCKS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}


def engine_weights(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    write_weights(open_checkpoint(path), folder, WeightFormat(torch.float32))
    return load_weights(folder, torch.device("cpu"))


def fused_names(layer: int) -> dict[str, tuple[str, ...]]:
    """Fused weight of an engine → its parts, as a GGUF file names them."""
    block, own = f"blk.{layer}.", f"layers.{layer}."
    return {
        f"{own}qkv.weight": (f"{block}attn_q.weight", f"{block}attn_k.weight", f"{block}attn_v.weight"),
        f"{own}o.weight": (f"{block}attn_output.weight",),
        f"{own}gate_up.weight": (f"{block}ffn_gate.weight", f"{block}ffn_up.weight"),
        f"{own}down.weight": (f"{block}ffn_down.weight",),
    }


@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_super_blocks_of_random_bytes(name: str, tmp_path: Path) -> None:
    """The package cannot quantise to these types, so the blocks are random bytes with finite scales."""
    kind, generator = GGMLQuantizationType[name], np.random.default_rng(7)
    size, scales = SUPER_BLOCKS[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (256, size)

    def encode(tensor: torch.Tensor) -> tuple[np.ndarray, GGMLQuantizationType]:
        rows, columns = tensor.shape
        blocks = generator.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
        for offset in scales:
            values = generator.uniform(1e-4, 1e-2, (rows, columns // 256, 1)).astype(np.float16)
            blocks[:, :, offset : offset + 2] = values.view(np.uint8)
        return blocks.reshape(rows, -1), kind

    model = save_random_model(tmp_path / "model", "llama", **SHAPE)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", encode=encode)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = engine_weights(path, tmp_path / "engine")

    def dequantised(part: str) -> torch.Tensor:
        assert stored[part].tensor_type == kind
        return torch.tensor(gguf.dequantize(stored[part].data, kind))

    for ours, parts in itertools.chain.from_iterable(fused_names(layer).items() for layer in range(2)):
        found = weights[ours]
        if ours.endswith("qkv.weight"):  # the file has the queries' and keys' rows in llama's own order
            values = 2 * HEAD_DIM
            found = torch.cat((interleave(found[:-values], HEAD_DIM), found[-values:]))
        assert torch.equal(found, torch.cat([dequantised(part) for part in parts]))
        assert found.isfinite().all()
        assert found.std() > 0
    assert torch.equal(weights["embed.weight"], dequantised("token_embd.weight"))
    assert torch.equal(weights["lm_head.weight"], dequantised("output.weight"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "tolerance"), [("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", None)])
def test_types_that_the_package_writes(name: str, tolerance: float | None, architecture: str, tmp_path: Path) -> None:
    """Rounding to a 16-bit type errs by at most half a unit of a weight, to Q8_0 by half a step of its block of 32."""
    kind = GGMLQuantizationType[name]

    def encode(tensor: torch.Tensor) -> tuple[np.ndarray, GGMLQuantizationType]:
        return gguf.quantize(tensor.numpy(), kind).view(np.uint8), kind

    model = save_random_model(tmp_path / "model", architecture, **SHAPE)
    expected = load_file(model / "model.safetensors")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, architecture, encode=encode))
    for tensor_name, original in expected.items():
        found = checkpoint.tensor(tensor_name)
        if original.dim() == 1:
            assert torch.equal(found, original)
            continue
        if tolerance is None:
            largest = original.unflatten(1, (-1, 32)).abs().amax(dim=2, keepdim=True)
            limit = (largest / 127 * 0.57).expand(-1, -1, 32).flatten(1)  # the scale is a float16: 127 / 2048 more
        else:
            limit = original.abs() * tolerance + 2**-25
        assert ((found - original).abs() <= limit).all()
        assert not torch.equal(found, original)


TEXT = "It's helloWorld 12345\n\n  don't  ÜN–ünïcode 🙂 <|end|> e\u0301"


@pytest.fixture(scope="module")
def byte_level(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def words(backend: Tokenizer, text: str) -> list[str]:
    return [text[slice(*place)] for _, place in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (["llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "smaug-bpe"], ["aB", "'s", " ", "123", "45"]),
        (["qwen2", "deepseek-r1-qwen", "kormo", "megrez"], ["aB", "'s", " ", "1", "2", "3", "4", "5"]),
        (["smollm", "starcoder", "refact", "codeshell", "minerva-7b"], ["aB", "'s", " ", "1", "2", "3", "4", "5"]),
        (["gpt-2", "mellum", "a.x-4.0"], ["aB", "'s", " 12345"]),
        (["tekken"], ["a", "B", "'s", " ", "1", "2", "3", "4", "5"]),
    ],
)
def test_names_of_splits(model: Path, byte_level: Tokenizer, tmp_path: Path, splits: list[str], expected: Any) -> None:
    """One file a split: names that llama.cpp takes for the same split are the same."""
    for split in splits:
        add = write_tokenizer(byte_level, "gpt2", split, bos=0)
        backend = open_checkpoint(write_gguf(tmp_path / f"{split}.gguf", model, "llama", add=add)).tokenizer().backend
        assert words(backend, "aB's 12345") == expected
        ids = backend.encode(TEXT, add_special_tokens=False).ids
        assert backend.decode(ids, skip_special_tokens=False) in (TEXT, TEXT.replace("e\u0301", "\u00e9"))


def write_tokenizer(backend: Tokenizer, kind: str, split: str | None = None, **ids: int) -> Callable[[Any], None]:
    return lambda writer: add_tokenizer(writer, backend, kind, split, **ids)


def test_an_unknown_split_is_refused(model: Path, byte_level: Tokenizer, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", model, "llama", add=write_tokenizer(byte_level, "gpt2", "viking"))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.ggml\.pre = 'viking': must be one of llama-bpe, .*pass --tokenizer"
    ):
        open_checkpoint(path).tokenizer()


# Vocabularies of SentencePiece


def arrays(pieces: dict[str, float]) -> dict[str, Any]:
    """A vocabulary of pieces with their scores, behind special tokens and bytes."""
    tokens = [*SPECIAL, *BYTES, *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    return {TOKENS: tokens, TYPES: types, SCORES: [0.0] * 259 + list(pieces.values())}


def joined(text: str, pieces: dict[str, float]) -> list[str]:
    """SentencePiece's own rule: join the neighbours whose joint piece has the best score, and of equal ones the leftmost."""
    parts = list(text)
    while True:
        found = [(-pieces[both], at) for at in range(len(parts) - 1) if (both := parts[at] + parts[at + 1]) in pieces]
        if not found:
            return [byte for part in parts for byte in ([part] if part in pieces else spelt(part))]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def spelt(part: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in part.encode()]


RUNS = {
    SPACE * length: -1e9 for length in (2, 3, 4, 6, 8)
}  # as in Mistral's vocabulary, which has one score for all of them
WORDS = ["ab", "ba", "abc", "bca", f"{SPACE}a", f"{SPACE}ab", "ca", "aa", "aab", f"{SPACE}aa", "cc", "ccc", f"b{SPACE}"]


@given(text=st.text(st.sampled_from("abc dé灯\n"), max_size=24), order=st.permutations(WORDS), prefix=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_are_joined_as_sentencepiece_joins_them(text: str, order: list[str], prefix: bool) -> None:
    pieces = {piece: -float(rank) for rank, piece in enumerate(order)} | RUNS
    pieces |= {letter: -100.0 - number for number, letter in enumerate(("a", "b", "c", SPACE))}
    stated = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = load_tokenizer(stated, arrays(pieces))
    marked = (SPACE * bool(prefix and text) + text).replace(" ", SPACE)
    assert tokenizer.backend.encode(text).tokens == ["<s>", *joined(marked, pieces)]
    assert tokenizer.backend.decode(tokenizer.backend.encode(text).ids) == text


def test_a_gguf_file_encodes_as_the_models_tokenizer_json(model: Path, tmp_path: Path) -> None:
    backend = sentencepiece_backend()
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    add = write_tokenizer(backend, "llama", "default", bos=1, unknown=0)
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, "llama", add=add)).tokenizer()
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "<s>", "unk_token": "<unk>"}
    for text in ("France is Paris.", " the lamp", "a\n  b", "灯", "</s>x<think> y", "(Paris), 1931"):
        assert found.backend.encode(text).ids == backend.encode(text).ids
        assert found.backend.decode(found.backend.encode(text).ids) == backend.decode(backend.encode(text).ids)


def test_what_a_vocabulary_does_not_say_is_refused() -> None:
    pieces = {"a": -1.0, "b": -2.0, "ab": -3.0, "ba": -4.0}
    stated = {"tokenizer.ggml.model": "llama"}
    for change, message in (
        (
            {"ba": -3.0},
            r"scores = \['ab', 'ba'\]: must be another score for each piece, but 2 have that of another one",
        ),
        ({"<s>": 0.0}, r"tokens = 'tokens that are equal': must be each token once"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(stated, arrays(pieces | change))
    for more, message in (
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces = True: must be absent or false"),
        ({"tokenizer.ggml.bos_token_id": 999}, r"bos_token_id = 999: must be in \[0, 263\)"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model = 't5': must be one of 'gpt2', 'llama'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(stated | more, arrays(pieces))
    for name in (TOKENS, SCORES):
        with pytest.raises(ConfigError, match=f"{name} = "):
            load_tokenizer(stated, {key: value for key, value in arrays(pieces).items() if key != name})
    assert set(arrays(pieces)) < set(ARRAYS)


# The file


def test_nested_arrays_are_refused(tmp_path: Path) -> None:
    """However deep: reading them by recursion would end in an error of Python's."""
    key = b"tokenizer.ggml.tokens"
    nested = struct.pack("<IQ", 9, 1) * 20_000 + struct.pack("<IQ", 4, 0)
    field = struct.pack("<Q", len(key)) + key + struct.pack("<I", 9) + nested
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)
    with pytest.raises(ConfigError, match=r"cannot read .*m\.gguf: it has an array of arrays"):
        _ = open_checkpoint(tmp_path / "m.gguf").config
