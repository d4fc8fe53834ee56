"""GGUF files of one part or several: metadata, dequantised tensors under their Hugging Face names, tokenizer.

Tensors are read one at a time, so a quantised file never needs its unquantised size in memory.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvseek.core.config import ASYMMETRIC_GROUP, WEIGHT_GROUP
from kvseek.core.errors import ConfigError, require
from kvseek.core.model_config import ModelConfig
from kvseek.core.rope import frequencies
from kvseek.core.weight_only import INT4, INT8_ASYMMETRIC, INT8_GROUPS, NOT_FINITE, pack

from .checkpoint import Checkpoint
from .effective_config import check_gguf_metadata
from .files import Header, naming
from .gguf_tokenizer import ARRAYS, load_tokenizer
from .known_keys import GGUF, GGUF_EXPERTS
from .model_config import model_config
from .tokenizer import ModelTokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
MIXTURES = ("qwen2moe", "qwen3moe")
EXPERT = re.compile(r"\.experts\.(\d+)\.")  # of a Hugging Face name; a file has all experts' matrices in one tensor
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the RoPE frequencies, which Llama 3.1 files carry
ONE = (0x00, 0x3C)  # 1 as float16
SIXTHS = (*[1] * 4, *[0] * 4, *[1] * 4)  # factors of 1 and values of 0 of 0, in Q4_K and Q5_K
# Blocks that an engine may keep as INT8_ASYMMETRIC; what makes all factors 1 and values of 0 0, so that a block's values are its
# numbers: bytes, by where they begin. From ggml's ggml-common.h.
UNITS: dict[str, dict[int, tuple[int, ...]]] = {
    "Q4_0": {0: ONE},
    "Q4_1": {0: (*ONE, 0, 0)},
    "Q5_0": {0: ONE},
    "Q5_1": {0: (*ONE, 0, 0)},
    "Q8_0": {0: ONE},
    "Q2_K": {0: (1,) * 16, 80: (*ONE, 0, 0)},
    "Q3_K": {96: (*[0x11] * 8, *[0xAA] * 4, *ONE)},
    "Q4_K": {0: (*ONE, 0, 0, *SIXTHS)},
    "Q5_K": {0: (*ONE, 0, 0, *SIXTHS)},
    "Q6_K": {192: (*[1] * 16, *ONE)},
}
NARROWEST = {"Q4_0": INT4, "Q4_1": INT4, "Q4_K": INT4, "Q8_0": INT8_GROUPS}  # formats that keep them in less room
K_BLOCK, K_HEAD = 144, 16  # bytes of a block of 256 weights of Q4_K, and of its scales before the numbers
REMEDY = "use the model's Hugging Face directory"
BLOCK_WEIGHTS = 4 << 20  # weights that are dequantised at a time
LONG_ARRAY = 1024  # items of an array that are not read: only a vocabulary has more
STRING_LENGTH = struct.Struct("=Q")
ARRAY_HEAD = struct.Struct("=IQ")  # type and number of an array's items
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # names of the files that llama.cpp's llama-gguf-split writes

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
}
EXPERT_FIELDS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
# FIELDS that a file may state by the rows of a tensor alone, as older ones do.
EXPERT_ROWS = {"moe_intermediate_size": "ffn_gate_exps", "shared_expert_intermediate_size": "ffn_gate_shexp"}
OPTIONAL = ("num_key_value_heads", "head_dim", "rope_theta")  # FIELDS that model_config may do without
# RopeScaling field → GGUF key below "<architecture>.rope.scaling.", by the kinds that llama.cpp has; linear is its default.
SCALING_FIELDS = {
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    },
}
# Llama 3.1's own scaling (model card). A file states only the resulting divisors, so the scaling is recognised by them.
LLAMA3_SCALING = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class _Contents:
    """Contents of a file, unread: metadata by key, tensors of gguf's reader by name, and where arrays of the tokenizer begin."""

    metadata: dict[str, Any]
    tensors: dict[str, Any]
    arrays: dict[str, int]


@dataclass(frozen=True)
class GgufBlocks:
    """A weight in blocks that an engine may keep; a NarrowWeight.

    Attributes
    ----------
    path : Path
    found : Any
        The tensor of gguf's reader.
    head_dim : int or None
        Of the heads whose rows are to be reordered (split_halves).
    expert : int or None
        Whose matrix of the tensor it is.
    """

    path: Path
    found: Any
    head_dim: int | None
    expert: int | None = None
    group = WEIGHT_GROUP
    why = ""

    @property
    def precisions(self) -> tuple[str, ...]:
        """See NarrowWeight."""
        narrowest = NARROWEST.get(self.found.tensor_type.name)
        return (INT8_ASYMMETRIC,) if narrowest is None else (narrowest, INT8_ASYMMETRIC)

    def expanded(self, precision: str, device: str) -> str:
        """See NarrowWeight."""
        columns = _shape(self.found)[-1]
        odd = device == "cuda" and precision == INT8_GROUPS and columns % (2 * WEIGHT_GROUP)
        return f"has {columns} columns" if odd else ""

    def as_stored(self, precision: str, group: int) -> tuple[Tensor, Tensor]:
        """See NarrowWeight. A block is its factor, of Q4_1 also the value of 0, and the numbers; those of Q4_0 are 8 too many.

        Blocks of 256 weights have factors and values of 0 that are products of a half and 4 to 8 bits. They are rounded to
        float16, by 2^-11 of themselves, or by 2^-25 if that is more.
        """
        part, kind = _Part.of(self.found, self.expert), self.found.tensor_type.name
        rows = part.shape[0]
        with self.path.open("rb") as file:
            file.seek(part.offset)
            read = torch.from_numpy(np.fromfile(file, np.uint8, part.nbytes)).view(rows, -1)
        if self.head_dim is not None:
            read = split_halves(read, self.head_dim)
        if precision == INT8_ASYMMETRIC:
            numbers, scale = _any_blocks(read, self.found.tensor_type)
        elif kind == "Q4_K":
            numbers, scale = _k_blocks(read)
        else:
            blocks = read.view(rows, -1, int(self.found.n_bytes * WEIGHT_GROUP / self.found.n_elements))
            start = 4 if kind == "Q4_1" else 2
            numbers, scale = blocks[..., start:].flatten(1), blocks[..., :start].contiguous().view(torch.float16)
        if kind == "Q4_0" and precision == INT4:
            scale = torch.cat((scale, -8 * scale), dim=-1)
        where = f"{self.path}: {self.found.name}: factors of blocks"
        require(bool(scale.isfinite().all()), where, "infinity or NaN", "numbers of float16", NOT_FINITE)
        return (numbers.view(torch.int8), scale[..., 0].contiguous()) if precision == INT8_GROUPS else (numbers, scale)


@dataclass(frozen=True)
class _Part:
    """A tensor of gguf's reader, or the matrix of one expert in it: its shape, rows first, and where its bytes are."""

    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def of(cls, found: Any, expert: int | None) -> _Part:
        shape, offset, nbytes = _shape(found), int(found.data_offset), int(found.n_bytes)
        if expert is None:
            return cls(shape, offset, nbytes)
        nbytes //= shape[0]
        return cls(shape[1:], offset + expert * nbytes, nbytes)


class GgufCheckpoint(Checkpoint):
    """A model of one of ARCHITECTURES, quantised or not, in one GGUF file or in several.

    Of several the first is named: it has the metadata.
    """

    @cached_property
    def config(self) -> ModelConfig:
        """Shape of the model, from the file's metadata and the names of its tensors."""
        with naming(self.path):
            return self._config()

    def _config(self) -> ModelConfig:
        mixture = self.architecture in MIXTURES
        (GGUF_EXPERTS if mixture else GGUF).check(self._metadata, self.architecture)
        values = {name: self._value(key) for name, key in FIELDS.items() if self._value(key) is not None}
        for name, key in FIELDS.items():
            if name not in values and name not in OPTIONAL:
                raise ConfigError(f"{self.architecture}.{key} is missing; {REMEDY}")
        values |= {
            "architectures": [ARCHITECTURES[self.architecture]],
            "vocab_size": _shape(self._tensor("token_embd.weight"))[0],
            "attention_bias": "qwen2" not in self.architecture and "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "pad_token_id": self._metadata.get("tokenizer.ggml.padding_token_id"),
            "rope_scaling": self._rope_scaling(),
            **(self._experts() if mixture else {}),
        }
        ends = (self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        config = model_config(values, [end for end in ends if end is not None])
        self._refuse_unsupported(config)
        return self._with_rope_factors(config, values)

    def _experts(self) -> dict[str, Any]:
        """Read the fields of a mixture. Whether weights are divided by their sum no file says: llama.cpp does with Qwen3's."""
        qwen3, values = self.architecture == "qwen3moe", dict[str, Any]()
        for name, key in EXPERT_FIELDS.items():
            shared, stated = name.startswith("shared"), self._value(key)
            if qwen3 and shared:
                require(stated in (None, 0), f"{self.architecture}.{key}", stated, "0 or absent", REMEDY)
                continue
            if stated is None and name in EXPERT_ROWS:
                stated = _shape(self._tensor(f"blk.0.{EXPERT_ROWS[name]}.weight"))[-2]
            if stated is None:
                raise ConfigError(f"{self.architecture}.{key} is missing; {REMEDY}")
            values[name] = stated
        return values | {"norm_topk_prob": qwen3}

    def check(self) -> None:
        """Raise ConfigError unless transformers reads the same model from the file's metadata."""
        super().check()
        check_gguf_metadata(self.config, self.path, self._metadata, self._tensors)

    @property
    def files(self) -> list[Path]:
        """The GGUF file, or all of its parts."""
        return list(self._parts)

    def unused(self, names: set[str]) -> set[str]:
        """Return the GGUF names of tensors that are not in `names`; the RoPE factors belong to the configuration."""
        return set(self._tensors) - {self._gguf_name(name) for name in names} - {ROPE_FACTORS}

    def header(self, name: str) -> Header:
        """Describe one tensor; raises ConfigError if it is absent or of a type that the gguf package cannot dequantise."""
        from gguf import dequantize

        found = self._tensor(self._gguf_name(name))
        path, expert = self._file_of(found.name), _expert(name)
        try:
            dequantize(np.zeros((1, found.data.shape[-1]), found.data.dtype), found.tensor_type)
        except NotImplementedError:
            raise ConfigError(
                f"{path}: type of {found.name} = {found.tensor_type.name}: must be a floating-point or quantised "
                f"type that the gguf package dequantises; {REMEDY}"
            ) from None
        if expert is not None:
            experts, shape = self.config.experts, _shape(found)
            count = 0 if experts is None else experts.num_experts
            fits = len(shape) == 3 and shape[0] == count
            require(fits, f"{path}: shape of {found.name}", shape, f"({count}, rows, columns)", REMEDY)
        shape = _Part.of(found, expert).shape
        one = name.endswith("shared_expert_gate.weight")  # of one row, which files leave out
        return Header(f"{path}: {found.name}", (1, *shape) if one and len(shape) == 1 else shape, torch.float32)

    def tensor(self, name: str) -> Tensor:
        """Dequantise one tensor to float32; raises as `header`."""
        header = self.header(name)
        found = self._tensor(self._gguf_name(name))
        tensor = _dequantise(self._file_of(found.name), found, _Part.of(found, _expert(name)))
        head_dim = self._reordered(name)
        return tensor.view(header.shape) if head_dim is None else split_halves(tensor, head_dim)

    def quantised(self, name: str) -> GgufBlocks | None:
        """See Checkpoint.quantised."""
        found = self._tensors.get(self._gguf_name(name))
        if found is None or found.tensor_type.name not in UNITS:
            return None
        return GgufBlocks(self._file_of(found.name), found, self._reordered(name), _expert(name))

    def _reordered(self, name: str) -> int | None:
        """Channels of the heads whose rows a file has in another order; None: the rows are in order."""
        llama = self.architecture == "llama" and ("q_proj" in name or "k_proj" in name)
        return self.config.head_dim if llama else None

    def _tensor(self, name: str) -> Any:
        """Return a tensor of gguf's reader by its name in the file."""
        if name not in self._tensors:
            raise ConfigError(f"{self.path}: tensor {name} is missing; {REMEDY}")
        return self._tensors[name]

    def _own_tokenizer(self) -> ModelTokenizer:
        with naming(self.path):
            arrays = {key: _read_array(self.path, at) for key, at in self._contents.arrays.items()}
            return load_tokenizer(self._metadata, arrays)

    @cached_property
    def architecture(self) -> str:
        """The value of general.architecture; raises ConfigError if the decoder cannot run it."""
        found, limit = self._metadata.get("general.architecture"), f"one of {', '.join(ARCHITECTURES)}"
        remedy = "convert the model or choose another"
        with naming(self.path):
            require(found in ARCHITECTURES, "general.architecture", found, limit, remedy)
        return str(found)

    @property
    def _metadata(self) -> dict[str, Any]:
        return self._contents.metadata

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for path, contents in self._parts.items():
            twice = sorted(set(tensors) & set(contents.tensors))
            if twice:
                raise ConfigError(f"{path}: tensor {twice[0]} is in a part before it, too; download the files again")
            tensors |= contents.tensors
        return tensors

    def _file_of(self, tensor: str) -> Path:
        return next(path for path, contents in self._parts.items() if tensor in contents.tensors)

    @property
    def _contents(self) -> _Contents:
        return self._parts[self.path]

    @cached_property
    def _parts(self) -> dict[Path, _Contents]:
        """The file's contents, or those of all files into which the model is split, the first one first."""
        first = _read(self.path)
        count, number = first.metadata.get("split.count", 1), first.metadata.get("split.no", 0)
        if count in (0, 1):
            return {self.path: first}
        name, remedy = PART.fullmatch(self.path.name), "download all parts under their own names and pass the first"
        with naming(self.path):
            limit = "1, or the number in a name such as model-00001-of-00003.gguf"
            require(name is not None and int(name[3]) == count, "split.count", count, limit, remedy)
            require(number == 0, "split.no", number, "0, that of the first part", remedy)
        assert name is not None
        parts = {self.path: first}
        for part in range(2, count + 1):
            path = self.path.with_name(f"{name[1]}-{part:05}-of-{name[3]}.gguf")
            if not path.is_file():
                raise ConfigError(f"{path} is missing, one of the {count} parts of the model; {remedy}")
            parts[path] = _read(path)
            stated = [parts[path].metadata.get(key) for key in ("split.no", "split.count")]
            require(
                stated == [part - 1, count],
                f"{path}: split.no and split.count",
                stated,
                f"[{part - 1}, {count}]",
                remedy,
            )
        return parts

    def _value(self, key: str) -> Any:
        return self._metadata.get(f"{self.architecture}.{key}")

    @cached_property
    def _names(self) -> Any:
        from gguf import MODEL_ARCH, get_tensor_name_map

        return get_tensor_name_map(MODEL_ARCH[self.architecture.upper()], self.config.num_layers)

    def _gguf_name(self, name: str) -> str:
        found = self._names.get_name(EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ConfigError(f"tensor {name} has no place in a {self.architecture} GGUF file; {REMEDY}")
        return str(found)

    def _refuse_unsupported(self, config: ModelConfig) -> None:
        for key in ("rope.dimension_count", "attention.value_length"):
            size, limit = self._value(key), f"the head size {config.head_dim}"
            require(size in (None, config.head_dim), f"{self.architecture}.{key}", size, limit, REMEDY)
        window, reach = self._value("attention.sliding_window"), config.max_position_embeddings
        idle = window in (None, 0) or (isinstance(window, int) and window >= reach)
        name = f"{self.architecture}.attention.sliding_window"
        require(idle, name, window, f"absent or >= {reach}", "use another checkpoint")

    def _rope_scaling(self) -> dict[str, Any] | None:
        """Read the scaling as llama.cpp does: linear unless a type is stated, and a factor of 0 or none at all means 1."""
        prefix = f"{self.architecture}.rope.scaling."
        kind = self._metadata.get(f"{prefix}type", "linear")
        known = isinstance(kind, str) and kind in SCALING_FIELDS
        require(known, f"{prefix}type", kind, f"one of {', '.join(SCALING_FIELDS)}", REMEDY)
        stated = {name: self._metadata.get(prefix + key) for name, key in SCALING_FIELDS[kind].items()}
        if stated.get("factor") is None:
            stated["factor"] = self._value("rope.scale_linear")  # the key's name in older files
        factor = stated["factor"] or 1.0
        if kind == "none" or (kind == "linear" and factor == 1):
            return None
        return {
            "rope_type": kind,
            **{name: value for name, value in stated.items() if value is not None},
            "factor": factor,
        }

    def _with_rope_factors(self, config: ModelConfig, values: dict[str, Any]) -> ModelConfig:
        """Recognise Llama 3.1's RoPE scaling by the frequency divisors in the file."""
        if ROPE_FACTORS not in self._tensors:
            return config
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
    pairs = tensor.view(-1, head_dim // 2, 2, math.prod(tensor.shape[1:]))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _k_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Turn rows of Q4_K, uint8, into INT4's numbers and scales, in groups of 32: two lie in the low and high bits of 32 bytes."""
    blocks = rows.reshape(-1, K_BLOCK)
    pairs = blocks[:, K_HEAD:].reshape(rows.shape[0], -1, WEIGHT_GROUP)
    numbers = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    return pack(numbers), torch.stack(_factors(blocks, "Q4_K"), dim=-1).half().view(rows.shape[0], -1, 2)


def _any_blocks(rows: Tensor, kind: Any) -> tuple[Tensor, Tensor]:
    """Turn rows of blocks of any of UNITS, uint8, into INT8_ASYMMETRIC's numbers and scales, some rows at a time."""
    from gguf import GGML_QUANT_SIZES, dequantize

    weights, size = GGML_QUANT_SIZES[kind]
    count = rows.shape[1] // size
    numbers = torch.empty(rows.shape[0], count * weights, dtype=torch.int8)
    scale = torch.empty(rows.shape[0], count * weights // ASYMMETRIC_GROUP, 2, dtype=torch.float16)
    step = max(1, BLOCK_WEIGHTS // (count * weights))
    for start in range(0, rows.shape[0], step):
        blocks = rows[start : start + step].reshape(-1, size)
        factors = torch.stack(_factors(blocks, kind.name), dim=-1).half()
        scale[start : start + step] = factors.repeat_interleave(
            weights // ASYMMETRIC_GROUP // factors.shape[1], 1
        ).view(-1, *scale.shape[1:])
        units = blocks.clone()
        for at, unit in UNITS[kind.name].items():
            units[:, at : at + len(unit)] = torch.tensor(unit, dtype=torch.uint8)
        values = torch.from_numpy(dequantize(units.view(-1, rows.shape[1]).numpy(), kind))
        numbers[start : start + step] = values.to(torch.int8)
    return numbers, scale


def _factors(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Factors and values of 0 of blocks, float32 [blocks, groups], in order."""
    from gguf.quants import Q4_K

    def halves(at: int, count: int = 1) -> Tensor:
        return blocks[:, at : at + 2 * count].contiguous().view(torch.float16).float()

    if kind == "Q2_K":  # 4 bits each
        return halves(80) * (blocks[:, :16] & 15), -halves(82) * (blocks[:, :16] >> 4)
    if kind == "Q3_K":  # 6 bits, 32 too many: the lower 4 of all, then the upper 2
        low, high = blocks[:, 96:104], blocks[:, 104:108]
        lower = torch.cat((low & 15, low >> 4), dim=1).int()
        upper = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).int()
        factors = halves(108) * ((lower | upper << 4) - 32)
    elif kind in ("Q4_K", "Q5_K"):
        sixths = [torch.from_numpy(part) for part in Q4_K.get_scale_min(blocks[:, 4:K_HEAD].numpy())]
        return halves(0) * sixths[0], -halves(2) * sixths[1]
    elif kind == "Q6_K":
        factors = halves(208) * blocks[:, 192:208].contiguous().view(torch.int8)
    elif kind in ("Q4_1", "Q5_1"):
        return halves(0), halves(2)
    else:
        factors = halves(0)
    return factors, torch.zeros_like(factors)


def _shape(found: Any) -> tuple[int, ...]:
    """Shape of a tensor of gguf's reader, rows first."""
    return tuple(int(size) for size in reversed(found.shape))


def _expert(name: str) -> int | None:
    """Number of the expert of a Hugging Face name; None: of none."""
    found = EXPERT.search(name)
    return None if found is None else int(found[1])


def _dequantise(path: Path, found: Any, whole: _Part) -> Tensor:
    """Read a tensor of gguf's reader, or a part of it, as float32, some rows at a time.

    The reader's mapping is not used, because its pages would count as the process's memory until the reader is closed: in
    the end the whole file.
    """
    from gguf import dequantize

    values = torch.empty(whole.shape, dtype=torch.float32)
    width = found.data.shape[-1]  # items of a row of weights in the file; not read here
    rows = values.view(-1, whole.shape[-1])
    step = max(1, BLOCK_WEIGHTS // rows.shape[1])
    with path.open("rb") as file:
        file.seek(whole.offset)
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step]
            block = np.fromfile(file, found.data.dtype, part.shape[0] * width).reshape(part.shape[0], -1)
            part.copy_(torch.from_numpy(dequantize(block, found.tensor_type)))
    return values


def _strict_reader(path: Path) -> Any:
    """Make a GGUFReader that raises ValueError if the file ends before its header says, and steps over long arrays.

    gguf's own reader takes the bytes that there are, and would loop almost for ever over an array with a damaged length. It makes
    several arrays of NumPy's for each word of a vocabulary, which takes seconds.
    """
    from gguf import GGUFReader, GGUFValueType

    class StrictReader(GGUFReader):  # type: ignore[misc]  # gguf has no types
        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **named: Any) -> Any:
            self._require_bytes(int(offset) + int(count) * np.dtype(dtype).itemsize)
            return super()._get(offset, dtype, count, *rest, **named)

        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if kind != GGUFValueType.ARRAY:
                return super()._get_field_parts(offset, kind)
            item = int(self._get(offset, np.uint32)[0])
            if item == GGUFValueType.ARRAY:
                raise ValueError("it has an array of arrays, which no key of a supported model holds")
            if self.byte_order != "I":  # foreign files are refused
                return super()._get_field_parts(offset, kind)
            length = int(self._get(offset + 4, np.uint64)[0])
            if length <= LONG_ARRAY:
                return super()._get_field_parts(offset, kind)
            end = self._end_of_items(int(offset) + 12, GGUFValueType(item), length)
            return end - int(offset), [], [], [GGUFValueType.ARRAY, GGUFValueType(item)]

        def _end_of_items(self, offset: int, item: Any, length: int) -> int:
            if item != GGUFValueType.STRING:
                end = offset + length * np.dtype(self.gguf_scalar_to_np[item]).itemsize
                self._require_bytes(end)
                return end
            data = memoryview(self.data)
            for _ in range(length):  # each string is its length in bytes, uint64, and the bytes
                self._require_bytes(offset + 8)
                offset += 8 + STRING_LENGTH.unpack_from(data, offset)[0]
            self._require_bytes(offset)
            return offset

        def _require_bytes(self, end: int) -> None:
            if end > len(self.data):
                raise ValueError(f"byte {end:,} is named in its header, the file has {len(self.data):,}")

    return StrictReader(path)


def _read_array(path: Path, start: int) -> list[Any]:
    """Read an array of strings or numbers, whose bounds a reader has checked; raises ConfigError on strings that are no text."""
    from gguf import GGUFReader, GGUFValueType

    with path.open("rb") as file:
        file.seek(start)
        kind, count = ARRAY_HEAD.unpack(file.read(ARRAY_HEAD.size))
        if kind == GGUFValueType.STRING:
            sizes = (STRING_LENGTH.unpack(file.read(STRING_LENGTH.size))[0] for _ in range(count))
            try:
                return [file.read(size).decode() for size in sizes]
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"a token of the vocabulary is not UTF-8 ({error}); download the file again"
                ) from None
        return list(np.fromfile(file, GGUFReader.gguf_scalar_to_np[GGUFValueType(kind)], count).tolist())


def _read(path: Path) -> _Contents:
    """Read a file's header. Arrays of the vocabulary are read when the tokenizer is made."""
    from gguf import GGUFValueType

    with path.open("rb") as file:
        magic = file.read(4)
    remedy = "pass a .gguf file or a Hugging Face directory"
    require(magic == b"GGUF", f"first bytes of {path}", magic, "b'GGUF'", remedy)
    try:
        reader = _strict_reader(path)
        arrays = {key for key, field in reader.fields.items() if GGUFValueType.ARRAY in field.types}
        long = {key for key in arrays if key.startswith("tokenizer.") or not reader.fields[key].data}
        metadata = {key: "an array" if key in long else field.contents() for key, field in reader.fields.items()}
        # A field is the length of its key, the key, its type and its value.
        begins = {key: int(reader.fields[key].offset) + 12 + len(key.encode()) for key in arrays & set(ARRAYS)}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}; the file is damaged or cut short: download it again") from None
    require(reader.byte_order == "I", f"byte order of {path}", "foreign", "this machine's", REMEDY)
    return _Contents(metadata, {tensor.name: tensor for tensor in reader.tensors}, begins)
