"""Hugging Face checkpoints of tests/support/random_models.py as GGUF files, without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

Encode = Callable[[torch.Tensor], tuple[np.ndarray, Any]]


def write_gguf(
    path: Path,
    model: Path,
    architecture: str,
    rope_factors: torch.Tensor | None = None,
    encode: Encode | None = None,
    tokens: list[str] | None = None,
) -> Path:
    """Convert a checkpoint; returns `path`.

    Parameters
    ----------
    rope_factors : torch.Tensor, optional
        Divisors of the RoPE frequencies, [head_dim / 2].
    encode : callable, optional
        Gives a matrix's blocks as bytes [rows, bytes of a row] and their GGMLQuantizationType; without it all is float32.
    tokens : list of str, optional
        The vocabulary, from which transformers takes its size.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    _add_metadata(writer, config, head_dim)
    if tokens is not None:
        writer.add_token_list(tokens)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = interleave(tensor, head_dim)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if encode is None or tensor.dim() == 1:
            writer.add_tensor(theirs, tensor.numpy())
        else:
            blocks, kind = encode(tensor)
            writer.add_tensor(theirs, blocks, raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    finish(writer)
    return path


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
    writer.add_eos_token_id(1)


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
