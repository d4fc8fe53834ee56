"""GGUF files: metadata, dequantised tensors under their Hugging Face names, tokenizer.

Tensors are read one at a time, so a quantised file never needs its unquantised size in memory.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.engine.config import ModelConfig, require
from kvseek.engine.errors import ConfigError

from .checkpoint import Checkpoint
from .gguf_tokenizer import load_tokenizer
from .model_config import model_config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the RoPE frequencies, which Llama 3.1 files carry
REMEDY = "use the model's Hugging Face directory"

# Hugging Face field → GGUF key below the architecture's name
FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
}
# RopeScaling field → GGUF key below "<architecture>.rope.scaling"
SCALING_FIELDS = {
    "rope_type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
# Llama 3.1's own scaling (model card); a file states only its result, so it is recognised by that.
LLAMA3_SCALING = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


class GgufCheckpoint(Checkpoint):
    """A model in one GGUF file of architecture llama, qwen2 or qwen3, quantised or not."""

    @cached_property
    def config(self) -> ModelConfig:
        """Shape of the model, from the file's metadata and from which tensors it holds."""
        values = {name: self._value(key) for name, key in FIELDS.items()}
        embedding = self._tensors.get("token_embd.weight")
        values |= {
            "architectures": [ARCHITECTURES[self.architecture]],
            "vocab_size": None if embedding is None else int(embedding.shape[1]),
            "attention_bias": self.architecture != "qwen2" and "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "pad_token_id": self._metadata.get("tokenizer.ggml.padding_token_id"),
            "rope_scaling": self._rope_scaling(),
        }
        self._refuse_unsupported()
        ends = (self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        config = model_config(values, [end for end in ends if end is not None])
        return self._with_rope_factors(config, values)

    @property
    def files(self) -> list[Path]:
        """The GGUF file."""
        return [self.path]

    def unused(self, names: set[str]) -> set[str]:
        """GGUF names of tensors that `names` leave out; the RoPE factors are part of the configuration."""
        return set(self._tensors) - {self._gguf_name(name) for name in names} - {ROPE_FACTORS}

    def tensor(self, name: str) -> Tensor:
        """Dequantise one tensor to float32; raises ConfigError if it is absent or of an unsupported quantisation."""
        from gguf import dequantize

        found = self._tensors.get(self._gguf_name(name))
        if found is None:
            raise ConfigError(f"{self.path}: tensor {self._gguf_name(name)} is missing; download the file again")
        try:
            values = dequantize(found.data, found.tensor_type)
        except NotImplementedError:
            kind = found.tensor_type.name
            raise ConfigError(f"{self.path}: gguf cannot read {found.name}, quantised as {kind}; {REMEDY}") from None
        tensor = torch.tensor(values, dtype=torch.float32)
        if self.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            return split_halves(tensor, self.config.head_dim)
        return tensor

    def _own_tokenizer(self) -> Any:
        return load_tokenizer(self.path, self._metadata)

    @cached_property
    def architecture(self) -> str:
        """The value of general.architecture; raises ConfigError if the decoder cannot run it."""
        found, limit = self._metadata.get("general.architecture"), f"one of {', '.join(ARCHITECTURES)}"
        remedy = "convert the model or choose another"
        require(found in ARCHITECTURES, "general.architecture", found, limit, remedy)
        return str(found)

    @property
    def _metadata(self) -> dict[str, Any]:
        return self._contents[0]

    @property
    def _tensors(self) -> dict[str, Any]:
        return self._contents[1]

    @cached_property
    def _contents(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return _read(self.path)

    def _value(self, key: str) -> Any:
        return self._metadata.get(f"{self.architecture}.{key}")

    @cached_property
    def _names(self) -> Any:
        from gguf import MODEL_ARCH, get_tensor_name_map

        return get_tensor_name_map(MODEL_ARCH[self.architecture.upper()], self.config.num_layers)

    def _gguf_name(self, name: str) -> str:
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ConfigError(f"tensor {name} has no place in a {self.architecture} GGUF file; {REMEDY}")
        return str(found)

    def _refuse_unsupported(self) -> None:
        rotated, head_dim = self._value("rope.dimension_count"), self._value("attention.key_length")
        if head_dim is None:
            head_dim = (self._value("embedding_length") or 0) // (self._value("attention.head_count") or 1)
        limit = f"the head size {head_dim}"
        require(rotated in (None, head_dim), f"{self.architecture}.rope.dimension_count", rotated, limit, REMEDY)
        window, context = self._value("attention.sliding_window"), self._value("context_length")
        name = f"{self.architecture}.attention.sliding_window"
        require(not window or window >= context, name, window, f"absent or >= {context}", "use another checkpoint")

    def _rope_scaling(self) -> dict[str, Any] | None:
        prefix = f"{self.architecture}.rope.scaling."
        stated = {key.removeprefix(prefix): value for key, value in self._metadata.items() if key.startswith(prefix)}
        stated.pop("finetuned", None)  # says how the model came to be, changes nothing
        unknown = sorted(set(stated) - set(SCALING_FIELDS.values()))
        require(not unknown, prefix.rstrip("."), unknown, f"among {', '.join(SCALING_FIELDS.values())}", REMEDY)
        if stated.get("type", "none") == "none":
            return None
        return {name: stated[key] for name, key in SCALING_FIELDS.items() if key in stated}

    def _with_rope_factors(self, config: ModelConfig, values: dict[str, Any]) -> ModelConfig:
        """Recognise Llama 3.1's RoPE scaling by the frequency divisors in the file."""
        if ROPE_FACTORS not in self._tensors:
            return config
        from kvseek.engine.rope import frequencies

        factors = torch.tensor(self._tensors[ROPE_FACTORS].data, dtype=torch.float32)
        scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3_SCALING}
        scaled = model_config({**values, "rope_scaling": scaling}, config.eos_token_ids)
        expected = frequencies(config)[0] / frequencies(scaled)[0]
        same = factors.shape == expected.shape and torch.allclose(factors, expected, rtol=1e-3)
        known = same and config.rope_scaling is None
        require(known, ROPE_FACTORS, factors.tolist(), "those of Llama 3.1's scaling", REMEDY)
        return scaled


def split_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of a llama query or key projection from GGUF's RoPE to Hugging Face's.

    GGUF rotates neighbouring channels (2i, 2i + 1) of a head, Hugging Face and kvseek channels (i, i + D/2).
    Takes and returns a weight [heads*D, hidden] or a bias [heads*D].
    """
    rows, limit = tensor.shape[0], f"a multiple of head_dim = {head_dim}"
    require(rows % head_dim == 0, "rows of a projection", rows, limit, REMEDY)
    pairs = tensor.view(-1, head_dim // 2, 2, math.prod(tensor.shape[1:]))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata values and tensors by name. The long arrays of the vocabulary are left to the tokenizer's own reader."""
    from gguf import GGUFReader, GGUFValueType

    with path.open("rb") as file:
        magic = file.read(4)
    remedy = "pass a .gguf file or a Hugging Face directory"
    require(magic == b"GGUF", f"first bytes of {path}", magic, "b'GGUF'", remedy)
    try:
        reader = GGUFReader(path)
        metadata = {
            key: field.contents() for key, field in reader.fields.items() if GGUFValueType.ARRAY not in field.types
        }
        return metadata, {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}; the file is damaged or cut short: download it again") from None
