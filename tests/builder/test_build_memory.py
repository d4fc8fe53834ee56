"""A build needs memory for its largest tensors, however large the model is: peaks of a process that builds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support.checkpoint_files import save_tensorrt_llm, write_gguf
from tests.support.random_models import save_random_model

# Six layers of 49 MiB, a shard each; gate_up, the largest fused tensor, takes 22 MiB.
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LAYERS = 6
MIB = 1 << 20
# What the process may grow by, beside a shard, over builds of tiny models: buffers of writing and hashing (4 threads
# of 4 MiB) and what the allocator keeps. The model exceeds a shard and this by more than 180 MiB.
ALLOWANCE = 64 * MIB
# Builds every checkpoint that it is given and prints its status and the peak until then. Not ru_maxrss, which begins
# with the peak of the process that started this one.
SCRIPT = """
import re, sys
from pathlib import Path
from kvseek.builder import build
output, tokenizer, *models = sys.argv[1:]
for model in models:
    flags = ["--method", "full", "--kernels", "reference", "--quiet", "--force", "--no-check", "--tokenizer", tokenizer]
    status = build.main(["--model", model, "--output_dir", output, *flags])
    print(status, int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


def checkpoints(folder: Path, **shape: Any) -> dict[str, Path]:
    """The same model in three kinds of checkpoint, the Hugging Face directory in shards of a layer."""
    model = save_random_model(folder / "hugging_face", "llama", num_hidden_layers=1, **shape)
    _repeat_layer(model)
    found = {
        "hugging_face": model,
        "gguf": write_gguf(folder / "model.gguf", model, "llama"),
        "tensorrt_llm": save_tensorrt_llm(folder / "tensorrt_llm", model, tp=2, pp=3),
    }
    _split_by_layer(model)
    return found


def _repeat_layer(model: Path) -> None:
    """Give a model of one layer more of the same, which is quicker than drawing them."""
    config, file = json.loads((model / "config.json").read_text()), model / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".layers.0." in name]:
        for layer in range(1, LAYERS):
            tensors[name.replace(".0.", f".{layer}.", 1)] = tensors[name].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))


def _split_by_layer(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    weight_map: dict[str, str] = {}
    for layer in range(-1, LAYERS):
        own = {name: tensor for name, tensor in tensors.items() if _layer(name) == layer}
        weight_map |= dict.fromkeys(own, f"model-{layer + 1}.safetensors")
        save_file(own, model / f"model-{layer + 1}.safetensors", metadata={"format": "pt"})
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _layer(name: str) -> int:
    return int(name.split(".")[2]) if ".layers." in name else -1


@pytest.mark.slow
def test_peaks_follow_the_largest_shard(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    tiny = checkpoints(tmp_path / "tiny")
    large = checkpoints(tmp_path, **SHAPE)
    shards = [path.stat().st_size for path in large["hugging_face"].glob("*.safetensors")]
    assert len(shards) == LAYERS + 1
    assert sum(shards) > max(shards) + ALLOWANCE + 180 * MIB, "holding the model would show"
    models = [large["hugging_face"], *tiny.values(), *large.values()]
    command = [sys.executable, "-c", SCRIPT, tmp_path / "engine", *models]
    # What the C library's allocator keeps varies from run to run by dozens of MiB. One arena instead of one a thread; and
    # a fixed threshold, above which freed memory goes back to the system: by default it rises to the size of what was
    # freed, so that whole tensors stay, by chance of the order.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    lines = result.stdout.split("\n")[:-1]
    status, peaks = zip(*(map(int, line.split()) for line in lines), strict=True)
    assert set(status) == {0}
    base = peaks[len(tiny) - 1]
    growth = {kind: (peak - base) // MIB for kind, peak in zip(large, peaks[len(tiny) :], strict=True)}
    print(f"largest shard {max(shards) // MIB} MiB, peaks until then, MiB above tiny builds: {growth}")
    assert all(size * MIB <= max(shards) + ALLOWANCE for size in growth.values()), growth
