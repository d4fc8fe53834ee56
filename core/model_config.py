"""The shape of a model: what an engine's config.json states of its checkpoint, and what kvseek refuses of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from .errors import require

CHECK_CONFIG = "check what the checkpoint states of the model, in config.json or a GGUF file's metadata"
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # architectures of which some layers keep a state instead of rows
MODEL_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma3", *HYBRIDS)  # of ModelConfig
ACTIVATIONS = ("silu", "gelu_tanh")  # of ModelConfig
MOST_EXPERTS, MOST_CHOSEN = 512, 32  # of a layer, and of those for a token: what a block of the GPU's router takes
MOST_POSITIONS = 2**31 - 1  # far beyond any model, and what a 32-bit integer holds
MOST_SIZE = 2**24  # of a vocabulary or a layer; many times more than any published model has
ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")  # of RopeScaling


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
        chosen = self.num_experts_per_tok
        limit = f"between 1 and min(num_experts, {MOST_CHOSEN}) = {min(most, MOST_CHOSEN)}"
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

    def ring_rows(self, drafted: int) -> int:
        """Return the rows that keep a slot's latest inputs, if a draft has at most `drafted` tokens.

        While one head still reads what came before the draft of the last step, another may be at the end of this step's.
        """
        return self.conv_kernel + 2 * drafted


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
    """Tokens that attention with a window reaches back, itself included; None: no layer has one."""
    window_layers: tuple[int, ...] = ()
    """Layers with this window, ascending, which keep rows of so many tokens; none: all have it, and max_seq_len is within it."""
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
    activation: str = "silu"
    """One of ACTIVATIONS, of the gates of MLPs; gelu_tanh is GELU by its approximation with a tanh."""
    post_norms: bool = False
    """Whether what attention and the MLP give is normalised before it is added to the residual stream."""
    embedding_scale: float = 1.0
    """Factor of embeddings, which the head does not have if it is tied."""
    attention_scalar: float | None = None
    """Scores are divided by the square root of this; None: of head_dim."""
    local_rope_theta: float | None = None
    """RoPE's base in layers of window_layers, where rope_scaling does not count; None: rope_theta, with the scaling."""

    def __post_init__(self) -> None:
        known, own = MODEL_ARCHITECTURES, self.architecture
        require(own in known, "architecture", own, f"one of {known}", "convert the model")
        fits = (self.experts is not None) == own.endswith("_moe") or own == "qwen3_next"  # which may have either
        limit = f"stated with architecture = {own!r} if that has any"
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
        self._check_windows()
        _require_positive("rms_norm_eps", self.rms_norm_eps)
        finite = 1 < self.rope_theta < math.inf
        require(finite, "rope_theta", self.rope_theta, "finite and > 1", CHECK_CONFIG)
        reach, name = self.max_position_embeddings, "max_position_embeddings"
        require(0 < reach <= MOST_POSITIONS, name, reach, f"between 1 and {MOST_POSITIONS}", CHECK_CONFIG)
        self._check_tokens()
        own, limit = self.activation, f"one of {ACTIVATIONS}"
        require(own in ACTIVATIONS, "activation", own, limit, "use another checkpoint")
        for name in ("embedding_scale", "attention_scalar"):
            _require_positive(name, getattr(self, name))
        base = self.local_rope_theta
        require(base is None or 1 < base < math.inf, "local_rope_theta", base, "finite and > 1, or null", CHECK_CONFIG)

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
            limit = f"left out with architecture = {own!r}"
            require(not self.mtp, "mtp", self.mtp, limit, f"only {HYBRIDS} draft with it")
            return
        numbers = states.layers
        fits = sorted(set(numbers)) == list(numbers) and set(numbers) < set(range(self.num_layers))
        limit = f"ascending, of layers 0 to {self.num_layers - 1}, and not all of these"
        remedy = "a layer that attends is needed: use another checkpoint"
        require(fits, "delta_net.layers", numbers, limit, remedy)

    def _check_windows(self) -> None:
        """Refuse windows of no size, and of layers that are not there, have a state, or leave none without a window."""
        window, numbers = self.sliding_window, self.window_layers
        require(window is None or window > 0, "sliding_window", window, "> 0 or null", CHECK_CONFIG)
        fits = not numbers or (window is not None and self.delta_net is None)
        require(fits, "window_layers", numbers, "left out without sliding_window, or with states", CHECK_CONFIG)
        fits = sorted(set(numbers)) == list(numbers) and set(numbers) < set(range(self.num_layers))
        limit = f"ascending, of layers 0 to {self.num_layers - 1}, and not all of these"
        require(fits, "window_layers", numbers, limit, "leave them out if all layers have a window")

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

    def window_of(self, layer: int) -> int | None:
        """Return how many of the latest tokens a layer attends to, whose rows alone it keeps; None: to all."""
        return self.sliding_window if layer in self.window_layers else None

    @property
    def scaling(self) -> float:
        """The softmax scale."""
        return float((self.attention_scalar or self.head_dim) ** -0.5)

    @property
    def row_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that attend to all tokens. Cache, indexes and attention number these alone, from 0."""
        without = self.window_layers if self.delta_net is None else self.delta_net.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in without)

    @property
    def whole_window(self) -> int | None:
        """The window of all layers, within which all of them have rows; None: some layer has none."""
        return None if self.window_layers else self.sliding_window

    @property
    def without_rows(self) -> str | None:
        """What the layers are called that have something of one size instead of rows; None: there are no such layers."""
        if self.delta_net is not None:
            return "Gated DeltaNet layers"
        return "sliding windows" if self.window_layers else None

    def first_layers(self, count: int) -> ModelConfig:
        """Return the model of the first layers, of which one must attend."""
        states, experts = self.delta_net, self.experts
        if states is not None:
            states = dataclasses.replace(states, layers=tuple(layer for layer in states.layers if layer < count))
        if experts is not None:
            experts = dataclasses.replace(experts, dense_layers=tuple(n for n in experts.dense_layers if n < count))
        windows = tuple(layer for layer in self.window_layers if layer < count)
        window = self.sliding_window if windows or not self.window_layers else None
        return dataclasses.replace(
            self,
            num_layers=count,
            delta_net=states,
            experts=experts,
            mtp=False,
            sliding_window=window,
            window_layers=windows if len(windows) < count else (),
        )

    def with_row_layers(self, count: int) -> ModelConfig:
        """Return a model of so many layers, which all have rows: what is kept of rows is the same for both."""
        own = "qwen3" if self.delta_net is not None else self.architecture
        experts = self.experts if own == self.architecture else None
        plain = dataclasses.replace(self, delta_net=None, architecture=own, experts=experts, mtp=False)
        return dataclasses.replace(plain, num_layers=count, sliding_window=None, window_layers=())

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
