"""Damaged checkpoints of every kind: each is refused with the file, the tensor and what was expected, and leaves nothing."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.builder.checkpoints.damage import (
    Damage,
    Tensors,
    configure,
    garbage,
    gguf,
    in_file,
    shorten_to,
    tensors,
    write,
)
from tests.support.builds import run_build
from tests.support.gguf_files import write_gguf
from tests.support.random_models import save_random_model
from tests.support.tensorrt_llm_files import save_tensorrt_llm

from kvseek.builder import build
from kvseek.core.manifest import verify
from kvseek.engine.model.weights import load_weights

INDEX = "model.safetensors.index.json"
QUERIES, KEYS = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
GATE, NORM = "model.layers.1.mlp.gate_proj.weight", "model.layers.2.input_layernorm.weight"
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


def shift_rows(found: Tensors) -> None:
    """Move a row from the queries to the keys: the fused weight has the right shape all the same."""
    found[KEYS] = torch.cat((found[QUERIES][-1:], found[KEYS]))
    found[QUERIES] = found[QUERIES][:-1]


def drop_from_shard(checkpoint: Path) -> None:
    """Take a tensor out of the shard that the index names for it."""
    file = json.loads((checkpoint / INDEX).read_text())["weight_map"][GATE]
    tensors(lambda found: found.pop(GATE), file)(checkpoint)


CUT_HEADER = [
    (kind, in_file(FILES[kind], shorten_to(40)), rf"cannot read \S*{FILES[kind]}\S*: .* again") for kind in FILES
]
CUT_DATA = [
    (kind, in_file(FILES[kind], shorten_to(-1000)), rf"cannot read \S*{FILES[kind]}\S*: .* again") for kind in FILES
]
EMPTY = [(kind, in_file(FILES[kind], shorten_to(0)), rf"{FILES[kind]}\S*( = |: ).*; ") for kind in FILES]
GARBAGE = [(kind, in_file(FILES[kind], garbage(b"\x93")), rf"{FILES[kind]}\S*( = |: ).*; ") for kind in FILES]
# A GGUF file of no tensors and one field, "a", an array of 2**20 bytes, or strings, of which the file has none.
LONG_ARRAY, LONG_STRINGS = (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, kind, 1 << 20) for kind in (0, 8))
FORGED = [
    (
        "gguf",
        write("", LONG_ARRAY),
        r"cannot read \S*model\.gguf: byte 1,048,625 is named in its header, the file has 49; .* again",
    ),
    (
        "gguf",
        write("", LONG_STRINGS),
        r"cannot read \S*model\.gguf: byte 57 is named in its header, the file has 49; .* again",
    ),
    (
        "gguf",
        write("", LONG_STRINGS + struct.pack("<Q", 1 << 62)),
        r"cannot read \S*model\.gguf: byte 4,611,686,018,427,387,969 is named in its header, the file has 57; .* again",
    ),
    ("gguf", garbage(b"\x93"), r"must be b'GGUF'; pass a \.gguf file or a Hugging Face directory"),
    ("gguf", garbage(b"GGUF\x03\0\0\0"), r"cannot read \S*model\.gguf: .*damaged or cut short"),
    (
        "single",
        in_file(FILES["single"], garbage(b"\x40\0\0\0\0\0\0\0{")),
        r"cannot read \S*model\.safetensors: .* again",
    ),
]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
ABSENT = [
    *(
        (kind, in_file(FILES[kind], garbage(POINTER)), "fetch the file with `git lfs pull`")
        for kind in ("single", "sharded")
    ),
    (
        "sharded",
        in_file(FILES["sharded"], Path.unlink),
        rf"model-00002-of-\d+\.safetensors is missing, {INDEX} names it; .* again",
    ),
    (
        "tensorrt_llm",
        in_file(FILES["tensorrt_llm"], Path.unlink),
        r"rank1\.safetensors is missing \(1 of the 2 ranks' files\)",
    ),
    (
        "single",
        in_file(FILES["single"], Path.unlink),
        rf"single has neither model\.safetensors nor {INDEX}; save the model",
    ),
]
LISTING = [
    ("sharded", drop_from_shard, rf"model-\d+-of-\d+\.safetensors: tensor {GATE} is missing, {INDEX} names it"),
    ("sharded", configure(lambda it: it.pop("weight_map"), INDEX), rf"{INDEX}: weight_map must be an object of tensor"),
    (
        "sharded",
        configure(lambda it: it["weight_map"].clear(), INDEX),
        rf"{INDEX}: weight_map is empty: must name every",
    ),
    ("sharded", configure(lambda it: it["weight_map"].update(x=[1]), INDEX), rf"{INDEX}: weight_map must be an object"),
    ("sharded", write(INDEX, b"{"), rf"cannot read \S*{INDEX}: .* download .* again"),
]
MISSING = [
    (
        "single",
        tensors(lambda it: it.pop(NORM)),
        rf"single: tensor {NORM} is missing in model\.safetensors; config.json and weights are of different models, or",
    ),
    (
        "single",
        tensors(lambda it: it.pop("lm_head.weight")),
        r"tensor lm_head\.weight is missing in model\.safetensors; tie_word_embeddings is false, .* set it to true if the head",
    ),
    (
        "tensorrt_llm",
        tensors(lambda it: it.pop("lm_head.weight"), "rank1"),
        r"tensor lm_head\.weight is missing; share_embedding_table is false, .* set it to true if the head is the embedding",
    ),
    (
        "gguf",
        gguf(lambda _, it: it.pop("blk.2.attn_norm.weight")),
        r"model\.gguf: tensor blk\.2\.attn_norm\.weight is miss",
    ),
    ("gguf", gguf(lambda _, it: it.pop("token_embd.weight")), r"model\.gguf: tensor token_embd\.weight is missing"),
    ("tensorrt_llm", tensors(lambda it: it.pop(QKV), "rank1"), rf"rank1\.safetensors: tensor {QKV} is missing; copy"),
]
EXTRA = torch.ones(3)
SURPLUS = [
    (
        "single",
        tensors(lambda it: it.update(lora=EXTRA)),
        r"tensor lora of model\.safetensors \(1 in all\) has no place in a",
    ),
    (
        "sharded",
        tensors(lambda it: it.update(lora=EXTRA), "model-00002"),
        r"tensor lora of model-00002\S* \(1 in all\) has no",
    ),
    (
        "gguf",
        gguf(lambda _, it: it.update(lora=EXTRA.numpy())),
        r"model\.gguf: tensor lora \(1 in all\) has no place in a llama",
    ),
    (
        "tensorrt_llm",
        tensors(lambda it: it.update(lora=EXTRA), "rank1"),
        r"tensor lora of rank1\.safetensors \(1 in all\) has",
    ),
]
SHAPES = [
    (
        "single",
        tensors(lambda it: it.update({GATE: it[GATE][:, :-1]})),
        rf"model\.safetensors: {GATE}: shape \(160, 95\): must be \(160, 96\) by the model's configuration",
    ),
    ("single", tensors(shift_rows), rf"model\.safetensors: {QUERIES}: shape \(191, 96\): must be \(192, 96\)"),
    ("single", tensors(lambda it: it.update({NORM: it[NORM][None]})), rf"{NORM}: shape \(1, 96\): must be \(96,\)"),
    (
        "gguf",
        gguf(lambda _, it: it.update({"blk.1.attn_q.weight": it["blk.1.attn_q.weight"][:-1]})),
        r"model\.gguf: blk\.1\.attn_q\.weight: shape \(191, 96\): must be \(192, 96\)",
    ),
    (
        "gguf",
        gguf(lambda _, it: it.update({"output.weight": it["output.weight"][:-1]})),
        r"model\.gguf: output\.weight: shape \(383, 96\): must be \(384, 96\)",
    ),
    (
        "tensorrt_llm",
        tensors(lambda it: it.update({QKV: it[QKV][:-1]}), "rank1"),
        rf"rank1\.safetensors: shape of {QKV} = \(159, 96\): must be \(160, 96\) by config\.json",
    ),
]
FLOATS = "must be one of F32, BF16, F16"
TYPES = [
    (
        "single",
        tensors(lambda it: it.update({GATE: it[GATE].to(torch.int8)})),
        rf"dtype of {GATE} = I8: {FLOATS}; use the unq",
    ),
    (
        "sharded",
        tensors(lambda it: it.update({name: it[name].to(torch.float8_e4m3fn) for name in it}), "model-00002"),
        rf"model-00002-of-\d+\.safetensors: dtype of \S+ = F8_E4M3: {FLOATS}; use the unquantised checkpoint",
    ),
    (
        "gguf",
        gguf(lambda _, it: it.update({"blk.1.ffn_up.weight": it["blk.1.ffn_up.weight"].astype(np.int8)})),
        r"model\.gguf: type of blk\.1\.ffn_up\.weight = I8: must be a floating-point or quantised type",
    ),
    (
        "tensorrt_llm",
        tensors(lambda it: it.update({QKV: it[QKV].to(torch.int8)}), "rank0"),
        rf"rank0\.safetensors: dtype of {QKV} = I8: {FLOATS}; convert the model without",
    ),
    (
        "tensorrt_llm",
        tensors(lambda it: it.update({QKV: it[QKV].half()}), "rank1"),
        rf"rank1\.safetensors: dtype of {QKV} = torch\.float16: must be torch\.float32 as in the first rank's",
    ),
]
CONFIG = r"config\.json: "
CONFIGURATIONS = [
    (
        "single",
        configure(lambda it: it.update(architectures=["GPT2LMHeadModel"])),
        CONFIG + "architectures = 'GPT2LMHead",
    ),
    (
        "tensorrt_llm",
        configure(lambda it: it.update(architecture="GPTForCausalLM")),
        CONFIG + "architecture = 'GPTForC",
    ),
    (
        "gguf",
        gguf(lambda it, _: it.update({"general.architecture": "gpt2"})),
        r"model\.gguf: general\.architecture = 'gpt2': must be one of llama, qwen2, qwen3",
    ),
    ("single", configure(lambda it: it.pop("hidden_size")), CONFIG + "hidden_size is missing; add it"),
    (
        "single",
        configure(lambda it: it.update(rms_norm_eps="small")),
        CONFIG + "model: rms_norm_eps = 'small': must be float",
    ),
    ("tensorrt_llm", configure(lambda it: it.pop("norm_epsilon")), CONFIG + "norm_epsilon is missing; convert"),
    (
        "tensorrt_llm",
        configure(lambda it: it.update(num_attention_heads=5)),
        CONFIG + "num_kv_heads = 2: must be a divisor",
    ),
    (
        "gguf",
        gguf(lambda it, _: it.pop("llama.block_count")),
        r"model\.gguf: llama\.block_count is missing; use the model's",
    ),
    ("single", write("config.json", b"{"), r"cannot read \S*config\.json: .* again"),
    ("tensorrt_llm", write("config.json", b"{"), r"cannot read \S*config\.json: .* again"),
    ("single", write("config.json", b"[]"), r"config\.json = list: must be a JSON object"),
]
EVERY = {
    "cut in the header": CUT_HEADER,
    "cut in the data": CUT_DATA,
    "empty": EMPTY,
    "garbage": GARBAGE,
    "forged": FORGED,
    "absent file": ABSENT,
    "listing": LISTING,
    "missing tensor": MISSING,
    "surplus tensor": SURPLUS,
    "shape": SHAPES,
    "type": TYPES,
    "configuration": CONFIGURATIONS,
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
