"""Configuration of an engine: frozen dataclasses, and config.json of an engine directory, in which unknown keys are errors.

A field has one name through the command line (``--max_seq_len``), the JSON of the engine directory and the code. The JSON has the
objects that trtllm-build writes: the model, and what the build decided.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .errors import EngineDirectoryError, from_dict, read_fields, refuse_unknown, require

FORMAT_VERSION = 3  # the format of engine directories
CONFIG_FILE = "config.json"
CHECK_CONFIG = "check what the checkpoint states of the model, in config.json or a GGUF file's metadata"
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # architectures of which some layers keep a state instead of rows
MODEL_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", *HYBRIDS)  # of ModelConfig
MOST_EXPERTS, MOST_CHOSEN = 512, 32  # of a layer, and of those for a token: what a block of the GPU's router takes
MOST_POSITIONS = 2**31 - 1  # far beyond any model, and what a 32-bit integer holds
MOST_SIZE = 2**24  # of a vocabulary or a layer; many times more than any published model has
EXTENT_TOKENS = 1024  # tokens in one extent of the row pool and of every index array
# Values of weight_only_precision: integers that share their scales in groups.
GROUPED = ("int4", "int8_groups", "int8_asymmetric")
FP8_GROUPS = "fp8_groups"  # another one, of float8_e4m3fn
WEIGHT_GROUP = 32  # inputs of a group of GGUF's blocks (core/weight_only.py), and of INT4's by default
WEIGHT_GROUPS = (32, 64, 128)  # values of EngineConfig.weight_group
ASYMMETRIC_GROUP = (
    16  # inputs of a group of int8_asymmetric: the fewest that share a scale in blocks of GGUF, and in NVFP4
)
FP8_GROUP = 128  # inputs of a group of FP8_GROUPS: those of the blocks of published checkpoints
STATE_BLOCK = 64  # tokens whose changes of a Gated DeltaNet layer's state are computed together
KEY_BLOCK = 64  # tokens that sparse attention of prompts chooses together
ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")  # of RopeScaling
CHOICES = {  # the values that EngineConfig's fields of type str allow
    "dtype": ("float32", "bfloat16", "float16"),
    "device": ("cpu", "cuda"),
    "kernels": ("native", "reference"),
    "weight_only_precision": ("none", "int8", "fp8", *GROUPED, FP8_GROUPS),
    "runtime": ("torch", "tensorrt"),
    "prefill_attention": ("dense", "block_sparse"),
    "prefill_precision": ("none", "fp8"),
}
# Fields of CacheConfig, beside None, of engines that keep no rows for later requests.
NO_REUSE = {"reuse": False, "reuse_host_bytes": None, "cached_prefill": "dense"}
# Fields of EngineConfig that lie beside those of its `model` in pretrained_config. All others lie in build_config.
PRETRAINED = ("dtype",)
PRECISION = "weight_only_precision"  # the field of EngineConfig whose default is the checkpoint's own


def group_inputs(precision: str, weight_group: int) -> int:
    """Inputs that share a scale, by EngineConfig's weight_only_precision and weight_group; 1: none do, or all of a row."""
    sizes = (weight_group, WEIGHT_GROUP, ASYMMETRIC_GROUP)
    return {**dict(zip(GROUPED, sizes, strict=True)), FP8_GROUPS: FP8_GROUP}.get(precision, 1)


def largest_group(inputs: Collection[int], most: int = WEIGHT_GROUPS[-1]) -> int:
    """Choose the largest of WEIGHT_GROUPS, up to `most`, that divides the inputs of all matrices; 0 if none does."""
    return max((one for one in WEIGHT_GROUPS if one <= most and all(size % one == 0 for size in inputs)), default=0)


def _require_positive(name: str, value: float | None) -> None:
    require(value is None or 0 < value < math.inf, name, value, "finite and > 0", CHECK_CONFIG)


@dataclass(frozen=True)
class RopeScaling:
    """RoPE frequency scaling, fields as in Hugging Face `rope_scaling` / `rope_parameters`.

    `kind` is one of ROPE_KINDS; fields that a kind does not use keep their defaults. "dynamic" is RoPE without scaling up to the
    model's max_position_embeddings, which is as far as it is served.
    """

    kind: str
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """Of longrope: divisor of each frequency in sequences of up to original_max_position_embeddings tokens."""
    long_factor: tuple[float, ...] = ()
    """Of longrope: divisor of each frequency in longer sequences."""

    def __post_init__(self) -> None:
        limit = f"one of {ROPE_KINDS}"
        require(self.kind in ROPE_KINDS, "rope_scaling.kind", self.kind, limit, "other scalings are unsupported")
        limit = "finite and >= 1"  # a smaller one would be no extension, and transformers calls it wrong
        require(1 <= self.factor < math.inf, "rope_scaling.factor", self.factor, limit, CHECK_CONFIG)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            _require_positive(f"rope_scaling.{name}", getattr(self, name))
        limit, high = "> low_freq_factor", self.high_freq_factor
        require(high > self.low_freq_factor, "rope_scaling.high_freq_factor", high, limit, CHECK_CONFIG)
        require(
            self.beta_fast >= self.beta_slow, "rope_scaling.beta_fast", self.beta_fast, ">= beta_slow", CHECK_CONFIG
        )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            valid = value is None or 0 <= value < math.inf
            require(valid, f"rope_scaling.{name}", value, "finite and >= 0", CHECK_CONFIG)
        if self.kind in ("llama3", "yarn", "longrope"):
            self._check_original_length()
        for name in ("short_factor", "long_factor"):
            for divisor in getattr(self, name):
                _require_positive(f"rope_scaling.{name}", divisor)

    def _check_original_length(self) -> None:
        original, name = self.original_max_position_embeddings, "rope_scaling.original_max_position_embeddings"
        least = 1 if self.kind == "longrope" else 0  # longrope's attention factor divides by the logarithm
        require(original > least, name, original, f"> {least}", f"{self.kind} scaling needs it; {CHECK_CONFIG}")
        require(original <= MOST_POSITIONS, name, original, f"<= {MOST_POSITIONS}", CHECK_CONFIG)
        if self.kind != "longrope":  # whose factor says nothing of the reach
            limit = f"<= {MOST_POSITIONS} / original_max_position_embeddings"
            require(self.factor * original <= MOST_POSITIONS, "rope_scaling.factor", self.factor, limit, CHECK_CONFIG)


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixtures of experts of a Qwen2-MoE or Qwen3-MoE decoder: MLPs, of which a router chooses a few for each token.

    Attributes
    ----------
    num_experts : int
        Of each layer with experts.
    num_experts_per_tok : int
        Experts that a token passes: those with the largest probabilities, which are the weights of the experts' sum.
    intermediate_size : int
        Of each expert.
    norm_topk_prob : bool
        Divide the weights of a token by their sum.
    shared_intermediate_size : int or None
        Of the shared expert, which all tokens pass, with a gate of its own; None: there is none.
    dense_layers : tuple of int
        Layers with an MLP of the model's intermediate_size instead, ascending.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    shared_intermediate_size: int | None = None
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_experts", "intermediate_size", "shared_intermediate_size"):
            size, limit = getattr(self, name), f"between 1 and {MOST_SIZE}"
            require(size is None or 0 < size <= MOST_SIZE, f"experts.{name}", size, limit, CHECK_CONFIG)
        most, limit = self.num_experts, f"<= {MOST_EXPERTS}"
        require(most <= MOST_EXPERTS, "experts.num_experts", most, limit, "choose another model")
        chosen, limit = (
            self.num_experts_per_tok,
            f"between 1 and min(num_experts, {MOST_CHOSEN}) = {min(most, MOST_CHOSEN)}",
        )
        name = "experts.num_experts_per_tok"
        require(0 < chosen <= min(most, MOST_CHOSEN), name, chosen, limit, CHECK_CONFIG)


@dataclass(frozen=True)
class DeltaNetConfig:
    """The Gated DeltaNet layers of a hybrid decoder (arXiv:2412.06464), which keep a state of one size and no rows.

    Attributes
    ----------
    layers : tuple of int
        Their numbers, ascending; all others attend, and have rows.
    num_key_heads, num_value_heads : int
        Heads of queries and keys, and of values: a multiple, of which neighbours share a query and a key.
    key_head_dim, value_head_dim : int
        Channels of a query and a key, and of a value.
    conv_kernel : int
        Tokens that the convolution before the heads reaches back, itself included.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel"):
            size, limit = getattr(self, name), f"between 1 and {MOST_SIZE}"
            require(0 < size <= MOST_SIZE, f"delta_net.{name}", size, limit, CHECK_CONFIG)
        keys, values = self.num_key_heads, self.num_value_heads
        limit = f"a multiple of num_key_heads = {keys}"
        require(values % keys == 0, "delta_net.num_value_heads", values, limit, CHECK_CONFIG)

    @property
    def keys(self) -> int:
        """Channels of all keys of a token."""
        return self.num_key_heads * self.key_head_dim

    @property
    def values(self) -> int:
        """Channels of all values of a token."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels that the convolution mixes: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama (or Mistral, which differs in nothing else), Qwen2 or Qwen3 decoder or a hybrid, maybe with experts."""

    architecture: str  # one of MODEL_ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    sliding_window: int | None = None
    """Tokens that the model's attention reaches back, itself included; None: all."""
    experts: ExpertsConfig | None = None
    """None: every layer has one MLP, of intermediate_size."""
    rotary_dim: int | None = None
    """Channels of a head that RoPE rotates, in an engine those of pairs 0, 1, ...; None: all."""
    gated_attention: bool = False
    """Whether what a head has attended to is multiplied with the sigmoid of a gate, which q_proj gives beside the query."""
    centred_norms: bool = False
    """Whether the weights of norms are differences from 1; that of a Gated DeltaNet layer's outputs is not."""
    delta_net: DeltaNetConfig | None = None
    """None: every layer attends."""
    mtp: bool = False
    """Whether a hybrid has its multi-token-prediction head, which drafts (engine/model/mtp.py)."""

    def __post_init__(self) -> None:
        known, own = MODEL_ARCHITECTURES, self.architecture
        require(own in known, "architecture", own, f"one of {known}", "convert the model")
        fits, limit = (
            (self.experts is not None) == own.endswith("_moe") or own == "qwen3_next",  # which may have either
            f"stated with architecture = {own!r} if that has any",
        )
        require(fits, "experts", self.experts, limit, CHECK_CONFIG)
        self._check_states()
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in sizes:
            size = getattr(self, name)
            require(0 < size <= MOST_SIZE, name, size, f"between 1 and {MOST_SIZE}", CHECK_CONFIG)
        divides = self.num_heads % self.num_kv_heads == 0
        limit = f"a divisor of num_heads = {self.num_heads}"
        require(divides, "num_kv_heads", self.num_kv_heads, limit, CHECK_CONFIG)
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even", "RoPE rotates pairs of channels")
        self._check_scaling()
        window = self.sliding_window
        require(window is None or window > 0, "sliding_window", window, "> 0 or null", CHECK_CONFIG)
        _require_positive("rms_norm_eps", self.rms_norm_eps)
        finite = 1 < self.rope_theta < math.inf
        require(finite, "rope_theta", self.rope_theta, "finite and > 1", CHECK_CONFIG)
        reach, name = self.max_position_embeddings, "max_position_embeddings"
        require(0 < reach <= MOST_POSITIONS, name, reach, f"between 1 and {MOST_POSITIONS}", CHECK_CONFIG)
        self._check_tokens()

    def _check_states(self) -> None:
        """Refuse layers with states in a decoder that has none, or that no layer is left without."""
        states, own = self.delta_net, self.architecture
        fits = (states is not None) == (own in HYBRIDS)
        limit = f"stated with architecture = {own!r} if that is one of {HYBRIDS}"
        require(fits, "delta_net", states, limit, CHECK_CONFIG)
        rotated, limit = self.rotary_dim, f"even, between 2 and head_dim = {self.head_dim}, or null"
        fits = rotated is None or (0 < rotated <= self.head_dim and rotated % 2 == 0)
        require(fits, "rotary_dim", rotated, limit, CHECK_CONFIG)
        if states is None:
            require(
                not self.mtp, "mtp", self.mtp, f"left out with architecture = {own!r}", f"only {HYBRIDS} draft with it"
            )
            return
        numbers = states.layers
        fits = sorted(set(numbers)) == list(numbers) and set(numbers) < set(range(self.num_layers))
        limit = f"ascending, of layers 0 to {self.num_layers - 1}, and not all of these"
        remedy = "a layer that attends is needed: use another checkpoint"
        require(fits, "delta_net.layers", numbers, limit, remedy)

    def _check_scaling(self) -> None:
        """Refuse a scaling that does not fit the heads."""
        scaling, pairs = self.rope_scaling, (self.rotary_dim or self.head_dim) // 2
        if scaling is not None and scaling.kind == "longrope":
            of = "head_dim" if self.rotary_dim is None else "rotary_dim"
            for name in ("short_factor", "long_factor"):
                found, limit = len(getattr(scaling, name)), f"{of} / 2 = {pairs} numbers"
                require(found == pairs, f"length of rope_scaling.{name}", found, limit, CHECK_CONFIG)
        if scaling is not None and scaling.kind == "dynamic":  # whose exponent is head_dim / (head_dim - 2)
            require(pairs > 1, "head_dim", self.head_dim, "> 2 with dynamic RoPE", CHECK_CONFIG)

    def _check_tokens(self) -> None:
        """Refuse ids that are no tokens: an end id that is never drawn would never end an answer."""
        remedy = "state another one in the checkpoint, or null"
        single = [(name, getattr(self, name)) for name in ("bos_token_id", "pad_token_id")]
        for name, token in [*single, *(("eos_token_id", end) for end in self.eos_token_ids)]:
            limit = f"between 0 and vocab_size - 1 = {self.vocab_size - 1}"
            require(token is None or 0 <= token < self.vocab_size, name, token, limit, remedy)

    def check_ranks(self, tp_size: int) -> None:
        """Raise ConfigError unless the model can be divided among so many ranks (core/ranks.py)."""
        require(tp_size >= 1, "tp_size", tp_size, ">= 1", "set --tp_size")
        remedy = "choose another --tp_size"
        states = self.delta_net
        own = {} if states is None else {"delta_net.num_key_heads": states.num_key_heads}
        for name, size in {"num_heads": self.num_heads, **own, **self.mlp_sizes}.items():
            require(size % tp_size == 0, "tp_size", tp_size, f"a divisor of {name} = {size}", remedy)
        heads = self.num_kv_heads
        limit = f"a divisor or a multiple of num_kv_heads = {heads}"
        require(heads % tp_size == 0 or tp_size % heads == 0, "tp_size", tp_size, limit, remedy)

    def matrix_inputs(self, tp_size: int = 1) -> dict[str, int]:
        """Inputs of the matrices that each of `tp_size` ranks multiplies with."""
        queries, name = self.num_heads * self.head_dim // tp_size, "num_heads * head_dim"
        intermediate = {name: size // tp_size for name, size in self.mlp_sizes.items()}
        states = {} if self.delta_net is None else {"delta_net values": self.delta_net.values // tp_size}
        return {"hidden_size": self.hidden_size, name: queries, **states, **intermediate}

    def has_state(self, layer: int) -> bool:
        """Whether a layer keeps a state instead of rows."""
        return self.delta_net is not None and layer in self.delta_net.layers

    @property
    def row_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that attend and have rows. Cache, indexes and attention number these alone, from 0."""
        return tuple(layer for layer in range(self.num_layers) if not self.has_state(layer))

    def first_layers(self, count: int) -> ModelConfig:
        """Return the model of the first layers, of which one must attend."""
        states, experts = self.delta_net, self.experts
        if states is not None:
            states = dataclasses.replace(states, layers=tuple(layer for layer in states.layers if layer < count))
        if experts is not None:
            experts = dataclasses.replace(experts, dense_layers=tuple(n for n in experts.dense_layers if n < count))
        return dataclasses.replace(self, num_layers=count, delta_net=states, experts=experts, mtp=False)

    def with_row_layers(self, count: int) -> ModelConfig:
        """Return a model of so many layers, which all have rows: what is kept of rows is the same for both."""
        own = "qwen3" if self.delta_net is not None else self.architecture
        experts = self.experts if own == self.architecture else None
        return dataclasses.replace(self, architecture=own, num_layers=count, experts=experts, delta_net=None, mtp=False)

    @property
    def mlp_sizes(self) -> dict[str, int]:
        """Intermediate sizes of the MLPs that the layers have, by the names of their fields."""
        own, experts = {"intermediate_size": self.intermediate_size}, self.experts
        if experts is None:
            return own
        sizes = own if experts.dense_layers else {}
        sizes = sizes | {"experts.intermediate_size": experts.intermediate_size}
        shared = experts.shared_intermediate_size
        return sizes if shared is None else sizes | {"experts.shared_intermediate_size": shared}

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of one MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def short_reach(self) -> int:
        """Tokens of the longest sequence that longrope's short_factor is for; without longrope, of any sequence."""
        scaling = self.rope_scaling
        longrope = scaling is not None and scaling.kind == "longrope"
        return scaling.original_max_position_embeddings if scaling is not None and longrope else MOST_POSITIONS


@dataclass(frozen=True)
class CacheConfig:
    """The four-region cache: sink | retrieval | local | update buffer (ParisKV paper, fig. 5). Sizes in tokens.

    Attributes
    ----------
    sink : int
        First tokens of a request, which every step attends to.
    local : int
        Latest tokens, which every step attends to.
    update : int
        New tokens that gather before as many of the oldest leave the local window for the retrieval region together.
    full_threshold : int
        Requests with fewer cached tokens than this attend densely.
    kv_cache_host_memory_bytes : int or None
        Upper bound of the row pool; None: what max_batch_size requests of max_seq_len tokens need.
    offload : str
        On a GPU, where retrieval rows lie: "always" in host memory, "never", or "auto": on the device while they fit.
    kv_cache_device_memory_bytes : int or None
        Budget of rows in device memory; None: what weights, index and work space leave free.
    reuse : bool or None
        Keep rows for later requests that begin alike (docs/conversations.md); None: where the engine can.
    reuse_host_bytes : int or None
        Upper bound of the rows that are kept and that no running request uses; None: what is free of the row pool.
    row_dtype : str
        Type of the rows of the retrieval regions: "auto", that of the engine, or "int8", with a scale a key and a scale a value
        (kernels/reference/attention/rounded_rows.py). Windows have the engine's type.
    cached_prefill : str
        What the tokens of a prompt attend to whose beginning is reused: "dense", all tokens before them, or "sparse", what decode
        steps would attend to.
    reuse_state_tokens : int
        Of hybrids: while a prompt is read, states are kept after each so many tokens, where a later request can go on.
    reuse_state_bytes : int
        Of hybrids: upper bound of the states that are kept in host memory; the least recently used go first.
    """

    sink: int = 64
    local: int = 256
    update: int = 256
    full_threshold: int = 2048
    kv_cache_host_memory_bytes: int | None = None
    offload: str = "auto"
    kv_cache_device_memory_bytes: int | None = None
    reuse: bool | None = None
    reuse_host_bytes: int | None = None
    row_dtype: str = "auto"
    cached_prefill: str = "dense"
    reuse_state_tokens: int = 8192
    reuse_state_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        require(self.sink >= 0, "cache.sink", self.sink, ">= 0", "64 is the default")
        require(self.local >= 1, "cache.local", self.local, ">= 1", "256 is the default")
        limit = f"between 1 and {EXTENT_TOKENS}"
        require(1 <= self.update <= EXTENT_TOKENS, "cache.update", self.update, limit, "256 is the default")
        require(self.full_threshold >= 0, "cache.full_threshold", self.full_threshold, ">= 0", "0 means never dense")
        for name in ("kv_cache_host_memory_bytes", "kv_cache_device_memory_bytes", "reuse_host_bytes"):
            budget = getattr(self, name)
            require(budget is None or budget > 0, f"cache.{name}", budget, "> 0", "or leave it out")
        choices = ("auto", "always", "never")
        require(self.offload in choices, "cache.offload", self.offload, f"one of {choices}", "auto is the default")
        budget, name = self.kv_cache_device_memory_bytes, "cache.kv_cache_device_memory_bytes"
        idle = budget is not None and self.offload == "always"
        require(not idle, name, budget, "left out with offload = 'always'", "no rows lie on the device then")
        budget, name = self.reuse_host_bytes, "cache.reuse_host_bytes"
        idle = budget is not None and self.reuse is False
        require(not idle, name, budget, "left out with cache.reuse = False", "no rows are kept then")
        idle = budget is not None and self.offload == "never"
        require(not idle, name, budget, "left out with offload = 'never'", "no rows lie in host memory then")
        forms, name = ("dense", "sparse"), "cache.cached_prefill"
        require(self.cached_prefill in forms, name, self.cached_prefill, f"one of {forms}", "dense is the default")
        types = ("auto", "int8")
        require(self.row_dtype in types, "cache.row_dtype", self.row_dtype, f"one of {types}", "auto is the default")
        idle = self.cached_prefill == "sparse" and self.reuse is False
        require(not idle, name, "sparse", "dense with cache.reuse = False", "no beginning of a prompt is reused then")

        fits, limit = (
            self.reuse_state_tokens % STATE_BLOCK == 0 < self.reuse_state_tokens,
            f"a multiple of {STATE_BLOCK}",
        )
        require(fits, "cache.reuse_state_tokens", self.reuse_state_tokens, limit, "8192 is the default")
        require(self.reuse_state_bytes >= 0, "cache.reuse_state_bytes", self.reuse_state_bytes, ">= 0", "0 keeps none")

    @property
    def bounds(self) -> dict[str, int]:
        """The bounds of the rows' memory that are stated, in bytes, by their flags' names."""
        names = ("kv_cache_host_memory_bytes", "kv_cache_device_memory_bytes")
        values = {f"cache.{name}": getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def window(self) -> int:
        """Rows of the device-resident window of a slot: sink, local and update buffer."""
        return self.sink + self.local + self.update


@dataclass(frozen=True)
class TensorRtConfig:
    """How the decoder runs with runtime = "tensorrt" (docs/tensorrt.md).

    Attributes
    ----------
    module : str
        Python module that builds and runs the plans: "tensorrt", or "tensorrt_rtx", TensorRT for RTX.
    form : str
        "engine": one plan, in which attention is a plugin's layers; "segments": plans that end at attention, which runs between
        them. TensorRT for RTX has no plugin layers.
    """

    module: str = "tensorrt"
    form: str = "engine"

    def __post_init__(self) -> None:
        modules, forms = ("tensorrt", "tensorrt_rtx"), ("engine", "segments")
        require(self.module in modules, "tensorrt.module", self.module, f"one of {modules}", "tensorrt is the default")
        require(self.form in forms, "tensorrt.form", self.form, f"one of {forms}", "engine is the default")
        fits = (self.module, self.form) != ("tensorrt_rtx", "engine")
        remedy = "TensorRT for RTX has no plugin layers: build with --tensorrt.form segments"
        require(fits, "tensorrt.form", self.form, "'segments' with module = 'tensorrt_rtx'", remedy)


@dataclass(frozen=True)
class BlockSparseConfig:
    """What chunks of a prompt attend to with prefill_attention = "block_sparse" (docs/sparse_prompts.md). Sizes in tokens.

    Attributes
    ----------
    budget : int
        Tokens before a chunk that each KV head attends to, a multiple of 64; chunks with no more before them attend densely.
    query_block : int
        Tokens that attend to the same chosen ones. Fewer find more of what only some of them look for; below 512 a GPU is slower.
    samples : int
        Of these tokens, those whose attention decides what is chosen; at most query_block.
    dense_tail : int
        Last tokens of a prompt, which attend to all tokens before them.
    dense_layers : int
        First layers, in which all tokens attend densely: they spread their attention over everything.
    """

    budget: int = 8192
    query_block: int = 512
    samples: int = 32
    dense_tail: int = 512
    dense_layers: int = 1

    def __post_init__(self) -> None:
        least = 8 * KEY_BLOCK  # so that most blocks are chosen, beside the first and the latest
        fits = self.budget >= least and self.budget % KEY_BLOCK == 0
        limit = f"a multiple of {KEY_BLOCK}, >= {least}"
        require(fits, "block_sparse.budget", self.budget, limit, f"{type(self).budget} is the default")
        for name, fewest in (("query_block", 1), ("samples", 1), ("dense_tail", 0), ("dense_layers", 0)):
            value, usual = getattr(self, name), getattr(type(self), name)
            require(value >= fewest, f"block_sparse.{name}", value, f">= {fewest}", f"{usual} is the default")
        limit = f"<= block_sparse.query_block = {self.query_block}"
        remedy = "more would look twice"
        require(self.samples <= self.query_block, "block_sparse.samples", self.samples, limit, remedy)


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine directory fixes.

    `method` names a folder of plugins/; `method_config` holds that method's own fields, checked by its config class.
    `device` is "cpu" or "cuda"; `kernels` is "native" (compiled, in the engine directory) or "reference" (PyTorch, on
    the CPU alone); `dtype`, that of weights and cache, is float32, bfloat16 or, on cuda, float16. `weight_only_precision` is
    "none", or "int8" or "fp8" for layers whose matrices have 8 bits a weight, or one of GROUPED or FP8_GROUPS
    (core/weight_only.py); `weight_group` is the inputs that share the scales of int4; `weight_formats` names matrices of
    another format, such as "layers.0.down": of int8_asymmetric beside one of GROUPED, or of "none";
    `quantize_lm_head` says whether the output head has int8 weights too. `runtime` names
    the library that computes all but attention: "torch", or on a GPU also "tensorrt", which the field `tensorrt` configures.
    `prefill_attention` is "dense", or "block_sparse" for prompts that attend to chosen blocks, as `block_sparse` says.
    `prefill_precision` is "none", or "fp8" for prompts that attend in FP8 to the tokens before a window, and whose rows are
    rounded to FP8 before products with weights of fp8.
    `tp_size` ranks, processes that each have a part of every layer, compute together (core/ranks.py, docs/parallelism.md).
    """

    model: ModelConfig
    method: str
    method_config: dict[str, Any] = field(default_factory=dict)
    cache: CacheConfig = field(default_factory=CacheConfig)
    dtype: str = "float32"
    device: str = "cpu"
    kernels: str = "native"
    weight_only_precision: str = "none"
    weight_group: int = WEIGHT_GROUP
    weight_formats: dict[str, str] = field(default_factory=dict)
    quantize_lm_head: bool = False
    runtime: str = "torch"
    tensorrt: TensorRtConfig = field(default_factory=TensorRtConfig)
    prefill_attention: str = "dense"
    prefill_precision: str = "none"
    block_sparse: BlockSparseConfig = field(default_factory=BlockSparseConfig)
    max_batch_size: int = 4
    max_input_len: int = 8192
    max_seq_len: int = 8192
    prefill_chunk_tokens: int = 2048
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            require(value in choices, name, value, f"one of {choices}", f"choose one with --{name}")
        fits = self.weight_only_precision in ("int8", *GROUPED) or not self.quantize_lm_head
        limit = f"false with weight_only_precision = {self.weight_only_precision!r}"
        remedy = "the head has int8 weights as the layers do: build with --weight_only_precision int8, or leave it out"
        require(fits, "quantize_lm_head", self.quantize_lm_head, limit, remedy)
        self._check_device()
        self._check_groups()
        self._check_prefill_attention()
        self._check_prefill_precision()
        # max_seq_len before max_input_len, which it is the default of: the message is to name the field that was set.
        for name in ("max_batch_size", "max_seq_len", "max_input_len", "prefill_chunk_tokens"):
            least, value = (2 if name == "max_seq_len" else 1), getattr(self, name)
            reason = "a prompt of one token and its answer take two: " if least == 2 else ""
            require(value >= least, name, value, f">= {least}", f"{reason}set --{name}")
        self.model.check_ranks(self.tp_size)
        alone = self.tp_size == 1 or self.runtime == "torch"
        require(alone, "tp_size", self.tp_size, "1 with runtime = 'tensorrt'", "plans are not divided among ranks")
        limit = f"<= max_seq_len = {self.max_seq_len}"
        longest = self.max_seq_len == self.model.max_position_embeddings
        remedy = f"lower it: {self._why_no_further()}" if longest else "lower it, or raise --max_seq_len"
        require(self.max_input_len <= self.max_seq_len, "max_input_len", self.max_input_len, limit, remedy)
        limit = f"<= max_position_embeddings = {self.model.max_position_embeddings}"
        fits = self.max_seq_len <= self.model.max_position_embeddings
        require(fits, "max_seq_len", self.max_seq_len, limit, self._why_no_further())
        self._check_experts()
        self._check_states()
        window = self.model.sliding_window
        within = window is None or self.max_seq_len <= window
        remedy = f"attention here has no sliding window: build with --max_seq_len {window}, or use another checkpoint"
        require(within, "max_seq_len", self.max_seq_len, f"<= sliding_window = {window}", remedy)
        short = self.model.short_reach
        within = self.runtime == "torch" or self.max_seq_len <= short
        limit = f"<= original_max_position_embeddings = {short} with runtime = 'tensorrt'"
        remedy = f"a plan has longrope's short_factor alone: build with --max_seq_len {short}, or with --runtime torch"
        require(within, "max_seq_len", self.max_seq_len, limit, remedy)

    def _check_experts(self) -> None:
        """Refuse what experts cannot be computed with."""
        if self.model.experts is None or self.device == "cpu":
            return
        limit = "'torch' with a mixture of experts"
        require(self.runtime == "torch", "runtime", self.runtime, limit, "plans have no experts: leave --runtime out")
        value, limit = self.prefill_precision, "'none' with a mixture of experts and weight_only_precision = 'fp8'"
        fits = value == "none" or self.weight_only_precision != "fp8"
        require(fits, "prefill_precision", value, limit, "grouped products take 16 bits: leave it out")
        limit, remedy = "bfloat16 or float16 with a mixture of experts on cuda", "choose one with --dtype"
        require(self.dtype != "float32", "dtype", self.dtype, limit, remedy)

    def _check_states(self) -> None:
        """Refuse what layers with states are not computed with."""
        if self.model.delta_net is None:
            for name in ("reuse_state_tokens", "reuse_state_bytes"):
                value, usual = getattr(self.cache, name), getattr(CacheConfig, name)
                limit = f"left out with architecture = {self.model.architecture!r}"
                require(value == usual, f"cache.{name}", value, limit, "no layer keeps a state")
            return
        fits, remedy = not self.model.mtp or (self.device == "cpu" and self.tp_size == 1), "leave it out"
        limit = "left out on cuda and with tp_size > 1: one process drafts with it, on the CPU"
        require(fits, "mtp", self.model.mtp, limit, remedy)
        limit = "'torch' with Gated DeltaNet layers"
        require(self.runtime == "torch", "runtime", self.runtime, limit, "plans have no such: leave --runtime out")
        value, remedy = self.cache.cached_prefill, "their states follow a prompt's blocks: leave it out"
        require(value == "dense", "cache.cached_prefill", value, "'dense' with Gated DeltaNet layers", remedy)
        fits, limit = (
            self.tp_size == 1 or not self.cache.reuse,
            "false, or left out, with Gated DeltaNet layers and tp_size > 1",
        )
        require(fits, "cache.reuse", self.cache.reuse, limit, "ranks keep no states for later requests: leave it out")

    def _check_groups(self) -> None:
        """Refuse weights in groups where a matrix, or a rank's part of it, ends within a group."""
        group, precision = self.weight_group, self.weight_only_precision
        require(group in WEIGHT_GROUPS, "weight_group", group, f"one of {WEIGHT_GROUPS}", "set --weight_group")
        fits, limit = precision == "int4" or group == WEIGHT_GROUP, f"left out with {PRECISION} = {precision!r}"
        require(fits, "weight_group", group, limit, "it belongs to int4")
        remedy = "build the engine again"  # no flag sets it
        for name, own in self.weight_formats.items():
            limit = f"none{', int8_asymmetric' * (precision in GROUPED)} beside {PRECISION} = {precision!r}"
            fits = own == "none" or (own == "int8_asymmetric" and precision in GROUPED)
            require(fits and precision != "none", f"weight_formats: {name}", own, limit, remedy)
        groups = group_inputs(precision, group)
        ranks = f" in each of {self.tp_size} ranks" * (self.tp_size > 1)
        limit = f"a multiple of {groups} with {PRECISION} = {precision!r}{ranks}"
        inputs = self.model.matrix_inputs(self.tp_size) if groups > 1 else {}
        others = [str(one) for one in WEIGHT_GROUPS if all(size % one == 0 for size in inputs.values())]
        smaller = f"--weight_group {' or '.join(others)}" if precision == "int4" and others else f"--{PRECISION} none"
        for name, value in inputs.items():
            require(value % groups == 0, name, value, limit, f"build with {smaller}")

    def _check_prefill_precision(self) -> None:
        """Refuse FP8 prompts where nothing computes with them."""
        for name, wanted in (("dtype", "bfloat16"), ("device", "cuda"), ("runtime", "torch")):
            value = getattr(self, name)
            limit, remedy = (
                f"{wanted!r} with prefill_precision = 'fp8'",
                f"build with --{name} {wanted}, or leave that out",
            )
            require(value == wanted or self.prefill_precision == "none", name, value, limit, remedy)

    def _check_prefill_attention(self) -> None:
        """Refuse sparse attention where attention is inside a plan, and fields that dense attention would ignore."""
        sparse = self.prefill_attention == "block_sparse"
        fits, own = sparse or self.block_sparse == BlockSparseConfig(), dataclasses.asdict(self.block_sparse)
        remedy = "leave it out, or build with --prefill_attention block_sparse"
        require(fits, "block_sparse", own, "left out with prefill_attention = 'dense'", remedy)
        whole = self.runtime == "tensorrt" and self.tensorrt.form == "engine"
        remedy = "a plan reads a prompt in one call: build with --tensorrt.form segments, or with --runtime torch"
        limit = "'dense' with runtime = 'tensorrt' and tensorrt.form = 'engine'"
        require(not (sparse and whole), "prefill_attention", self.prefill_attention, limit, remedy)

    def _why_no_further(self) -> str:
        scaling = self.model.rope_scaling
        if scaling is None or scaling.kind != "dynamic":
            return "the model was not trained on longer positions"
        reach = self.model.max_position_embeddings
        return (
            "dynamic RoPE rotates the tokens of a longer sequence by other frequencies than its cached keys: build with "
            f"--max_seq_len {reach}, or use yarn or linear scaling"
        )

    def _check_device(self) -> None:
        """Refuse what the device does not have, and fields that it would ignore."""
        own = self.runtime == "tensorrt" or self.tensorrt == TensorRtConfig()
        remedy = "leave it out, or build with --runtime tensorrt"
        require(own, "tensorrt", dataclasses.asdict(self.tensorrt), "left out with runtime = 'torch'", remedy)
        if self.runtime == "tensorrt":
            value = self.cache.row_dtype
            remedy = "plans read rows of the engine's type: build with --runtime torch"
            require(value == "auto", "cache.row_dtype", value, "'auto' with runtime = 'tensorrt'", remedy)
            name, value = "weight_only_precision", self.weight_only_precision
            require(
                self.device == "cuda",
                "runtime",
                self.runtime,
                "'torch' with device = 'cpu'",
                "build with --device cuda",
            )
            require(value == "none", name, value, "'none' with runtime = 'tensorrt'", "build with --runtime torch")
        if self.device == "cuda":
            if self.runtime == "tensorrt":
                remedy = "plans read every prompt from its first token on: leave it out, or build with --runtime torch"
                for name, default in NO_REUSE.items():
                    value = getattr(self.cache, name)
                    require(
                        value in (None, default), f"cache.{name}", value, "left out with runtime = 'tensorrt'", remedy
                    )
            fits, value = self.cache.row_dtype == "auto" or self.dtype != "float32", self.cache.row_dtype
            limit = "'auto' with dtype = 'float32' on cuda"
            require(fits, "cache.row_dtype", value, limit, "build with --dtype bfloat16")
            remedy = "build with --kernels native; the reference runs with --device cpu"
            require(self.kernels == "native", "kernels", self.kernels, "'native' with device = 'cuda'", remedy)
            name, value = "weight_only_precision", self.weight_only_precision
            fits = value == "none" or self.dtype != "float32"
            require(
                fits, name, value, "'none' with dtype = 'float32' on cuda", "build with --dtype bfloat16 or float16"
            )
            return
        remedy = "choose bfloat16, or --device cuda"
        require(self.dtype != "float16", "dtype", self.dtype, "float32 or bfloat16 with device = 'cpu'", remedy)
        for name in ("offload", "kv_cache_device_memory_bytes"):
            value, default = getattr(self.cache, name), getattr(CacheConfig, name)
            remedy = "leave it out, or build with --device cuda"
            require(value == default, f"cache.{name}", value, f"{default!r} with device = 'cpu'", remedy)


@dataclass(frozen=True)
class ConfigDocument:
    """The contents of config.json.

    Attributes
    ----------
    format_version : int
        FORMAT_VERSION of the kvseek that wrote the file.
    version : str
        Version of the kvseek that wrote the file.
    pretrained_config : dict
        Fields of ModelConfig, and the fields of EngineConfig that PRETRAINED lists.
    build_config : dict
        All other fields of EngineConfig.
    """

    format_version: int
    version: str
    pretrained_config: dict[str, Any]
    build_config: dict[str, Any]


def write_config(config: EngineConfig, directory: Path) -> None:
    """Write config.json into `directory`."""
    values = dataclasses.asdict(config)
    pretrained = values.pop("model") | {name: values.pop(name) for name in PRETRAINED}
    document = ConfigDocument(FORMAT_VERSION, version("kvseek"), pretrained, values)
    text = json.dumps(dataclasses.asdict(document), indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def read_config(directory: Path) -> EngineConfig:
    """Read config.json of an engine directory.

    Raises
    ------
    EngineDirectoryError
        If the file is missing, no JSON, or of another format version.
    ConfigError
        If a key is unknown or missing, naming the object that it belongs to, or a value is wrong.
    """
    values = _read_object(directory)
    refuse_other_format(values, directory)
    document = from_dict(ConfigDocument, values, CONFIG_FILE)
    pretrained, pretrained_place = document.pretrained_config, f"{CONFIG_FILE}: pretrained_config"
    built, built_place = document.build_config, f"{CONFIG_FILE}: build_config"
    of_model, of_engine = ([f.name for f in dataclasses.fields(cls)] for cls in (ModelConfig, EngineConfig))
    of_build = [name for name in of_engine if name not in ("model", *PRETRAINED)]
    refuse_unknown(pretrained, [*of_model, *PRETRAINED], pretrained_place)
    refuse_unknown(built, of_build, built_place)
    return EngineConfig(
        model=ModelConfig(**read_fields(ModelConfig, of_model, pretrained, pretrained_place)),
        **read_fields(EngineConfig, PRETRAINED, pretrained, pretrained_place),
        **read_fields(EngineConfig, of_build, built, built_place),
    )


def _read_object(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise EngineDirectoryError(f"{path} is missing: {directory} is no engine directory; run kvseek build") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EngineDirectoryError(f"{path} is not JSON ({error}); build the engine again") from None
    require(isinstance(document, dict), str(path), type(document).__name__, "a JSON object", "build the engine again")
    return dict(document)


def check_format(directory: Path) -> None:
    """Raise EngineDirectoryError if config.json of `directory` states another format version.

    A config.json that is missing or no JSON object passes, because it states no version: the checksums report it.
    """
    try:
        document = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(document, dict):
        refuse_other_format(document, directory)


def refuse_other_format(document: dict[str, Any], directory: Path) -> None:
    """Raise EngineDirectoryError unless `document`, config.json of `directory`, is of this format version."""
    found = document.get("format_version")
    if type(found) is not int or found != FORMAT_VERSION:
        raise EngineDirectoryError(
            f"{directory / CONFIG_FILE}: format_version = {found!r}: must be {FORMAT_VERSION}, that of kvseek "
            f"{version('kvseek')}; make an engine from the checkpoint with kvseek build"
        )
