"""Checkpoints of all kinds on disk, their tokenizers, and changes of their files; and an engine of them."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kvseek.builder import build
from kvseek.core.config import WEIGHT_GROUP
from kvseek.core.weight_only import HEAD, INT4, INT8_GROUPS, dequantise, quantise

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": [7, 8],
}
LLAMA3 = {  # RoPE's scaling, but for its name
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def run_build(model: Path, output_dir: Path, *flags: str) -> int:
    """Build with PyTorch's kernels, method full and no words, unless the flags say otherwise; returns the exit status."""
    arguments = ["--model", str(model), "--output_dir", str(output_dir), "--quiet"]
    arguments += ["--method", "full"] * ("--method" not in flags)
    arguments += ["--kernels", "reference"] * ("--kernels" not in flags and "cuda" not in flags)
    return build.main([*arguments, *flags])


Tensors = dict[str, torch.Tensor]


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any] | None = None, **values: Any) -> Path:
    """Let `change` alter the object in a JSON file, set further keys of it, and return its folder."""
    document = json.loads(path.read_text()) if path.exists() else {}
    if change is not None:
        change(document)
    path.write_text(json.dumps(document | values))
    return path.parent


def edit_tensors(path: Path, change: Callable[[Tensors], Any]) -> None:
    """Let `change` alter the tensors of a safetensors file, by their names."""
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


Encode = Callable[[torch.Tensor], tuple[np.ndarray, Any]]


def write_gguf(
    path: Path,
    model: Path,
    architecture: str,
    rope_factors: torch.Tensor | None = None,
    encode: Encode | None = None,
    tokens: list[str] | None = None,
    add: Callable[[Any], None] | None = None,
    part_tensors: int = 0,
) -> Path:
    """Convert a checkpoint; returns `path`, or that of the first part.

    Parameters
    ----------
    rope_factors : torch.Tensor, optional
        Divisors of the RoPE frequencies, [head_dim / 2].
    encode : callable, optional
        Gives a matrix's blocks as bytes [rows, bytes of a row] and their GGMLQuantizationType; without it all is float32.
    tokens : list of str, optional
        The vocabulary, from which transformers takes its size.
    add : callable, optional
        Adds further metadata, such as a tokenizer, to the GGUFWriter that it is given.
    part_tensors : int
        Tensors of a part, of which there are then several; 0: one file.
    """
    import gguf

    architecture = architecture.replace("_", "")
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    _add_metadata(writer, config, head_dim)
    if tokens is not None:
        writer.add_token_list(tokens)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"])
    for name, tensor in joined_experts(load_file(model / "model.safetensors")).items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = interleave(tensor, head_dim)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if encode is None or tensor.dim() == 1 or "ffn_gate_inp" in theirs:  # routers have no blocks
            writer.add_tensor(theirs, tensor.squeeze().numpy())
        else:
            blocks, kind = encode(tensor.flatten(0, -2))
            writer.add_tensor(theirs, blocks.reshape(*tensor.shape[:-1], -1), raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    if add is not None:
        add(writer)
    count = len(writer.tensors)
    finish(writer)
    return path if count == 1 else path.with_name(f"{path.stem}-00001-of-{count:05}.gguf")


def joined_experts(tensors: Tensors) -> Tensors:
    """Put the matrices of a layer's experts into one tensor each, [experts, rows, columns], as GGUF files have them."""
    joined: dict[str, Any] = {}
    for name, tensor in sorted(tensors.items()):
        found = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
        if found is None:
            joined[name] = tensor
        else:
            joined.setdefault(found[1] + found[3], {})[int(found[2])] = tensor
    return {
        name: torch.stack([parts[number] for number in range(len(parts))]) if isinstance(parts, dict) else parts
        for name, parts in joined.items()
    }


def add_tokenizer(writer: Any, backend: Any, model: str, split: str | None = None, **ids: int) -> None:
    """Write a tokenizer of the library tokenizers as llama.cpp's convert_hf_to_gguf.py does.

    Parameters
    ----------
    model, split : str
        `tokenizer.ggml.model`, gpt2 or llama, and `tokenizer.ggml.pre`.
    **ids
        Special tokens, such as eos=1.
    """
    import gguf

    stated, added = json.loads(backend.to_str())["model"], backend.get_added_tokens_decoder()
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for number, token in enumerate(tokens):
        if model == "llama" and token.startswith("<0x"):
            kinds[number] = gguf.TokenType.BYTE
        if number in added:
            kinds[number] = gguf.TokenType.CONTROL if added[number].special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if split is not None:
        writer.add_tokenizer_pre(split)
    if model == "gpt2":
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in stated["merges"]])
    else:
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
    for name, number in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)


def finish(writer: Any) -> None:
    """Write what a GGUFWriter was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: Any, config: dict[str, Any], head_dim: int) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_eos_token_id(config["eos_token_id"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts", config.get("num_local_experts")))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def interleave(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Row i of a head's first half becomes row 2i, row i of its second half 2i + 1: GGUF's order for llama."""
    order = torch.stack((torch.arange(head_dim // 2), torch.arange(head_dim // 2, head_dim)), dim=1).flatten()
    return tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1).contiguous()


def edit_gguf(
    path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any], kinds: dict[str, Any] | None = None
) -> None:
    """Let `change` alter a file's metadata and its tensors, both by name, and write the file again.

    Metadata are numbers and texts; tensors are of types that NumPy has too. `kinds` are the GGUFValueTypes of keys that are new
    or change their type.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    types = {key: field.types[0] for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    metadata = {key: reader.fields[key].contents() for key in types}
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(metadata, tensors)
    types |= kinds or {}
    writer = gguf.GGUFWriter(path.with_suffix(".new"), metadata.pop("general.architecture"))
    for key, value in metadata.items():
        writer.add_key_value(key, value, types[key])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    path.with_suffix(".new").replace(path)


def install_quick_gguf(unchanged: Path) -> None:
    """Change the package gguf in this process; the header of `unchanged`, a file that no test writes, is read once.

    Without the package nothing is changed: tests of kernels run where it is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        return
    reader: Any = gguf.GGUFReader
    original = reader.__init__
    headers: dict[str, dict[str, Any]] = {}  # attributes of a reader; the one file or none

    def init(self: Any, path: Any, mode: str = "r") -> None:
        shared = type(self) is reader and mode == "r" and Path(path) == unchanged
        if not shared:
            original(self, path, mode)
            return
        if not headers:
            original(self, path, mode)
            headers["attributes"] = vars(self).copy()
        vars(self).update(headers["attributes"])

    reader.data = property(lambda self: self._bytes, lambda self, mapped: setattr(self, "_bytes", np.asarray(mapped)))
    reader.__init__ = init
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


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


PROJECTIONS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def save_dequantised(
    model: Path,
    directory: Path,
    precision: str,
    dtype: torch.dtype = torch.float32,
    *,
    weight_group: int = WEIGHT_GROUP,
    quantize_lm_head: bool = False,
) -> Path:
    """Copy a float32 checkpoint with the products of its layers, and maybe of its head, quantised and dequantised to `dtype`.

    Every row has its own scales, so it makes no difference that the builder quantises fused matrices. A tied head that is
    quantised becomes a matrix of its own, because the embedding is not.
    """
    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    if quantize_lm_head:
        weights.setdefault(HEAD, weights["model.embed_tokens.weight"])
        configuration = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(configuration | {"tie_word_embeddings": False}))
    for name, weight in weights.items():
        if name.endswith(PROJECTIONS) or (name == HEAD and quantize_lm_head):
            own = INT8_GROUPS if precision == INT4 and name == HEAD else precision
            weights[name] = dequantise(*quantise(weight, own, weight_group, torch.ones(1)), dtype).float()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
