"""TensorRT-LLM checkpoints: config.json and one safetensors file a rank, as TensorRT-LLM's convert_checkpoint.py writes them.

Names and defaults of the configuration are those of TensorRT-LLM's PretrainedConfig, LLaMAConfig, QWenConfig and Mapping. Tensors
are joined over the ranks when they are read, and returned under their Hugging Face names.

Quantised ones are as ModelOpt exports them (modelopt/torch/export/quant_utils.py): E4M3 with a scale a module and rank; with
W4A16_AWQ integers from -8 to 7, those of rows 2i and 2i + 1 in the low and high bits of a byte, with a scale for each row and
group of inputs, and maybe a factor for each input.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvseek.core.config import WEIGHT_GROUP, group_inputs, largest_group
from kvseek.core.errors import ConfigError, require
from kvseek.core.model_config import ModelConfig
from kvseek.core.weight_only import HEAD, INT4, INT8_ASYMMETRIC, NOT_FINITE, pack
from kvseek.engine.model.weights import source_shape

from .checkpoint import OWN_DTYPE, Checkpoint
from .files import Header, SafetensorsFile, generation_ends, metadata_files, naming, read_object
from .known_keys import TENSORRT_LLM, USE_ANOTHER
from .model_config import model_config
from .quantised import beyond_float16
from .tokenizer import ModelTokenizer, load_tokenizer_directory

LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM")
QWEN = "QWenForCausalLM"  # Qwen of any generation; qwen_type tells which
QWEN_TYPES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
)
# Hugging Face field → TensorRT-LLM's name for it
OTHER_NAMES = {"rms_norm_eps": "norm_epsilon", "rope_theta": "rotary_base"}
# Defaults of `rotary_scaling` of type llama3; conversions of Meta's own files do not state these fields.
LLAMA3_DEFAULTS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CHECK = "check the checkpoint's config.json"
NOT_QUANTISED = "convert the model with FP8 or W4A16_AWQ, or without quantisation"
# Algorithms whose files hold weights in the order of the kernels of one GPU, which the files do not name.
REORDERED = ("W8A16", "W4A16", "W8A16_GPTQ", "W4A16_GPTQ")
PACKED = ("I8", "U8")  # types of weights of 4 bits
COPY_AGAIN = "copy the checkpoint again, or convert the model again"
LAYER = re.compile(r"transformer\.layers\.(\d+)\.")
# Of a KV cache and of activations, which an engine keeps in its own type.
OTHER_SCALES = ("kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor", "activation_scaling_factor")
SCALE, INPUT_FACTORS = "weights_scaling_factor", "prequant_scaling_factor"  # of a module's weight, and of its inputs
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # one tensor of each rank, in this order
# By the Hugging Face name of a layer's module: TensorRT-LLM's name, and the axis along which ranks share its weight; None: each
# holds it whole. In a gated MLP TensorRT-LLM calls the projection that goes through the activation `fc`, and the projection that
# is multiplied with it `gate`.
MODULES: dict[str, tuple[str, int | None]] = {
    **dict.fromkeys(PROJECTIONS, ("attention.qkv", 0)),
    "input_layernorm": ("input_layernorm", None),
    "self_attn.q_norm": ("attention.q_layernorm", None),
    "self_attn.k_norm": ("attention.k_layernorm", None),
    "self_attn.o_proj": ("attention.dense", 1),
    "post_attention_layernorm": ("post_layernorm", None),
    "mlp.gate_proj": ("mlp.fc", 0),
    "mlp.up_proj": ("mlp.gate", 0),
    "mlp.down_proj": ("mlp.proj", 1),
}
ENDS: dict[str, tuple[str, int | None]] = {  # the same of what the last pipeline rank has behind its layers
    "model.norm": ("transformer.ln_f", None),
    "lm_head": ("lm_head", 0),
}


class TensorRtLlmCheckpoint(Checkpoint):
    """A directory with TensorRT-LLM's config.json and rank0.safetensors, rank1.safetensors, ..., of weights of any width."""

    reading_copies = 1  # the ranks' parts beside the joined tensor

    @cached_property
    def config(self) -> ModelConfig:
        """Shape of the model; special tokens are the tokenizer's, because a TensorRT-LLM configuration has none."""
        path, ends = self.path / "config.json", generation_ends(self.tokenizer_directory or self.path)
        with naming(path):
            values = hugging_face_values(self._values)
        tokenizer = self.tokenizer()
        values |= {f"{name}_id": tokenizer.special_id(name) for name in ("bos_token", "eos_token", "pad_token")}
        with naming(path):
            return model_config(values, ends)

    @property
    def files(self) -> list[Path]:
        """The directory's JSON, template and tokenizer files, and the ranks' files."""
        return [*metadata_files(self.path), *self._rank_paths]

    @property
    def quantised_by(self) -> str | None:
        """See Checkpoint.quantised_by."""
        algorithm = _object(self._values, "quantization").get("quant_algo")
        return None if algorithm is None else f"TensorRT-LLM {algorithm}"

    @property
    def notes(self) -> Sequence[str]:
        """See Checkpoint.notes."""
        return () if self.quantised_by is None else (OWN_DTYPE,)

    def unused(self, names: set[str]) -> set[str]:
        """Return the tensors that are not in `names`, as "NAME of FILE", without scales, of which `tensor` reads the weights'."""
        shards = list(map(self._locate, names))
        expected = {
            (rank.path, name)
            for shard in shards
            for rank in shard.ranks
            for name in (shard.name, shard.part(SCALE), shard.part(INPUT_FACTORS))
        }
        return {
            f"{name} of {rank.path.name}"
            for rank in self._ranks
            for name in rank.names
            if (rank.path, name) not in expected and not name.endswith(OTHER_SCALES)
        }

    def header(self, name: str) -> Header:
        """Describe one tensor; raises ConfigError if a rank lacks it or holds another shape or dtype."""
        shard = self._locate(name)
        first, *_ = headers = [_header(rank, shard) for rank in shard.ranks]
        for rank, header in zip(shard.ranks, headers, strict=True):
            if header.shape != shard.shape:
                raise ConfigError(
                    f"{rank.path}: shape of {shard.name} = {header.shape}: must be {shard.shape} by config.json; "
                    "config and weights are of different conversions"
                )
            if header.dtype != first.dtype:
                raise ConfigError(
                    f"{rank.path}: dtype of {shard.name} = {header.dtype}: must be {first.dtype} as in the first rank's "
                    "file; the files are of different conversions"
                )
        return Header(first.place, source_shape(self.config, name), first.dtype)

    def tensor(self, name: str) -> Tensor:
        """Join one tensor over its ranks; raises as `header`, and if ranks differ that should hold copies."""
        self.header(name)
        shard, parts = self._locate(name), list[Tensor]()
        for number, rank in enumerate(shard.ranks):
            part = _values(rank, shard) if shard.is_narrow(rank) else rank.tensor(shard.name, shard.rows)
            if number % shard.copies == 0:
                parts.append(part)
            elif not torch.equal(parts[-1], part):
                first = shard.ranks[number - number % shard.copies].path.name
                raise ConfigError(
                    f"{rank.path}: {shard.name} differs from that of {first}, must be a copy of it; the files are of "
                    "different conversions"
                )
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, shard.axis)
        return joined.narrow(shard.axis, 0, source_shape(self.config, name)[shard.axis])  # the rest is padding

    def quantised(self, name: str) -> RankWeights | None:
        """See Checkpoint.quantised."""
        if self.quantised_by is None or not name.endswith(".weight"):
            return None
        shard = self._locate(name)
        if shard.name not in shard.ranks[0].names or not shard.is_narrow(shard.ranks[0]):
            return None
        self.header(name)
        return RankWeights(shard, source_shape(self.config, name))

    def _locate(self, name: str) -> Shard:
        """Locate the tensor with a Hugging Face name in the files of the ranks that share it."""
        (tp_size, _, embedding_axis), model, ends = self._mapping, self.config, self._last_layers
        module, _, kind = name.rpartition(".")
        pipeline_rank, prefix = 0, ""
        axis: int | None
        if module == "model.embed_tokens":
            theirs, axis = "transformer.vocab_embedding", embedding_axis
        elif module in ENDS:
            pipeline_rank, (theirs, axis) = len(ends) - 1, ENDS[module]
        else:
            _, _, number, module = module.split(".", 3)
            pipeline_rank = bisect_right(ends, int(number))  # each has its own layers, numbered from 0
            prefix = f"transformer.layers.{int(number) - (ends[pipeline_rank - 1] if pipeline_rank else 0)}."
            theirs, axis = MODULES[module]
        ranks = self._ranks[pipeline_rank * tp_size : (pipeline_rank + 1) * tp_size]
        shape, rows, copies = list(source_shape(model, name)), slice(None), 1
        if (
            module in PROJECTIONS
        ):  # each rank holds the rows of its heads; with fewer KV heads than ranks, neighbours hold the same
            queries, kv_heads = model.num_heads // tp_size, max(1, model.num_kv_heads // tp_size)
            starts = [count * model.head_dim for count in (0, queries, queries + kv_heads, queries + 2 * kv_heads)]
            which = PROJECTIONS.index(module)
            shape[0], rows = starts[-1], slice(starts[which], starts[which + 1])
            copies = max(1, tp_size // model.num_kv_heads) if which else 1
        elif axis is None or (kind == "bias" and axis == 1):  # each holds the whole bias of a sum over the ranks
            axis, copies = None, tp_size
        else:
            shape[axis] = -(-shape[axis] // tp_size)
        return Shard(ranks, f"{prefix}{theirs}.{kind}", tuple(shape), rows, axis or 0, copies)

    def _own_tokenizer(self) -> ModelTokenizer:
        return load_tokenizer_directory(self.path, "pass --tokenizer DIR, the model's Hugging Face directory")

    @cached_property
    def _values(self) -> dict[str, Any]:
        return read_object(self.path / "config.json")

    @cached_property
    def _mapping(self) -> Mapping:
        with naming(self.path / "config.json"):
            return read_mapping(self._values)

    @property
    def _rank_paths(self) -> list[Path]:
        """The ranks' files; raises ConfigError if one is missing or there are more than the mapping has ranks."""
        world_size = self._mapping.tp_size * self._mapping.pp_size
        expected = [self.path / f"rank{rank}.safetensors" for rank in range(world_size)]
        absent = [path.name for path in expected if not path.is_file()]
        if absent:
            raise ConfigError(
                f"{self.path}: {absent[0]} is missing ({len(absent)} of the {world_size} ranks' files); copy the "
                "checkpoint again, or convert the model again with --output_dir there"
            )
        extra = sorted(path.name for path in set(self.path.glob("rank*.safetensors")) - set(expected))
        if extra:
            raise ConfigError(
                f"{self.path}: {extra[0]} belongs to none of the {world_size} ranks of config.json's mapping; remove "
                "the files of another conversion"
            )
        return expected

    @cached_property
    def _ranks(self) -> list[SafetensorsFile]:
        return [SafetensorsFile(path, COPY_AGAIN, NOT_QUANTISED) for path in self._rank_paths]

    @cached_property
    def _last_layers(self) -> list[int]:
        """Number of the layers of each pipeline rank and those before it; raises ConfigError if ranks cannot share the model."""
        model, tp_size, layers = self.config, self._mapping.tp_size, []
        for rank in self._ranks[::tp_size]:
            stored = [int(found[1]) for name in rank.names if (found := LAYER.match(name))]
            layers.append(max(stored, default=-1) + 1)
        limit = f"{model.num_layers} together: num_hidden_layers of config.json"
        require(sum(layers) == model.num_layers, f"{self.path}: layers in the ranks' files", layers, limit, COPY_AGAIN)
        shared = {"num_attention_heads": model.num_heads, "intermediate_size": model.intermediate_size}
        if self._mapping.embedding_axis == 1:
            shared["hidden_size"] = model.hidden_size
        with naming(self.path / "config.json"):
            for name, value in shared.items():
                limit = f"a multiple of mapping.tp_size = {tp_size}"
                require(value % tp_size == 0, name, value, limit, "check config.json")
            kv_heads, limit = model.num_kv_heads, f"a multiple or a divisor of mapping.tp_size = {tp_size}"
            fits = kv_heads % tp_size == 0 or tp_size % kv_heads == 0
            require(fits, "num_key_value_heads", kv_heads, limit, "check config.json")
        return list(itertools.accumulate(layers))


@dataclass(frozen=True)
class Shard:
    """Location of one tensor of the model in the files of the tensor-parallel ranks that share it.

    Attributes
    ----------
    ranks : sequence of SafetensorsFile
        The ranks' files, in their order.
    name : str
        Name of the tensor in every rank's file.
    shape : tuple of int
        Shape of the tensor in every rank's file.
    rows : slice
        Rows of that tensor which belong to the wanted tensor.
    axis : int
        Axis along which the ranks' rows are joined.
    copies : int
        Number of neighbouring ranks that hold the same rows.
    """

    ranks: Sequence[SafetensorsFile]
    name: str
    shape: tuple[int, ...]
    rows: slice
    axis: int
    copies: int

    def part(self, kind: str) -> str:
        """Name of another tensor of the module, such as SCALE."""
        return f"{self.name.rpartition('.')[0]}.{kind}"

    def is_narrow(self, rank: SafetensorsFile) -> bool:
        """Whether a rank's tensor is quantised."""
        kind = rank.stored(self.name).kind
        return kind == "F8_E4M3" or (kind in PACKED and self.part(SCALE) in rank.names)


def _numbers(rank: SafetensorsFile, shard: Shard) -> Tensor:
    """A rank's rows of a quantised weight: E4M3 or int8 [rows, inputs]."""
    if rank.stored(shard.name).kind not in PACKED:
        return rank.tensor(shard.name, shard.rows)
    packed = rank.tensor(shard.name).view(torch.uint8)
    numbers = torch.stack((packed & 15, packed >> 4), dim=1).flatten(0, 1)[shard.rows]
    return (numbers ^ 8).to(torch.int8) - 8


def _scales(rank: SafetensorsFile, shard: Shard) -> Tensor:
    """Scales of a rank's rows, float32 [rows, groups]."""
    scale = rank.tensor(shard.part(SCALE)).float()
    if rank.stored(shard.name).kind in PACKED:
        return scale[shard.rows]
    return scale.view(1, 1).expand(len(range(shard.shape[0])[shard.rows]), 1)


def _values(rank: SafetensorsFile, shard: Shard) -> Tensor:
    """What a rank's rows of a quantised weight mean, float32: with the factors of its inputs, which are constants, too."""
    numbers, scales = _numbers(rank, shard), _scales(rank, shard)
    values = numbers.float() * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)
    factors = shard.part(INPUT_FACTORS)
    return values * rank.tensor(factors).float() if factors in rank.names else values


@dataclass(frozen=True)
class RankWeights:
    """A quantised weight; a NarrowWeight.

    Attributes
    ----------
    shard : Shard
        Where its parts are.
    shape : tuple of int
    """

    shard: Shard
    shape: tuple[int, ...]

    def _joined(self, part: Callable[[SafetensorsFile, Shard], Tensor]) -> Tensor:
        """Numbers or scales of all rows; scales of E4M3 are one a row, or as many as ranks that divide the inputs."""
        parts = [part(rank, self.shard) for rank in self.shard.ranks[:: self.shard.copies]]
        return torch.cat(parts, self.shard.axis)[: self.shape[0]]  # the rest is padding

    @cached_property
    def _group(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // self._joined(_scales).shape[1]

    @property
    def _first(self) -> SafetensorsFile:
        return self.shard.ranks[0]

    @cached_property
    def why(self) -> str:
        """See NarrowWeight."""
        if self._first.stored(self.shard.name).kind not in PACKED:
            scales = self._joined(_scales)
            return "" if bool((scales == scales[:, :1]).all()) else "has other scales in each rank's file"
        if any(self.shard.part(INPUT_FACTORS) in rank.names for rank in self.shard.ranks):
            return "has a factor for each input"
        return "" if self._group % WEIGHT_GROUP == 0 else f"has groups of {self._group} columns"

    @property
    def precisions(self) -> tuple[str, ...]:
        """See NarrowWeight."""
        if self.why:
            return ()
        return (INT4, INT8_ASYMMETRIC) if self._first.stored(self.shard.name).kind in PACKED else ("fp8",)

    @property
    def group(self) -> int:
        """See NarrowWeight."""
        return largest_group((self._group,))

    def expanded(self, precision: str, device: str) -> str:
        """See NarrowWeight."""
        scales = self._joined(_scales)
        if precision != "fp8":
            return beyond_float16(scales, precision)
        exact = device == "cuda" or torch.equal(scales.bfloat16().float(), scales)
        return "" if exact else "has scales with more digits than bfloat16"

    def as_stored(self, precision: str, group: int) -> tuple[Tensor, Tensor]:
        """See NarrowWeight. Scales are rounded to float16 as those of QuantisedWeight."""
        numbers, scales = self._joined(_numbers), self._joined(_scales)
        sound = bool(scales.isfinite().all()) and not (numbers.is_floating_point() and bool(numbers.isnan().any()))
        place = f"{self._first.path}: {self.shard.name}"
        require(sound, f"{place}: a weight or scale", "infinity or NaN", "finite", NOT_FINITE)
        if precision == "fp8":
            return numbers, scales[:, 0].contiguous()
        zero = -8 * scales if precision == INT4 else torch.zeros_like(scales)
        repeats = self.shape[1] // group_inputs(precision, group) // scales.shape[1]
        scale = torch.stack((scales, zero), dim=-1).half().repeat_interleave(repeats, 1)
        return pack((numbers + 8).to(torch.uint8)) if precision == INT4 else numbers, scale


def _header(rank: SafetensorsFile, shard: Shard) -> Header:
    """Describe a tensor of a rank's file; raises ConfigError if it is absent, or of an unknown type."""
    name = shard.name
    if name not in rank.names:
        untied = (
            "share_embedding_table is false, or absent, in config.json: set it to true if the head is the embedding"
        )
        remedy = f"{untied}, else convert the model again" if name == HEAD else COPY_AGAIN
        raise ConfigError(f"{rank.path}: tensor {name} is missing; {remedy}")
    stored, scale = rank.stored(name), shard.part(SCALE)
    if not shard.is_narrow(rank):
        return rank.header(name)
    found = rank.stored(scale).shape if scale in rank.names else ()
    if stored.kind == "F8_E4M3":
        scales = math.prod(found) if scale in rank.names else 0
        require(scales == 1, f"{stored.place}: scales beside it", scales, f"1: {scale}", COPY_AGAIN)
        return Header(stored.place, stored.shape, torch.float32)
    require(len(stored.shape) == 2, f"{stored.place}: shape", stored.shape, "of two numbers", COPY_AGAIN)
    rows, columns = 2 * stored.shape[0], stored.shape[1]
    groups = len(found) == 2 and found[0] == rows and found[1] > 0 and columns % found[1] == 0
    require(groups, f"{stored.place}: shape of {scale}", found, f"({rows}, groups of {columns} columns)", COPY_AGAIN)
    factors = rank.stored(shard.part(INPUT_FACTORS)).shape if shard.part(INPUT_FACTORS) in rank.names else (columns,)
    name = f"{stored.place}: shape of {shard.part(INPUT_FACTORS)}"
    require(factors == (columns,), name, factors, f"({columns},)", COPY_AGAIN)
    return Header(stored.place, (rows, columns), torch.float32)


class Mapping(NamedTuple):
    """The division of a checkpoint over files, one a rank: rank = pipeline rank × tp_size + tensor-parallel rank."""

    tp_size: int
    pp_size: int
    embedding_axis: int | None  # axis along which tensor-parallel ranks share the embedding; None: each holds all of it


def read_mapping(values: dict[str, Any]) -> Mapping:
    """Read `mapping` and the sharding of the embedding; raises ConfigError on values that contradict each other."""
    stated = _object(values, "mapping")
    tp_size, pp_size, cp_size = (_size(stated, name) for name in ("tp_size", "pp_size", "cp_size"))
    require(cp_size == 1, "mapping.cp_size", cp_size, "1", "convert the model without context parallelism")
    world_size, limit = stated.get("world_size", tp_size * pp_size), f"tp_size × pp_size = {tp_size * pp_size}"
    require(world_size == tp_size * pp_size, "mapping.world_size", world_size, limit, CHECK)
    axis = None
    if values.get("use_parallel_embedding") and tp_size > 1:
        axis = values.get("embedding_sharding_dim", 0)
        require(axis in (0, 1), "embedding_sharding_dim", axis, "0 or 1", CHECK)
    return Mapping(tp_size, pp_size, axis)


def hugging_face_values(values: dict[str, Any]) -> dict[str, Any]:
    """Translate the fields that describe the model to those that `model_config` takes, special tokens left out.

    Raises
    ------
    ConfigError
        If a field is missing or unknown, or asks for weights or parts that kvseek does not have: quantised weights, experts,
        other architectures, other positional embeddings.
    """
    architecture = _architecture(values)
    for name in (*SAME_NAMES, *OTHER_NAMES.values(), *(["head_size"] if architecture == QWEN_TYPES["qwen3"] else [])):
        if values.get(name) is None:
            raise ConfigError(f"{name} is missing; convert the model again")
    _refuse_unsupported(values, architecture)
    heads = values["num_attention_heads"]
    return {
        "architectures": [architecture],
        **{name: values[name] for name in SAME_NAMES},
        **{name: values[theirs] for name, theirs in OTHER_NAMES.items()},
        "num_key_value_heads": heads if values.get("num_key_value_heads") is None else values["num_key_value_heads"],
        "head_dim": values.get("head_size"),
        "attention_bias": architecture in LLAMA_LIKE and bool(values.get("attn_bias")),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings") or values.get("share_embedding_table")),
        "rope_scaling": _rope_scaling(values),
        "sliding_window": values.get("sliding_window"),  # conversions leave it out: attention is full then
    }


def _architecture(values: dict[str, Any]) -> str:
    """Find the Hugging Face name of `architecture`, which `qwen_type` completes or confirms."""
    found, qwen_type = values.get("architecture"), values.get("qwen_type")
    if found in LLAMA_LIKE:
        return str(found)
    known = (*LLAMA_LIKE, QWEN, *QWEN_TYPES.values())
    require(found in known, "architecture", found, f"one of {', '.join(known)}", "convert the model or choose another")
    if found != QWEN and qwen_type is None:
        return str(found)
    expected = [name for name, architecture in QWEN_TYPES.items() if found in (QWEN, architecture)]
    limit = f"{' or '.join(map(repr, expected))} with architecture = {found!r}"
    require(qwen_type in expected, "qwen_type", qwen_type, limit, "use another checkpoint")
    return QWEN_TYPES[str(qwen_type)]


def _refuse_unsupported(values: dict[str, Any], architecture: str) -> None:
    TENSORRT_LLM.check(values)
    # How TensorRT-LLM stores its KV cache (kv_cache_quant_algo) is no property of the weights.
    quantization = _object(values, "quantization")
    algorithm, limit = quantization.get("quant_algo"), "FP8, W4A16_AWQ or null"
    order = "its weights lie in the order of one GPU's kernels, which is not stated: " * (algorithm in REORDERED)
    fits = algorithm in (None, "FP8", "W4A16_AWQ")
    require(fits, "quantization.quant_algo", algorithm, limit, f"{order}{NOT_QUANTISED}")
    zeros = quantization.get("has_zero_point")
    require(zeros in (None, False), "quantization.has_zero_point", zeros, "false or null", NOT_QUANTISED)
    experts = _object(values, "moe").get("num_experts") or 0
    require(experts == 0, "moe.num_experts", experts, "0: no mixture of experts", USE_ANOTHER)
    window = _object(values, "runtime_defaults").get("max_attention_window")
    require(window is None, "runtime_defaults.max_attention_window", window, "null", USE_ANOTHER)
    for name in ("attn_bias", "tie_word_embeddings", "share_embedding_table", "use_parallel_embedding", "qk_layernorm"):
        require(values.get(name) in (None, True, False), name, values.get(name), "true, false or null", CHECK)
    stated, expected = values.get("qk_layernorm"), architecture == QWEN_TYPES["qwen3"]
    require(stated in (None, expected), "qk_layernorm", stated, f"{expected} for {architecture}", CHECK)
    rotated, head_size = values.get("rotary_embedding_dim"), values.get("head_size")
    limit = f"head_size = {head_size}"
    require(rotated in (None, head_size), "rotary_embedding_dim", rotated, limit, USE_ANOTHER)


def _rope_scaling(values: dict[str, Any]) -> dict[str, Any]:
    stated = _object(values, "rotary_scaling")
    kind = stated.get("rope_type") or stated.get("type")
    if kind == "longrope":
        # A conversion leaves out the length if Hugging Face's config.json states it beside the scaling, as Phi-3's does.
        length, limit = stated.get("original_max_position_embeddings"), "stated with rotary_scaling of type longrope"
        remedy = "add it to rotary_scaling from the model's own config.json"
        require(length is not None, "rotary_scaling.original_max_position_embeddings", length, limit, remedy)
    return {**LLAMA3_DEFAULTS, **stated} if kind == "llama3" else stated


def _object(values: dict[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    require(value is None or isinstance(value, dict), name, value, "an object or null", CHECK)
    return dict(value or {})


def _size(mapping: dict[str, Any], name: str) -> int:
    value = mapping.get(name, 1)
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(valid, f"mapping.{name}", value, "an integer > 0", CHECK)
    return int(value)
