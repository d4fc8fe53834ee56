"""Damaged checkpoints of every kind: each is refused with the file, the tensor and what was expected, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoint_files import (
    Tensors,
    edit_gguf,
    edit_json,
    edit_tensors,
    run_build,
    save_tensorrt_llm,
    write_gguf,
)
from tests.support.random_models import save_random_model

from kvseek.builder import build
from kvseek.core.manifest import verify
from kvseek.engine.model.weights import load_weights

Damage = Callable[[Path], None]
GENERATOR = np.random.default_rng(3)
INDEX = "model.safetensors.index.json"
QUERIES, KEYS = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
GATE, NORM = "model.layers.1.mlp.gate_proj.weight", "model.layers.2.input_layernorm.weight"
HEAD, ARCHITECTURE = "lm_head.weight", "general.architecture"
QKV = "transformer.layers.1.attention.qkv.weight"
# Each kind of checkpoint → a file of weights that is not its first, if it has several.
FILES = {
    "single": "model.safetensors",
    "sharded": "model-00002-of-",
    "gguf": "model.gguf",
    "tensorrt_llm": "rank1.safetensors",
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in every kind of checkpoint, and an engine of it."""
    folder = tmp_path_factory.mktemp("intact")
    model = save_random_model(folder / "single", "llama")
    found = {
        "single": model,
        "sharded": save_random_model(folder / "sharded", "llama", max_shard_size="500KB"),
        "gguf": write_gguf(folder / "model.gguf", model, "llama"),
        "tensorrt_llm": save_tensorrt_llm(folder / "tensorrt_llm", model, tp=2),
        "engine": folder / "engine",
    }
    for kind in FILES:  # what is refused below is refused for its damage
        assert run(found[kind], found["engine"], model, "--force") == 0
    return found


def run(model: Path, output_dir: Path, tokenizer: Path, *flags: str) -> int:
    return run_build(model, output_dir, "--tokenizer", str(tokenizer), *flags)


# Ways to damage a checkpoint, each a function of its path


def weight_file(checkpoint: Path, start: str) -> Path:
    """The file of weights whose name begins so; the checkpoint itself if it is a file."""
    return checkpoint if checkpoint.is_file() else next(checkpoint.glob(f"{start}*"))


def in_file(start: str, change: Callable[[Path], None]) -> Damage:
    """Alter the file of weights whose name begins so."""
    return lambda checkpoint: change(weight_file(checkpoint, start))


def shorten_to(size: int) -> Callable[[Path], None]:
    """Keep so many bytes of a file; a negative number leaves as many out."""
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def garbage(start: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_bytes(start + GENERATOR.bytes(5000))

    return change


def tensors(change: Callable[[Tensors], Any], file: str = "") -> Damage:
    """Alter tensors of a safetensors file: one of this name's beginning, else the only or the first one."""

    return lambda checkpoint: edit_tensors(weight_file(checkpoint, file or "*.safetensors"), change)


def gguf(change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]) -> Damage:
    return lambda checkpoint: edit_gguf(checkpoint, change)


def configure(change: Callable[[dict[str, Any]], Any], file: str = "config.json") -> Damage:
    return lambda checkpoint: edit_json(checkpoint / file, change)


def write(file: str, content: bytes) -> Damage:
    """Put a content in place of that of a file, "" for the checkpoint itself."""

    def damage(checkpoint: Path) -> None:
        (checkpoint / file).write_bytes(content)

    return damage


def without(name: str, file: str = "") -> Damage:
    return tensors(lambda found: found.pop(name), file)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor], file: str = "") -> Damage:
    return tensors(lambda found: found.update({name: change(found[name])}), file)


def gguf_changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    return gguf(lambda _, found: found.update({name: change(found[name])}))


def stated(**values: Any) -> Damage:
    """Set keys of config.json."""
    return configure(lambda found: found.update(values))


def gguf_without(name: str) -> Damage:
    return gguf(lambda _, found: found.pop(name))


def index(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return configure(change, INDEX)


def with_extra(file: str = "") -> Damage:
    return tensors(lambda found: found.update(lora=torch.ones(3)), file)


def as_fp8(found: Tensors) -> None:
    found.update({name: tensor.to(torch.float8_e4m3fn) for name, tensor in found.items()})


def shift_rows(found: Tensors) -> None:
    """Move a row from the queries to the keys: the fused weight has the right shape all the same."""
    found[KEYS] = torch.cat((found[QUERIES][-1:], found[KEYS]))
    found[QUERIES] = found[QUERIES][:-1]


def drop_from_shard(checkpoint: Path) -> None:
    """Take a tensor out of the shard that the index names for it."""
    without(GATE, json.loads((checkpoint / INDEX).read_text())["weight_map"][GATE])(checkpoint)


CUT = r"cannot read \S*{}\S*: .* again"
SHORT = r"{}\S*( = |: ).*; "
# A GGUF file of no tensors and one field, "a", an array of 2**20 bytes, or strings, of which the file has none.
LONG_ARRAY, LONG_STRINGS = (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, kind, 1 << 20) for kind in (0, 8))
FAR = struct.pack("<Q", 1 << 62)
BEYOND = r"cannot read \S*model\.gguf: byte {} is named in its header, the file has {}; .* again"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
TRT = "tensorrt_llm"
SINGLE, SHARD, RANK = (FILES[kind] for kind in ("single", "sharded", TRT))
NO_TENSOR = "tensor {} is missing in model.safetensors; "
OTHER_MODELS = "config.json and weights are of different models, or"
FLOATS = "must be one of F32, BF16, F16"
UP = "blk.1.ffn_up.weight"
EVERY: dict[str, list[tuple[str, Damage, str]]] = {
    "cut in the header": [(kind, in_file(file, shorten_to(40)), CUT.format(file)) for kind, file in FILES.items()],
    "cut in the data": [(kind, in_file(file, shorten_to(-1000)), CUT.format(file)) for kind, file in FILES.items()],
    "empty": [(kind, in_file(file, shorten_to(0)), SHORT.format(file)) for kind, file in FILES.items()],
    "garbage": [(kind, in_file(file, garbage(b"\x93")), SHORT.format(file)) for kind, file in FILES.items()],
    "forged": [
        ("gguf", write("", LONG_ARRAY), BEYOND.format("1,048,625", 49)),
        ("gguf", write("", LONG_STRINGS), BEYOND.format(57, 49)),
        ("gguf", write("", LONG_STRINGS + FAR), BEYOND.format("4,611,686,018,427,387,969", 57)),
        ("gguf", garbage(b"\x93"), r"must be b'GGUF'; pass a \.gguf file or a Hugging Face directory"),
        ("gguf", garbage(b"GGUF\x03\0\0\0"), r"cannot read \S*model\.gguf: .*damaged or cut short"),
        ("single", in_file(SINGLE, garbage(b"\x40\0\0\0\0\0\0\0{")), CUT.format(SINGLE)),
    ],
    "absent file": [
        ("single", in_file(SINGLE, garbage(POINTER)), "fetch the file with `git lfs pull`"),
        ("sharded", in_file(SHARD, garbage(POINTER)), "fetch the file with `git lfs pull`"),
        ("sharded", in_file(SHARD, Path.unlink), rf"model-00002-of-\S+ is missing, {INDEX} names it; .* again"),
        (TRT, in_file(RANK, Path.unlink), r"rank1\.safetensors is missing \(1 of the 2 ranks' files\)"),
        ("single", in_file(SINGLE, Path.unlink), rf"has neither {SINGLE} nor {INDEX}; save the model"),
    ],
    "listing": [
        ("sharded", drop_from_shard, rf"model-\d+-of-\S+: tensor {GATE} is missing, {INDEX} names it"),
        ("sharded", index(lambda it: it.pop("weight_map")), rf"{INDEX}: weight_map must be an object of tensor"),
        ("sharded", index(lambda it: it["weight_map"].clear()), rf"{INDEX}: weight_map is empty: must name every"),
        ("sharded", index(lambda it: it["weight_map"].update(x=[1])), rf"{INDEX}: weight_map must be an object"),
        ("sharded", write(INDEX, b"{"), rf"cannot read \S*{INDEX}: .* download .* again"),
    ],
    "missing tensor": [
        ("single", without(NORM), NO_TENSOR.format(NORM) + OTHER_MODELS),
        ("single", without(HEAD), NO_TENSOR.format(HEAD) + "tie_word_embeddings is false, .* true if the head"),
        (TRT, without(HEAD, "rank1"), f"{HEAD} is missing; share_embedding_table is false, .* the head"),
        (TRT, without(QKV, "rank1"), rf"rank1\.safetensors: tensor {QKV} is missing; copy"),
        ("gguf", gguf_without("blk.2.attn_norm.weight"), r"model\.gguf: tensor blk\.2\.attn_norm\.weight is missing"),
        ("gguf", gguf_without("token_embd.weight"), r"model\.gguf: tensor token_embd\.weight is missing"),
    ],
    "surplus tensor": [
        ("single", with_extra(), r"lora of model\.safetensors \(1 in all\) has no place"),
        ("sharded", with_extra(SHARD), r"lora of model-00002\S* \(1 in all\) has no place"),
        (
            "gguf",
            gguf(lambda _, it: it.update(lora=np.ones(3, np.float32))),
            r"gguf: tensor lora \(1 in all\) has no place in a",
        ),
        (TRT, with_extra("rank1"), r"lora of rank1\.safetensors \(1 in all\) has"),
    ],
    "shape": [
        ("single", changed(GATE, lambda it: it[:, :-1]), rf"{GATE}: shape \(160, 95\): must be \(160, 96\) by the"),
        ("single", tensors(shift_rows), rf"model\.safetensors: {QUERIES}: shape \(191, 96\): must be \(192, 96\)"),
        ("single", changed(NORM, lambda it: it[None]), rf"{NORM}: shape \(1, 96\): must be \(96,\)"),
        ("gguf", gguf_changed("blk.1.attn_q.weight", lambda it: it[:-1]), r"attn_q\.weight: shape \(191, 96\): must"),
        (
            "gguf",
            gguf_changed("output.weight", lambda it: it[:-1]),
            r"output\.weight: shape \(383, 96\): must be \(384",
        ),
        (TRT, changed(QKV, lambda it: it[:-1], "rank1"), rf"shape of {QKV} = \(159, 96\): must be \(160, 96"),
    ],
    "type": [
        ("single", changed(GATE, torch.Tensor.char), rf"dtype of {GATE} = I8: {FLOATS}; use the unquantised"),
        ("sharded", tensors(as_fp8, SHARD), rf"model-00002-of-\S+: dtype of \S+ = F8_E4M3: {FLOATS}; use the unq"),
        ("gguf", gguf_changed(UP, lambda it: it.astype(np.int8)), f"type of {UP} = I8: must be a floating-point"),
        (TRT, changed(QKV, torch.Tensor.char, "rank0"), rf"dtype of {QKV} = I8: {FLOATS}; convert the"),
        (TRT, changed(QKV, torch.Tensor.half, "rank1"), rf"{QKV} = torch\.float16: must be torch\.float32 as"),
    ],
    "configuration": [
        ("single", stated(architectures=["GPT2LMHeadModel"]), r"config\.json: architectures = 'GPT2LMHead"),
        ("single", configure(lambda it: it.pop("hidden_size")), r"config\.json: hidden_size is missing; add it"),
        ("single", stated(rms_norm_eps="small"), r"config\.json: model: rms_norm_eps = 'small': must be float"),
        ("single", write("config.json", b"{"), r"cannot read \S*config\.json: .* again"),
        ("single", write("config.json", b"[]"), r"config\.json = list: must be a JSON object"),
        (TRT, stated(architecture="GPTForCausalLM"), r"config\.json: architecture = 'GPTForC"),
        (TRT, configure(lambda it: it.pop("norm_epsilon")), r"config\.json: norm_epsilon is missing; convert"),
        (TRT, stated(num_attention_heads=5), r"config\.json: num_kv_heads = 2: must be a divisor"),
        (TRT, write("config.json", b"{"), r"cannot read \S*config\.json: .* again"),
        ("gguf", gguf(lambda it, _: it.update({ARCHITECTURE: "gpt2"})), "= 'gpt2': must be one of llama, qwen2, qwen3"),
        (
            "gguf",
            gguf(lambda it, _: it.pop("llama.block_count")),
            r"gguf: llama\.block_count is missing; use the model's",
        ),
    ],
}
CASES = [
    pytest.param(*case, id=f"{fault}, {case[0]} {number}")
    for fault, cases in EVERY.items()
    for number, case in enumerate(cases)
]


@pytest.mark.parametrize(("kind", "damage", "message"), CASES)
def test_refused(
    kind: str,
    damage: Damage,
    message: str,
    intact: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "atomic_directory", None)  # what would write anything
    source = intact[kind]
    model = tmp_path / source.name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, model)
    damage(model)
    output = tmp_path / "engines/engine"
    before = sorted(tmp_path.rglob("*"))
    assert run(model, output, intact["single"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left, the folder above the engine included"
    shutil.copytree(intact["engine"], output)
    assert run(model, output, intact["single"]) == 1
    assert [path.name for path in output.parent.iterdir()] == ["engine"]
    verify(output)


def test_float_types_mix(intact: dict[str, Path], tmp_path: Path) -> None:
    """Norms in float32 among bfloat16, as published checkpoints have them, and parts of a fused weight in three types."""
    model = Path(shutil.copytree(intact["single"], tmp_path / "model"))
    original = load_file(model / "model.safetensors")
    types = {QUERIES: torch.float32, KEYS: torch.float16}
    mixed = {
        name: tensor.to(torch.float32 if "norm" in name else types.get(name, torch.bfloat16))
        for name, tensor in original.items()
    }
    save_file(mixed, model / "model.safetensors", metadata={"format": "pt"})
    assert run(model, tmp_path / "engine", model) == 0
    weights = load_weights(tmp_path / "engine", torch.device("cpu"))
    values = mixed["model.layers.1.self_attn.v_proj.weight"]
    assert torch.equal(weights["layers.1.qkv.weight"], torch.cat([mixed[QUERIES], mixed[KEYS].float(), values.float()]))
    assert torch.equal(weights["layers.2.attention_norm.weight"], original[NORM])


def test_shards_say_what_they_hold(intact: dict[str, Path], tmp_path: Path) -> None:
    """An index that leaves out a tensor does not hide it."""
    model = Path(shutil.copytree(intact["sharded"], tmp_path / "model"))
    configure(lambda it: it["weight_map"].pop(NORM), INDEX)(model)
    assert run(model, tmp_path / "engine", model) == 0
    weights, expected = (
        load_weights(directory, torch.device("cpu"))["layers.2.attention_norm.weight"]
        for directory in (tmp_path / "engine", intact["engine"])
    )
    assert torch.equal(weights, expected)
