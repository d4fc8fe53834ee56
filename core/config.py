"""Configuration of an engine: frozen dataclasses, and config.json of an engine directory, in which unknown keys are errors.

A field has one name through the command line (``--max_seq_len``), the JSON of the engine directory and the code. The JSON has the
objects that trtllm-build writes: the model, and what the build decided.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .errors import EngineDirectoryError, from_dict, read_fields, refuse_unknown, require
from .model_config import ModelConfig

FORMAT_VERSION = 3  # the format of engine directories
CONFIG_FILE = "config.json"
EXTENT_TOKENS = 1024  # tokens in one extent of the row pool and of every index array
# Values of weight_only_precision: integers that share their scales in groups.
GROUPED = ("int4", "int8_groups", "int8_asymmetric")
FP8_GROUPS = "fp8_groups"  # another one, of float8_e4m3fn
WEIGHT_GROUP = 32  # inputs of a group of GGUF's blocks (core/weight_only.py), and of INT4's by default
WEIGHT_GROUPS = (32, 64, 128)  # values of EngineConfig.weight_group
# Inputs of a group of int8_asymmetric: the fewest that share a scale in blocks of GGUF, and in NVFP4
ASYMMETRIC_GROUP = 16
FP8_GROUP = 128  # inputs of a group of FP8_GROUPS: those of the blocks of published checkpoints
MOST_DRAFTED = 7  # tokens of a draft: eight rows of a request are a small batch
STATE_BLOCK = 64  # tokens whose changes of a Gated DeltaNet layer's state are computed together
KEY_BLOCK = 64  # tokens that sparse attention of prompts chooses together
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

        fits = self.reuse_state_tokens % STATE_BLOCK == 0 < self.reuse_state_tokens
        limit = f"a multiple of {STATE_BLOCK}"
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
        fits = self.runtime == "torch" or self.model.architecture != "gemma3"
        require(fits, "runtime", self.runtime, "'torch' with Gemma", "plans have no such: leave --runtime out")
        window = self.model.whole_window
        within = window is None or self.max_seq_len <= window
        remedy = f"all layers have a sliding window: build with --max_seq_len {window}, or use another checkpoint"
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
        layers = self.model.without_rows
        if layers is None:
            for name in ("reuse_state_tokens", "reuse_state_bytes"):
                value, usual = getattr(self.cache, name), getattr(CacheConfig, name)
                limit = f"left out with architecture = {self.model.architecture!r}"
                require(value == usual, f"cache.{name}", value, limit, "no layer keeps a state")
            return
        fits, remedy = not self.model.mtp or (self.device == "cpu" and self.tp_size == 1), "leave it out"
        limit = "left out on cuda and with tp_size > 1: one process drafts with it, on the CPU"
        require(fits, "mtp", self.model.mtp, limit, remedy)
        limit = f"'torch' with {layers}"
        require(self.runtime == "torch", "runtime", self.runtime, limit, "plans have no such: leave --runtime out")
        value, remedy = self.cache.cached_prefill, "what they keep follows a prompt's blocks: leave it out"
        require(value == "dense", "cache.cached_prefill", value, f"'dense' with {layers}", remedy)
        fits, limit = self.tp_size == 1 or not self.cache.reuse, f"false, or left out, with {layers} and tp_size > 1"
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
            limit = f"{wanted!r} with prefill_precision = 'fp8'"
            remedy = f"build with --{name} {wanted}, or leave that out"
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
