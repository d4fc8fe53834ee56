"""The command line of the builder. Flags of the cache and of the methods are made from their config classes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvseek.builder.compile_cuda import ARCHITECTURES
from kvseek.engine.config import CHOICES, CacheConfig, EngineConfig, ModelConfig, from_dict
from kvseek.plugins.registry import METHODS, get_method

LIMITS = {
    "max_batch_size": "most requests that are decoded together",
    "max_input_len": "most tokens of a prompt (default: max_seq_len)",
    "max_seq_len": "most tokens of a prompt and its answer (default: what the model allows, at most 131072)",
    "prefill_chunk_tokens": "prompt tokens that one unit of prefill processes",
}
CHOICE_SUMMARIES = {
    "dtype": "of weights and cache; float16 on cuda only",
    "device": "what the engine runs on",
    "kernels": "compiled, or PyTorch (on the CPU)",
}
DEFAULT_MAX_SEQ_LEN = 131_072  # tokens; a longer default would reserve host memory that few requests use


@dataclass(frozen=True)
class BuildOptions:
    """What was asked for. Dictionaries hold only the fields that were given."""

    model: Path
    output_dir: Path
    method: str
    dtype: str
    kernels: str
    limits: dict[str, int]
    cache: dict[str, Any]
    method_config: dict[str, Any]
    device: str = "cpu"
    cuda_archs: tuple[int, ...] = ()  # what kernels are compiled for; empty with device = "cpu"
    tokenizer: Path | None = None  # directory of the tokenizer; None: it lies with the model
    force: bool = False
    quiet: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the engine's contents, beside the model: JSON values."""
        names = ("method", "dtype", "device", "cuda_archs", "kernels", "limits", "cache", "method_config")
        tokenizer = None if self.tokenizer is None else self.tokenizer.resolve().name
        return {"tokenizer": tokenizer, **{name: getattr(self, name) for name in names}}

    def engine_config(self, model: ModelConfig) -> EngineConfig:
        """Complete the options for a model; raises ConfigError on a value out of range.

        Method fields are stored with their defaults, so that an engine keeps them when a later version changes one.
        """
        method = get_method(self.method)
        limits = {"max_seq_len": min(model.max_position_embeddings, DEFAULT_MAX_SEQ_LEN), **self.limits}
        limits.setdefault("max_input_len", limits["max_seq_len"])
        return EngineConfig(
            model=model,
            method=self.method,
            method_config=dataclasses.asdict(method.configure(self.method_config)),
            cache=from_dict(CacheConfig, {**method.cache_defaults, **self.cache}, "cache"),
            dtype=self.dtype,
            device=self.device,
            kernels=self.kernels,
            **limits,
        )


def parse(argv: Sequence[str] | None) -> BuildOptions:
    """Parse the command line; exits with status 2 and a message on unknown flags and malformed values."""
    parser = _parser()
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = sorted(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; known flags: {', '.join(flags)}")
    values = vars(namespace)
    for method in set(METHODS) - {namespace.method}:
        if others := _below(values, method):
            own = [f"--{namespace.method}.{f.name}" for f in _fields(get_method(namespace.method).config_class)]
            parser.error(
                f"--{method}.{next(iter(others))} belongs to --method {method}; "
                f"flags of --method {namespace.method}: {', '.join(own) or 'none'}"
            )
    if "cuda_archs" in values and namespace.device != "cuda":
        parser.error(f"--cuda_archs belongs to --device cuda; --device is {namespace.device}")
    return BuildOptions(
        model=namespace.model,
        output_dir=namespace.output_dir,
        method=namespace.method,
        dtype=namespace.dtype,
        kernels=namespace.kernels,
        limits={name: values[name] for name in LIMITS if name in values},
        cache=_below(values, "cache"),
        method_config=_below(values, namespace.method),
        device=namespace.device,
        tokenizer=namespace.tokenizer,
        cuda_archs=values.get("cuda_archs", ARCHITECTURES if namespace.device == "cuda" else ()),
        force=namespace.force,
        quiet=namespace.quiet,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvseek build", allow_abbrev=False, description="Turn a Llama, Mistral or Qwen checkpoint into an engine."
    )
    add = parser.add_argument
    kinds = "Hugging Face directory with safetensors, TensorRT-LLM checkpoint directory, or a .gguf file"
    add("--model", type=Path, required=True, help=kinds)
    add("--tokenizer", type=Path, metavar="DIR", help="directory of the tokenizer (default: it lies with the model)")
    add("--output_dir", type=Path, required=True, help="engine directory to write")
    add("--method", choices=list(METHODS), required=True, help="what runs inside the attention operator")
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    for name, summary in CHOICE_SUMMARIES.items():
        add(f"--{name}", choices=CHOICES[name], default=defaults[name], help=f"{summary} (default: %(default)s)")
    archs = f"compute capabilities that GPU kernels are compiled for (default: {','.join(map(str, ARCHITECTURES))})"
    add("--cuda_archs", type=architectures, default=argparse.SUPPRESS, metavar="80,90,...", help=archs)
    for name, summary in LIMITS.items():
        stated = summary if "default" in summary else f"{summary} (default: {defaults[name]})"
        add(f"--{name}", type=int, default=argparse.SUPPRESS, metavar="N", help=stated)
    add("--force", action="store_true", help="build even if the engine directory is up to date")
    add("--quiet", action="store_true", help="print errors only")
    own = [f"{key} {value} of {name}" for name in METHODS for key, value in get_method(name).cache_defaults.items()]
    note = f"; other defaults: {', '.join(own)}" if own else ""
    _add_fields(parser, "cache", CacheConfig, f"four-region cache, sizes in tokens{note}")
    for method in METHODS:
        _add_fields(parser, method, get_method(method).config_class, f"--method {method}")
    return parser


def _add_fields(parser: argparse.ArgumentParser, prefix: str, config_class: type[Any], title: str) -> None:
    """Add one flag for each field of a config class; only those that are given appear in the namespace."""
    hints = typing.get_type_hints(config_class)
    group = parser.add_argument_group(title)
    for field in _fields(config_class):
        kind, metavar = _value_type(hints[field.name])
        text = f"default: {json.dumps(_default(field))}".replace("%", "%%")
        flag = f"--{prefix}.{field.name}"
        group.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _fields(config_class: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(config_class)


def _default(field: dataclasses.Field[Any]) -> Any:
    """Default of a field as JSON values; "required" where there is none."""
    if field.default_factory is not dataclasses.MISSING:
        value: Any = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return "required"
    return _plain(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _value_type(hint: Any) -> tuple[Callable[[str], Any], str]:
    """How the text of a flag becomes a value, and what the help calls it."""
    known: dict[Any, tuple[Callable[[str], Any], str]] = {
        str: (str, "TEXT"),
        int: (int, "N"),
        float: (float, "X"),
        bool: (boolean, "true|false"),
    }
    return known.get(hint, (json_value, "JSON"))


def architectures(text: str) -> tuple[int, ...]:
    """Parse compute capabilities, 10 × major + minor, with commas between them; ascending, each once."""
    return tuple(sorted({int(number) for number in text.split(",")}))


def boolean(text: str) -> bool:
    """Parse true or false."""
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def json_value(text: str) -> Any:
    """Parse JSON: what structured and optional fields take."""
    return json.loads(text)


def _below(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Values of the flags --prefix.NAME, by NAME."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
