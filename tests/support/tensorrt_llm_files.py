"""Hugging Face checkpoints of tests/support/random_models.py as TensorRT-LLM checkpoints of several ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def save_tensorrt_llm(
    directory: Path, model: Path, *, tp: int = 1, pp: int = 1, embedding_axis: int | None = None, **config: Any
) -> Path:
    """Split a checkpoint over tp × pp ranks, tokenizer included; returns `directory`.

    Parameters
    ----------
    embedding_axis : int, optional
        Along which the embedding is shared by the ranks of a stage; None: each holds all of it.
    **config
        Fields of TensorRT-LLM's config.json to set.
    """
    directory.mkdir()
    for path in model.glob("*token*"):
        shutil.copy(path, directory)
    values, weights = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    if values["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # which conversions write out
    stages = torch.tensor_split(torch.arange(values["num_hidden_layers"]), pp)
    for rank in range(tp * pp):
        stage, part = divmod(rank, tp)
        tensors: Tensors = {}
        if stage == 0:
            embedding = weights["model.embed_tokens.weight"]
            shared = embedding if embedding_axis is None else split(embedding, tp, part, embedding_axis)
            tensors["transformer.vocab_embedding.weight"] = shared
        if stage == pp - 1:
            tensors["transformer.ln_f.weight"] = weights["model.norm.weight"]
            tensors["lm_head.weight"] = split(weights["lm_head.weight"], tp, part)
        for local, layer in enumerate(stages[stage].tolist()):
            prefix = f"model.layers.{layer}."
            own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            for name, value in split_layer(own, values["num_key_value_heads"], tp, part).items():
                tensors[f"transformer.layers.{local}.{name}"] = value
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, directory / f"rank{rank}.safetensors")
    document = translate(values, tp, pp, embedding_axis) | config
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def split(tensor: torch.Tensor, parts: int, part: int, axis: int = 0) -> torch.Tensor:
    """One of equal parts along an axis, after padding with zeros to a multiple of their number."""
    padding = -tensor.shape[axis] % parts
    zeros = tensor.new_zeros([padding if number == axis else size for number, size in enumerate(tensor.shape)])
    return torch.cat((tensor, zeros), dim=axis).chunk(parts, dim=axis)[part]


def split_layer(layer: Tensors, kv_heads: int, tp: int, part: int) -> Tensors:
    """A layer's tensors of one rank, under TensorRT-LLM's names below the layer."""
    tensors = {
        "input_layernorm.weight": layer["input_layernorm.weight"],
        "post_layernorm.weight": layer["post_attention_layernorm.weight"],
        "attention.dense.weight": split(layer["self_attn.o_proj.weight"], tp, part, 1),
        "mlp.fc.weight": split(layer["mlp.gate_proj.weight"], tp, part),
        "mlp.gate.weight": split(layer["mlp.up_proj.weight"], tp, part),
        "mlp.proj.weight": split(layer["mlp.down_proj.weight"], tp, part, 1),
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in layer:
            queries, *others = (layer[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
            rows = [split(queries, tp, part)]
            for tensor in others:  # with fewer heads than ranks, each head is repeated for neighbouring ranks
                heads = tensor.unflatten(0, (kv_heads, -1)).repeat_interleave(max(1, tp // kv_heads), dim=0)
                rows.append(split(heads, tp, part).flatten(0, 1))
            tensors[f"attention.qkv.{kind}"] = torch.cat(rows)
    if "self_attn.o_proj.bias" in layer:
        tensors["attention.dense.bias"] = layer["self_attn.o_proj.bias"]
    for x in "qk":
        if f"self_attn.{x}_norm.weight" in layer:
            tensors[f"attention.{x}_layernorm.weight"] = layer[f"self_attn.{x}_norm.weight"]
    return tensors


def translate(values: dict[str, Any], tp: int, pp: int, embedding_axis: int | None) -> dict[str, Any]:
    """TensorRT-LLM's config.json from a Hugging Face one."""
    heads, architecture = values["num_attention_heads"], values["architectures"][0]
    scaling = {key: value for key, value in values["rope_parameters"].items() if key != "rope_theta"}
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "hidden_act",
        "tie_word_embeddings",
    )
    qwen = {"qwen_type": values["model_type"]} if values["model_type"].startswith("qwen") else {}
    return {
        "architecture": architecture,
        "dtype": "float32",
        "logits_dtype": "float32",
        **{name: values[name] for name in same},
        "norm_epsilon": values["rms_norm_eps"],
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": values["rope_parameters"]["rope_theta"],
        "rotary_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "head_size": values.get("head_dim", values["hidden_size"] // heads),
        "attn_bias": values.get("attention_bias", False) or values["model_type"] == "qwen2",
        "mlp_bias": False,
        "moe": {"num_experts": 0, "top_k": 0},
        "use_parallel_embedding": embedding_axis is not None,
        "embedding_sharding_dim": embedding_axis or 0,
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp, "cp_size": 1, "gpus_per_node": 8},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128},
        **qwen,
    }
