"""Options of the builder, from its command line or from Python: what to build, to plan, to inspect, to verify or to check."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kvseek.builder.checkpoints.weights import OwnNumbers
from kvseek.builder.compile.cuda import ARCHITECTURES
from kvseek.builder.flags import CALIBRATE_TOKENS, LIMITS, FlagParser
from kvseek.core.config import (
    CHOICES,
    GROUPED,
    PRECISION,
    WEIGHT_GROUP,
    WEIGHT_GROUPS,
    BlockSparseConfig,
    CacheConfig,
    EngineConfig,
    TensorRtConfig,
    group_inputs,
    largest_group,
)
from kvseek.core.errors import ConfigError, from_dict, read_fields, refuse_unknown, require
from kvseek.core.model_config import MOST_POSITIONS, ModelConfig
from kvseek.core.weight_only import INT4, INT8_ASYMMETRIC, INT8_GROUPS, NONE
from kvseek.plugins.registry import METHODS, PEERS, get_method

DEFAULT_MAX_SEQ_LEN = 131_072  # tokens; a longer default would reserve host memory that few requests use
BUILD_ONLY, PLAN_ONLY = ("force", "quiet"), ("gpu_memory", "host_memory")
CALIBRATE = ("calibrate", "calibrate_tokens", "calibrate_window")
ENGINE_FIELDS = (*CHOICES, "weight_group", "quantize_lm_head")  # of EngineConfig, each with a flag of its name
OF_CHECKPOINT = (PRECISION, "weight_group")  # of these, those whose default is the checkpoint's
OF_FILES = (INT8_GROUPS, INT8_ASYMMETRIC)  # weight_only_precisions that nothing is rounded to
MODES = ("plan", "inspect", "verify")
NEEDED = {"tensorrt": ("runtime", "tensorrt"), "block_sparse": ("prefill_attention", "block_sparse")}  # for their flags
GROUPS = ("cache", *NEEDED)  # of flags, by what comes before the dot; the chosen method is another one


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that was asked for. `choices` are the values of ENGINE_FIELDS, of OF_CHECKPOINT only those that were given.

    The other dictionaries hold only what was given.
    """

    model: Path
    method: str
    choices: dict[str, Any]
    limits: dict[str, int]
    cache: dict[str, Any]
    method_config: dict[str, Any]
    tensorrt: dict[str, Any] = field(default_factory=dict)
    block_sparse: dict[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None  # directory of the tokenizer; None: it lies with the model
    text_only: bool = False  # leave out what a checkpoint has for images
    mtp: bool = False  # with the multi-token-prediction head
    preset: str | None = None  # of the method (plugins/registry.py); fields that were given override it

    @property
    def ranks(self) -> int:
        """Ranks that the engine is divided among."""
        return self.limits.get("tp_size", EngineConfig.tp_size)

    def engine_config(self, model: ModelConfig, own: OwnNumbers | None = None) -> EngineConfig:
        """Complete the options for a model; raises ConfigError on a value out of range.

        Method fields are stored with their defaults, so that an engine keeps them when a later version changes one.

        Parameters
        ----------
        own : OwnNumbers, optional
            How an engine computes with the checkpoint's own numbers, as this one does, unless something else was asked for.
        """
        choices = self._with_precision(model, own)
        method = get_method(self.method)
        fields, cache = method.preset(self.preset)
        settings = method.configure(fields | self.method_config)
        reach = min(model.max_position_embeddings, model.whole_window or MOST_POSITIONS)
        if self.choices["runtime"] == "tensorrt":
            reach = min(reach, model.short_reach)
        limits: dict[str, Any] = {"max_seq_len": min(reach, DEFAULT_MAX_SEQ_LEN), **self.limits}
        limits.setdefault("max_input_len", limits["max_seq_len"])
        tensorrt = from_dict(TensorRtConfig, self.tensorrt, "tensorrt")
        if self.choices["runtime"] == "tensorrt" and tensorrt.form == "engine":
            limits["prefill_chunk_tokens"] = limits["max_input_len"]  # one plan reads prompts whole
        config = EngineConfig(
            model=model,
            method=self.method,
            method_config=dataclasses.asdict(settings),
            cache=from_dict(CacheConfig, {**method.traits(settings).cache_defaults, **cache, **self.cache}, "cache"),
            tensorrt=tensorrt,
            block_sparse=from_dict(BlockSparseConfig, self.block_sparse, "block_sparse"),
            **choices,
            **limits,
        )
        if config.prefill_attention == "block_sparse":
            _refuse_dense_sizes(config)
        return config

    def _with_precision(self, model: ModelConfig, own: OwnNumbers | None) -> dict[str, Any]:
        """Complete `choices` by how weights are stored."""
        asked, choices = self.choices.get(PRECISION), dict(self.choices)
        precision = None if own is None else own.precision
        inputs = model.matrix_inputs(max(1, self.ranks)).values()  # no ranks are refused by EngineConfig
        if own is not None and own.stated and asked not in (None, NONE, precision):
            limit = f"{NONE}: {own.why}" if precision == NONE else f"{precision}, which the checkpoint has, or {NONE}"
            require(False, PRECISION, asked, limit, "the checkpoint is quantised, and would be rounded a second time")
        fits = asked not in OF_FILES or asked == precision
        limit = "left out: not all layers have such numbers in the file"
        require(fits, PRECISION, asked, limit, "choose int8 or int4")
        if own is not None and asked is None:
            if choices["device"] == "cuda":
                narrow = choices["dtype"] != "float32"
            else:
                narrow = choices["dtype"] == "bfloat16" or own.precision not in GROUPED
            multiple = group_inputs(own.precision, WEIGHT_GROUP)
            if choices["device"] == "cuda" and own.precision == INT8_GROUPS:
                multiple *= 2  # builder/compile/cuda.py says why
            whole = all(size % multiple == 0 for size in inputs)
            choices[PRECISION] = own.precision if narrow and whole and choices["runtime"] == "torch" else NONE
        if own is not None and choices.get(PRECISION) == own.precision != NONE:
            choices["quantize_lm_head"] |= own.head
            choices["weight_formats"] = dict(own.formats)
        if choices.get(PRECISION) == INT4:
            most = own.group if own is not None and precision == INT4 else WEIGHT_GROUPS[-1]
            group = choices.setdefault("weight_group", largest_group(inputs, most) or WEIGHT_GROUP)
            limit = f"<= {most}, the checkpoint's" if most < WEIGHT_GROUPS[-1] else f"one of {WEIGHT_GROUPS}"
            require(group <= most, "weight_group", group, limit, "leave it out")
        return choices


def _refuse_dense_sizes(config: EngineConfig) -> None:
    """Raise ConfigError if every prompt would attend densely, whatever prefill_attention says."""
    own, remedy = config.block_sparse, "no prompt would be sparse: lower it, or leave --prefill_attention out"
    for name in ("budget", "dense_tail"):
        value, limit = getattr(own, name), f"< max_input_len = {config.max_input_len}"
        require(value < config.max_input_len, f"block_sparse.{name}", value, limit, remedy)
    layers, value = len(config.model.row_layers), own.dense_layers
    of_rows = "" if config.model.without_rows is None else " that attend"
    require(value < layers, "block_sparse.dense_layers", value, f"< num_layers{of_rows} = {layers}", remedy)


@dataclass(frozen=True, kw_only=True)
class BuildOptions(EngineOptions):
    """An engine to build, and where."""

    output_dir: Path
    cuda_archs: tuple[int, ...] = ()  # what kernels are compiled for; empty with device = "cpu"
    force: bool = False
    quiet: bool = False
    check: bool | None = None  # compare with transformers; None: if the model is small
    calibrate: Path | None = None  # a text; None: no calibration
    calibrate_tokens: int = CALIBRATE_TOKENS
    calibrate_window: int | None = None  # None: as builder/calibration.py chooses

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that decide the engine's contents, beside the model, as JSON values."""
        names = ("method", "preset", "mtp", "choices", "cuda_archs", "limits", "method_config", *GROUPS, *CALIBRATE[1:])
        tokenizer = None if self.tokenizer is None else self.tokenizer.resolve().name
        return {"tokenizer": tokenizer, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, kw_only=True)
class FitOptions(EngineOptions):
    """An engine, and the bytes of memory that it is to fit into: `--plan`.

    Attributes
    ----------
    gpu_memory : int or None
        Of each rank's GPU; None with device = "cpu".
    host_memory : int
        Of all ranks together.
    tp_size : int
        Ranks. Not in `limits`, because one may plan ranks on GPUs, which cannot be built yet.
    """

    gpu_memory: int | None
    host_memory: int
    tp_size: int = 1
    as_json: bool = False

    @property
    def ranks(self) -> int:
        return self.tp_size


@dataclass(frozen=True)
class LookOptions:
    """An engine directory to look at.

    Attributes
    ----------
    mode : str
        "inspect" prints what is there, "verify" checks the files, "check" compares logits with transformers'.
    model : Path or None
        With "check", the checkpoint; None: what the manifest names, in the working directory or beside the engine.
    """

    mode: str
    directory: Path
    model: Path | None = None
    as_json: bool = False


Options = BuildOptions | FitOptions | LookOptions


def parse(argv: Sequence[str] | None) -> Options:
    """Parse the command line; exits with status 2 and a message on unknown flags and malformed values."""
    parser = FlagParser(sys.argv[1:] if argv is None else argv)
    values = vars(parser.parse_args(argv))
    mode = next((mode for mode in MODES if mode in values), "build")
    if mode == "build" and values.get("check") and "method" not in values:
        mode = "check"  # of an engine that is there: a build needs a method
    _refuse_misplaced(parser, mode, values)
    if mode in ("inspect", "verify"):
        return LookOptions(mode, values[mode], as_json="json" in values)
    sizes = PLAN_ONLY[1:] if values.get("device") == "cpu" else PLAN_ONLY
    wanted = ("model", "method", *(sizes if mode == "plan" else ("output_dir",)))
    wanted = ("output_dir",) if mode == "check" else wanted
    if missing := [f"--{name}" for name in wanted if name not in values]:
        parser.error(f"the following arguments are required{' with --plan' * (mode == 'plan')}: {', '.join(missing)}")
    if mode == "check":
        return LookOptions(mode, values["output_dir"], values.get("model"))
    _refuse_other_methods(parser, values)
    _refuse_idle(parser.error, values)
    return _fit_options(parser, values) if mode == "plan" else _build_options(parser.error, values)


def build_options(values: Mapping[str, Any]) -> BuildOptions:
    """Make the options of an engine to build from Python values instead of flags.

    Parameters
    ----------
    values : mapping of str to Any
        "model", "method" and "output_dir", and values that differ from the defaults: the other flags of `kvseek build` by
        their names, without those of calibration. "cache", "method_config", "tensorrt" and "block_sparse" are dictionaries of
        their fields.

    Raises
    ------
    ConfigError
        On an unknown name, a value of the wrong type, or a value that has no effect because of other values. Values
        out of range are found by `EngineOptions.engine_config`.
    """
    groups = (*GROUPS, "method_config")
    others = (
        "model",
        "output_dir",
        "method",
        "preset",
        "tokenizer",
        "text_only",
        "mtp",
        "cuda_archs",
        "quiet",
        "check",
    )
    known = (*ENGINE_FIELDS, *LIMITS, *groups, *others)
    refuse_unknown(dict(values), known, "build options")
    get_method(values["method"])  # raises if it is unknown
    flat = {name: value for name, value in values.items() if name not in groups}
    read_fields(EngineConfig, (*ENGINE_FIELDS, *LIMITS), flat, "build options")
    for group in groups:
        fields = values.get(group, {})
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{group} = {fields!r}: must be a dictionary of its fields, such as {{'sink': 64}}")
        prefix = values["method"] if group == "method_config" else group
        flat |= {f"{prefix}.{name}": value for name, value in fields.items()}
    limit, remedy = "True, False or None", "None checks small models"
    require(flat.get("check") in (True, False, None), "check", flat.get("check"), limit, remedy)
    if not flat.get("quiet"):
        flat.pop("quiet", None)  # as a flag, which is there or is not
    _refuse_idle(_raise, flat)
    return _build_options(_raise, flat)


def _raise(message: str) -> NoReturn:
    raise ConfigError(message.replace("--", ""))  # these are arguments, not flags


def _refuse_misplaced(parser: FlagParser, mode: str, values: dict[str, Any]) -> None:
    """End with a message if a flag was given that the mode would ignore."""
    misplaced = {
        "build": {*PLAN_ONLY, "json"},
        "plan": {*BUILD_ONLY, *CALIBRATE, "check", "inspect", "verify"},
        "inspect": set(values) - {"inspect", "json"},
        "verify": set(values) - {"verify"},
        "check": set(values) - {"check", "output_dir", "model"},
    }[mode]
    if found := [name for name in values if name in misplaced]:
        where = f"does not go with --{mode}" if mode != "build" else "goes only with --plan"
        where += " without --method" * (mode == "check")
        where += " or --inspect" * (mode == "build" and found[0] == "json")
        parser.error(f"--{found[0]} {where}; leave it out")


def _refuse_other_methods(parser: FlagParser, values: dict[str, Any]) -> None:
    """End with a message if a flag of another method was given."""
    chosen = values["method"]
    for method in {*METHODS, *PEERS} - {chosen}:
        if others := _below(values, method):
            own = [f"--{chosen}.{f.name}" for f in dataclasses.fields(get_method(chosen).config_class)]
            parser.error(
                f"--{method}.{next(iter(others))} belongs to --method {method}; "
                f"flags of --method {chosen}: {', '.join(own) or 'none'}"
            )


def _refuse_idle(error: Callable[[str], NoReturn], values: dict[str, Any]) -> None:
    """End with a message if a flag was given that the runtime, or the attention of prompts, would ignore."""
    for group, (name, wanted) in NEEDED.items():
        given, found = _below(values, group), values.get(name, getattr(EngineConfig, name))
        if given and found != wanted:
            error(
                f"--{group}.{next(iter(given))} belongs to --{name} {wanted}; --{name} is {found}: leave the flag out"
            )
    if values.get("runtime") != "tensorrt":
        return
    if "calibrate" in values:
        error("--calibrate belongs to --runtime torch: plans hold the weights as they are; leave it out")
    if "prefill_chunk_tokens" in values and values.get("tensorrt.form", TensorRtConfig.form) == "engine":
        error(
            "--prefill_chunk_tokens does not go with --tensorrt.form engine, which reads a prompt in one call; leave it "
            "out, or build with --tensorrt.form segments"
        )


def _build_options(error: Callable[[str], NoReturn], values: dict[str, Any]) -> BuildOptions:
    engine = _engine_values(values)
    device = engine["choices"]["device"]
    if "cuda_archs" in values and device != "cuda":
        error(f"--cuda_archs belongs to --device cuda; --device is {device}")
    archs = values.get("cuda_archs", ARCHITECTURES if device == "cuda" else ())
    if "calibrate" not in values and (alone := [name for name in CALIBRATE if name in values]):
        error(f"--{alone[0]} goes only with --calibrate TEXT; leave it out, or name a text")
    engine |= {name: name in values for name in BUILD_ONLY}
    engine |= {name: values[name] for name in CALIBRATE if name in values}
    return BuildOptions(**engine, output_dir=values["output_dir"], cuda_archs=archs, check=values.get("check"))


def _fit_options(parser: FlagParser, values: dict[str, Any]) -> FitOptions:
    engine = _engine_values({"device": "cuda", **values})
    device = engine["choices"]["device"]
    if device != "cuda" and "gpu_memory" in values:
        parser.error(f"--gpu_memory belongs to --device cuda; --device is {device}: leave it out")
    tp_size = engine["limits"].pop("tp_size", EngineConfig.tp_size)
    sizes: dict[str, Any] = {name: values.get(name) for name in PLAN_ONLY}
    return FitOptions(**engine, **sizes, tp_size=tp_size, as_json="json" in values)


def _engine_values(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of EngineOptions."""
    defaults = {name: getattr(EngineConfig, name) for name in ENGINE_FIELDS}
    return {
        "model": values["model"],
        "method": values["method"],
        "tokenizer": values.get("tokenizer"),
        "text_only": bool(values.get("text_only")),
        "mtp": bool(values.get("mtp")),
        "choices": {
            name: values.get(name, defaults[name])
            for name in ENGINE_FIELDS
            if name in values or name not in OF_CHECKPOINT
        },
        "limits": {name: values[name] for name in LIMITS if name in values},
        "preset": values.get("preset"),
        "method_config": _below(values, values["method"]),
        **{group: _below(values, group) for group in GROUPS},
    }


def _below(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Values of the flags --prefix.NAME, by NAME."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
