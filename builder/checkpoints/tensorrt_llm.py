"""TensorRT-LLM checkpoints: config.json and one safetensors file a rank, as TensorRT-LLM's convert_checkpoint.py writes them.

Names and defaults of the configuration are those of TensorRT-LLM's PretrainedConfig, LLaMAConfig, QWenConfig and Mapping. Tensors
are joined over the ranks when they are read, and returned under their Hugging Face names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.core.errors import ConfigError, require
from kvseek.core.weight_only import HEAD

from .checkpoint import Checkpoint
from .files import Header, SafetensorsFile, generation_ends, metadata_files, naming, read_object
from .known_keys import TENSORRT_LLM, USE_ANOTHER
from .model_config import model_config
from .tokenizer import ModelTokenizer, load_tokenizer_directory
from .weights import source_shape

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
NOT_QUANTISED = "convert the model without quantisation"
COPY_AGAIN = "copy the checkpoint again, or convert the model again"
LAYER = re.compile(r"transformer\.layers\.(\d+)\.")
CACHE_SCALES = ("kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor")  # of a KV cache that kvseek does not quantise
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# By the Hugging Face name of a layer's module: TensorRT-LLM's name, and the axis along which ranks share its weight; None: each
# holds it whole. In a gated MLP TensorRT-LLM calls the projection that goes through the activation `fc`, and the projection that
# is multiplied with it `gate`.
MODULES: dict[str, tuple[str, int | None]] = {
    "input_layernorm": ("input_layernorm", None),
    "self_attn.q_norm": ("attention.q_layernorm", None),
    "self_attn.k_norm": ("attention.k_layernorm", None),
    "self_attn.o_proj": ("attention.dense", 1),
    "post_attention_layernorm": ("post_layernorm", None),
    "mlp.gate_proj": ("mlp.fc", 0),
    "mlp.up_proj": ("mlp.gate", 0),
    "mlp.down_proj": ("mlp.proj", 1),
}


class TensorRtLlmCheckpoint(Checkpoint):
    """A directory with TensorRT-LLM's config.json and rank0.safetensors, rank1.safetensors, ..., not quantised."""

    reading_copies = 1  # a rank's rows beside the joined tensor

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

    def unused(self, names: set[str]) -> set[str]:
        """Return the tensors that are not in `names`, as "NAME of FILE", without the scales of a quantised KV cache."""
        expected: list[set[str]] = [set() for _ in range(self._mapping.pp_size)]
        for name in names:
            shard = self._sharding.locate(name)
            expected[shard.pipeline_rank].add(shard.name)
        return {
            f"{name} of {rank.path.name}"
            for number, rank in enumerate(self._ranks)
            for name in rank.names - expected[number // self._mapping.tp_size]
            if not name.endswith(CACHE_SCALES)
        }

    def header(self, name: str) -> Header:
        """Describe one tensor; raises ConfigError if a rank lacks it or holds another shape or dtype."""
        shard = self._sharding.locate(name)
        first, *_ = headers = [_header(rank, shard.name) for rank in self._sharing(shard)]
        for rank, header in zip(self._sharing(shard), headers, strict=True):
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
        return Header(first.place, shard.joined_shape, first.dtype)

    def tensor(self, name: str) -> Tensor:
        """Join one tensor over its ranks; raises as `header`, and if ranks differ that should hold copies.

        Memory holds the tensor and one rank's rows.
        """
        shard, dtype = self._sharding.locate(name), self.header(name).dtype
        ranks, axis = self._sharing(shard), shard.axis
        extent = len(range(shard.shape[0])[shard.rows]) if axis == 0 else shard.shape[axis]
        padded = (*shard.shape[:axis], extent * (len(ranks) // shard.copies), *shard.shape[axis + 1 :])
        joined = torch.empty(padded, dtype=dtype)
        for number, rank in enumerate(ranks):
            place, rows = (
                joined.narrow(axis, number // shard.copies * extent, extent),
                rank.tensor(shard.name, shard.rows),
            )
            if number % shard.copies == 0:
                place.copy_(rows)
            elif not torch.equal(place, rows):
                first = ranks[number - number % shard.copies].path.name
                raise ConfigError(
                    f"{rank.path}: {shard.name} differs from that of {first}, must be a copy of it; the files are of "
                    "different conversions"
                )
        return joined.narrow(axis, 0, shard.size)

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
        world_size = self._mapping.world_size
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
    def _sharding(self) -> Sharding:
        model, mapping, layers = self.config, self._mapping, self._layers_of_ranks()
        with naming(self.path / "config.json"):
            return Sharding(model, mapping, layers)

    def _layers_of_ranks(self) -> list[int]:
        """Number of layers of each pipeline rank; its files number the layers from 0."""
        layers = []
        for rank in self._ranks[:: self._mapping.tp_size]:
            stored = [int(found[1]) for name in rank.names if (found := LAYER.match(name))]
            layers.append(max(stored, default=-1) + 1)
        limit = f"{self.config.num_layers} together: num_hidden_layers of config.json"
        field = f"{self.path}: layers in the ranks' files"
        require(sum(layers) == self.config.num_layers, field, layers, limit, COPY_AGAIN)
        return layers

    def _sharing(self, shard: Shard) -> list[SafetensorsFile]:
        """Return the tensor-parallel ranks that share a tensor."""
        first = shard.pipeline_rank * self._mapping.tp_size
        return self._ranks[first : first + self._mapping.tp_size]


def _header(rank: SafetensorsFile, name: str) -> Header:
    """Describe a tensor of a rank's file; raises ConfigError if it is absent, or of a type that no unquantised weight has."""
    if name not in rank.names:
        untied = (
            "share_embedding_table is false, or absent, in config.json: set it to true if the head is the embedding"
        )
        remedy = f"{untied}, else convert the model again" if name == HEAD else COPY_AGAIN
        raise ConfigError(f"{rank.path}: tensor {name} is missing; {remedy}")
    return rank.header(name)


@dataclass(frozen=True)
class Mapping:
    """The division of a checkpoint over files, one a rank: rank = pipeline rank × tp_size + tensor-parallel rank."""

    tp_size: int
    pp_size: int
    embedding_axis: int | None  # axis along which tensor-parallel ranks share the embedding; None: each holds all of it

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size


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
    algorithm = _object(values, "quantization").get("quant_algo")
    require(algorithm is None, "quantization.quant_algo", algorithm, "null", NOT_QUANTISED)
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


@dataclass(frozen=True)
class Shard:
    """Location of one tensor of the model in the files of the ranks that share it.

    Attributes
    ----------
    pipeline_rank : int
        Pipeline rank whose tensor-parallel ranks hold the tensor; each pipeline rank has its own layers.
    name : str
        Name of the tensor in every rank's file.
    shape : tuple of int
        Shape of the tensor in every rank's file.
    rows : slice
        Rows of that tensor which belong to the wanted tensor.
    axis : int
        Axis along which the ranks' rows are joined.
    size : int
        Length along `axis` after joining; rows beyond it are padding.
    copies : int
        Number of neighbouring ranks that hold the same rows.
    """

    pipeline_rank: int
    name: str
    shape: tuple[int, ...]
    rows: slice
    axis: int
    size: int
    copies: int

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """Shape of the wanted tensor."""
        return (*self.shape[: self.axis], self.size, *self.shape[self.axis + 1 :])


class Sharding:
    """Locations of all tensors of the model in the ranks' files.

    Parameters
    ----------
    layers : sequence of int
        Number of layers that each pipeline rank holds.

    Raises
    ------
    ConfigError
        If the model cannot be shared by that many ranks.
    """

    def __init__(self, model: ModelConfig, mapping: Mapping, layers: Sequence[int]) -> None:
        self._model, self._mapping, self._layers = model, mapping, layers
        tp_size, kv_heads = mapping.tp_size, model.num_kv_heads
        shared = {"num_attention_heads": model.num_heads, "intermediate_size": model.intermediate_size}
        if mapping.embedding_axis == 1:
            shared["hidden_size"] = model.hidden_size
        for name, value in shared.items():
            limit = f"a multiple of mapping.tp_size = {tp_size}"
            require(value % tp_size == 0, name, value, limit, "check config.json")
        limit = f"a multiple or a divisor of mapping.tp_size = {tp_size}"
        fits = kv_heads % tp_size == 0 or tp_size % kv_heads == 0
        require(fits, "num_key_value_heads", kv_heads, limit, "check config.json")

    def locate(self, name: str) -> Shard:
        """Locate the tensor with a Hugging Face name."""
        model, last, axis = self._model, len(self._layers) - 1, self._mapping.embedding_axis
        vocabulary = (model.vocab_size, model.hidden_size)
        match name.split("."):
            case ["model", "embed_tokens", _]:
                return self._shared(0, "transformer.vocab_embedding.weight", vocabulary, axis)
            case ["model", "norm", _]:
                return self._shared(last, "transformer.ln_f.weight", (model.hidden_size,), None)
            case ["lm_head", _]:
                return self._shared(last, "lm_head.weight", vocabulary, 0)
            case ["model", "layers", number, *module, kind]:
                return self._in_layer(int(number), ".".join(module), kind)
        raise KeyError(name)

    def _in_layer(self, layer: int, module: str, kind: str) -> Shard:
        pipeline_rank = 0
        while layer >= self._layers[pipeline_rank]:
            layer -= self._layers[pipeline_rank]
            pipeline_rank += 1
        prefix = f"transformer.layers.{layer}."
        if module in PROJECTIONS:
            return self._projection(pipeline_rank, f"{prefix}attention.qkv.{kind}", PROJECTIONS.index(module), kind)
        theirs, axis = MODULES[module]
        axis = None if kind == "bias" else axis  # each rank holds the whole bias of a sum over the ranks
        return self._shared(
            pipeline_rank, f"{prefix}{theirs}.{kind}", source_shape(self._model, f"{module}.{kind}"), axis
        )

    def _shared(self, pipeline_rank: int, name: str, shape: tuple[int, ...], axis: int | None) -> Shard:
        """Describe a tensor that ranks share evenly along an axis, with padding at the last rank, or that each holds whole."""
        tp_size = self._mapping.tp_size
        if axis is None:
            return Shard(pipeline_rank, name, shape, slice(None), axis=0, size=shape[0], copies=tp_size)
        local = list(shape)
        local[axis] = -(-shape[axis] // tp_size)
        return Shard(pipeline_rank, name, tuple(local), slice(None), axis, size=shape[axis], copies=1)

    def _projection(self, pipeline_rank: int, name: str, which: int, kind: str) -> Shard:
        """Describe the projection of queries (0), keys (1) or values (2); each rank holds the rows of its heads, in this order.

        With fewer KV heads than ranks, neighbouring ranks hold the same KV head.
        """
        model, tp_size = self._model, self._mapping.tp_size
        queries, kv_heads = model.num_heads // tp_size, max(1, model.num_kv_heads // tp_size)
        ends = [count * model.head_dim for count in (queries, queries + kv_heads, queries + 2 * kv_heads)]
        rows = slice(0 if which == 0 else ends[which - 1], ends[which])
        shape = (ends[-1], model.hidden_size) if kind == "weight" else (ends[-1],)
        heads, copies = (model.num_kv_heads, max(1, tp_size // model.num_kv_heads)) if which else (model.num_heads, 1)
        return Shard(pipeline_rank, name, shape, rows, axis=0, size=heads * model.head_dim, copies=copies)
