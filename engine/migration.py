"""Engine directories of another format version: each is refused with what to do, an older one with the command for it.

Version 1 had the fields of EngineConfig side by side in config.json, `model` an object among them, and the weights in
weights-*.safetensors with weights.index.json.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvseek.plugins.registry import get_method

from .config import CONFIG_FILE, FORMAT_VERSION, CacheConfig, EngineConfig, TensorRtConfig
from .errors import ConfigError, EngineDirectoryError
from .fields import from_dict

CHANGES = (
    "config.json is divided into pretrained_config and build_config, and weights are rank0-*.safetensors with "
    "rank0.index.json"
)


def check_format(directory: Path) -> None:
    """Raise EngineDirectoryError if the engine is of another format version, as `refuse_other_format` does.

    A config.json that is missing or no JSON object states no version: checksums tell what happened to it.
    """
    try:
        document = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(document, dict):
        refuse_other_format(document, directory)


def refuse_other_format(document: dict[str, Any], directory: Path) -> None:
    """Raise EngineDirectoryError unless `document`, config.json of `directory`, is of this format version.

    The message has both versions. For an older one it ends with a line that is the command to build the engine again.
    """
    found = document.get("format_version")
    if type(found) is not int or found < 1:
        raise EngineDirectoryError(_no_version(document, directory))
    if found > FORMAT_VERSION:
        raise EngineDirectoryError(_from_the_future(found, document, directory))
    if found < FORMAT_VERSION:
        raise EngineDirectoryError(_outdated(found, document, directory))


def rebuild_command(config: EngineConfig, output_dir: Path) -> str:
    """The shell command that builds an engine of this configuration, with MODEL in the checkpoint's place.

    Flags whose values are the defaults are left out. --max_seq_len is always there: its default depends on the model.
    """
    words = ["--model", "MODEL", "--method", config.method, "--output_dir", str(output_dir)]
    handled = {"model", "method", "method_config", "cache", "max_input_len", "max_seq_len", "tensorrt"}
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig) if f.name not in handled}
    for name, default in defaults.items():
        if (value := getattr(config, name)) != default:
            words += _flag(name, value, EngineConfig)
    words += ["--max_seq_len", str(config.max_seq_len)]
    if config.max_input_len != config.max_seq_len:
        words += ["--max_input_len", str(config.max_input_len)]
    method = get_method(config.method)
    words += _changed_flags("tensorrt", config.tensorrt, TensorRtConfig())
    words += _changed_flags("cache", config.cache, CacheConfig(**method.cache_defaults))
    words += _changed_flags(config.method, method.configure(config.method_config), method.configure({}))
    return shlex.join(["kvseek", "build", *words])


def _changed_flags(prefix: str, values: Any, defaults: Any) -> list[str]:
    """Flags of the fields of a config dataclass that differ from those of `defaults`."""
    words = []
    for name, value in dataclasses.asdict(values).items():
        if value != dataclasses.asdict(defaults)[name]:
            words += _flag(name, value, type(values), f"{prefix}.")
    return words


def _flag(name: str, value: Any, config_class: type[Any], prefix: str = "") -> list[str]:
    """A flag and its value, as builder/flags.py reads it: text as it is, all else as JSON."""
    is_text = typing.get_type_hints(config_class)[name] is str
    return [f"--{prefix}{name}", value if is_text else json.dumps(value)]


def _outdated(found: int, document: dict[str, Any], directory: Path) -> str:
    try:
        values = {name: value for name, value in document.items() if name != "format_version"}
        config = from_dict(EngineConfig, values, CONFIG_FILE)
        command = rebuild_command(config, directory)
        unstated = "--tokenizer and --cuda_archs" if config.device == "cuda" else "--tokenizer"
        note = f"{CONFIG_FILE} does not state {unstated}: add what the engine was built with"
    except ConfigError as error:
        command = f"kvseek build --model MODEL --method METHOD --output_dir {shlex.quote(str(directory))}"
        note = f"its flags cannot be read ({error}): put METHOD in, and add the flags that it was built with"
    return (
        f"{directory} is an engine of format version {found}, kvseek {version('kvseek')} reads version {FORMAT_VERSION}: "
        f"{CHANGES}. Build it again from its checkpoint, MODEL in this command; {note}:\n{command}"
    )


def _from_the_future(found: int, document: dict[str, Any], directory: Path) -> str:
    writer = document.get("version")
    newer = f"kvseek {writer}" if isinstance(writer, str) else "a newer kvseek"
    return (
        f"{directory} is an engine of format version {found}, written by {newer}; kvseek {version('kvseek')} reads "
        f"version {FORMAT_VERSION}: install the kvseek that wrote it or a newer one, or build an engine with this one"
    )


def _no_version(document: dict[str, Any], directory: Path) -> str:
    path = directory / CONFIG_FILE
    if "format_version" in document:
        return (
            f"{path}: format_version = {document['format_version']!r}: must be a whole number >= 1, "
            f"{FORMAT_VERSION} for this kvseek; the file is damaged or was edited: build the engine again, or copy it "
            "again from where it was built"
        )
    kind = "the engine that trtllm-build wrote" if "pretrained_config" in document else "a model's checkpoint"
    return (
        f"{path} has no format_version: {directory} is no engine directory of kvseek, or it was edited; if it is {kind}, "
        "make an engine with kvseek build, from the checkpoint"
    )
