"""config.json of an engine directory, in the objects that trtllm-build writes: the model, and what the build decided."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .config import CONFIG_FILE, FORMAT_VERSION, EngineConfig, ModelConfig
from .errors import EngineDirectoryError, from_dict, read_fields, refuse_unknown, require

# Fields of EngineConfig that lie beside those of its `model` in pretrained_config. All others lie in build_config.
PRETRAINED = ("dtype",)


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
