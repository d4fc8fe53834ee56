"""Hugging Face checkpoints of tests/support/random_models.py as GGUF files, with or without a tokenizer."""

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

    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
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
    if add is not None:
        add(writer)
    count = len(writer.tensors)
    finish(writer)
    return path if count == 1 else path.with_name(f"{path.stem}-00001-of-{count:05}.gguf")


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
