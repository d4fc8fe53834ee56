"""Looks into plans of TensorRT for RTX as files: weights as they were given, and code for a just-in-time compiler as text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.weights import list_weights, weight_reader
from kvseek.core.config import EngineConfig, ModelConfig
from kvseek.engine.tensorrt.plan_files import PLANS_FILE


def read_index(directory: Path) -> dict[str, Any]:
    """What rank0.plans.json says."""
    index: dict[str, Any] = json.loads((directory / PLANS_FILE).read_text())
    return index


def read_files(directory: Path) -> list[bytes]:
    """The plans of a directory, in order."""
    return [(directory / segment["file"]).read_bytes() for segment in read_index(directory)["segments"]]


def check_weights(plans: list[bytes], checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Fail unless every matrix lies, bit for bit, in the segments that use it and in none beside them.

    Copies farther away would show in the size of the plans; searching all plans for all matrices takes minutes.
    """
    read, tied = weight_reader(checkpoint, dtype), checkpoint.config.tie_word_embeddings
    for weight in list_weights(checkpoint.config):
        rearranged = "gate_up" in weight.name and dtype != torch.float32  # TensorRT stores it in an order of its own
        if len(weight.shape) == 2 and not rearranged:
            values = read(weight.name)
            expected = home(weight.name, len(plans), tied)
            near = {number + step for number in expected for step in (-1, 0, 1)} & set(range(len(plans)))
            assert {number for number in near if holds(plans[number], values)} == expected, weight.name


def holds(plan: bytes, weight: torch.Tensor) -> bool:
    """Whether a plan has a weight's values, bit for bit and in order: it keeps matrices as they were given."""
    return weight.contiguous().view(torch.uint8).numpy().tobytes() in plan


def home(name: str, segments: int, tied: bool) -> set[int]:
    """Segments that use a matrix: `qkv` comes before a layer's attention, what follows it is in the next segment."""
    if name == "embed.weight":
        return {0, segments - 1} if tied else {0}
    if name == "lm_head.weight":
        return {segments - 1}
    _, layer, part, _ = name.split(".")
    return {int(layer) + (part != "qkv")}


def check_products(plans: list[bytes], model: ModelConfig) -> None:
    """Fail unless every segment has the matrix products of its layers, and no other layer's."""
    found = [products(plan) for plan in plans]
    expected: list[set[bytes]] = [set() for _ in plans]
    for layer in range(model.num_layers):
        expected[layer].add(f"layers.{layer}.qkv".encode())
        expected[layer + 1] |= {f"layers.{layer}.{part}".encode() for part in ("o", "gate_up", "down")}
    expected[-1].add(b"lm_head")
    assert found == expected


def products(plan: bytes) -> set[bytes]:
    """Names of a plan's matrix products.

    In 16 bits gate_up and what follows it are one operation, of a name of TensorRT's own; its result keeps the layer's.
    """
    names = set(re.findall(rb'fully_connected={ name="([^"]*)"', plan))
    own = {name for name in names if name.startswith(b"__mye")}
    results = set(re.findall(rb"slice\((layers\.\d+\.gate_up)_output\)", plan))
    assert len(own) in (0, len(results)), own
    return names - own | results


def check_profile(plans: list[bytes], index: dict[str, Any]) -> None:
    """Fail unless every plan has the names and the largest sizes that the index states, and computes without TF32."""
    tokens, rows = (index["limits"][name]["maximum"] for name in ("tokens", "rows"))
    for number, (plan, segment) in enumerate(zip(plans, index["segments"], strict=True)):
        assert f"segment_{number}".encode() in plan
        assert all(name.encode() in plan for name in (*segment["inputs"], *segment["outputs"]))
        assert b"tf32=1" not in plan
        assert f"is out of bounds [1, {tokens}]".encode() in plan
    assert f"is out of bounds [1, {rows}]".encode() in plans[-1]


def expected_segments(config: EngineConfig) -> list[dict[str, Any]]:
    """What the index must say of the segments of an engine."""
    model = config.model
    kind = {"float32": "FLOAT", "bfloat16": "BF16", "float16": "HALF"}[config.dtype]

    def tensor(*shape: int, dtype: str = kind) -> dict[str, Any]:
        return {"dtype": dtype, "shape": [-1, *shape]}

    heads, rows = tensor(model.num_heads, model.head_dim), tensor(model.num_kv_heads, model.head_dim)
    hidden, ids = tensor(model.hidden_size), tensor(dtype="INT32")
    rotation = dict.fromkeys(("cos", "sin"), tensor(1, model.head_dim // 2))
    made = {"queries": heads, "keys": rows, "values": rows, "next_hidden": hidden}
    taken = {"attended": heads, "hidden": hidden}
    first = {"inputs": {"ids": ids, "positions": ids}, "outputs": made | rotation}
    middle = {"inputs": taken | rotation, "outputs": made}
    logits = {"logits": tensor(model.vocab_size, dtype="FLOAT")}
    last = {"inputs": taken | {"rows": ids}, "outputs": logits}
    parts = [first, *[middle] * (model.num_layers - 1), last]
    names = [f"rank0/segment-{number:05}-of-{len(parts):05}.plan" for number in range(len(parts))]
    return [{"file": name, **part} for name, part in zip(names, parts, strict=True)]
