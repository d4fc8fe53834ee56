"""Writes repositories of Triton's models: kvseek's models, filled in for an engine. Also the command `kvseek repository`."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path

from google.protobuf import text_encoding, text_format
from tritonclient.grpc import model_config_pb2

from kvseek.core.command_line import Parser, tells_errors
from kvseek.core.config import read_config
from kvseek.core.manifest import verify
from kvseek.server.errors import ServerError
from kvseek.server.requests.models import LAYOUTS
from kvseek.server.settings import ENGINE_FLAGS, KEY_FLAGS, ServeSettings, add_flags, settings_of

CONFIG = "config.pbtxt"
FLAGS = {**ENGINE_FLAGS, **KEY_FLAGS}
PARAMETERS = {"model", "engine_dir", "socket", "settings"}  # of each of kvseek's models
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def write_models(
    target: Path,
    engine_dir: Path,
    settings: ServeSettings,
    socket: Path | None = None,
    *,
    name: str = "",
    aliases: bool = False,
    decoupled: bool = True,
) -> list[str]:
    """Write an engine's models into the repository `target`; returns their names.

    Parameters
    ----------
    socket : Path, optional
        Socket of the engine process. Without it the models find or start that process themselves (server/engine/shared.py).
    name : str
        What the names of the models begin with, so that a repository can have the models of several engines.
    aliases : bool
        Whether to write the models' other names too, each as a model of its own.
    decoupled : bool
        Whether a request may have several responses.
    """
    values = {
        "max_batch_size": str(read_config(engine_dir).max_batch_size),
        "decoupled": str(decoupled).lower(),
        "engine_dir": _escaped(str(engine_dir.resolve())),
        "socket": _escaped("" if socket is None else str(socket)),
        "settings": _escaped(settings.to_json()),
    }
    layout = LAYOUTS[settings.layout]
    models = layout.names if aliases else {model: model for model in layout.models}
    prefix = f"{name}_" if name else ""
    with as_file(files("kvseek.model_repository")) as source:
        for own, model in models.items():
            folder = target / f"{prefix}{own}"
            (folder / "1").mkdir(parents=True)
            shutil.copy(source / "model.py", folder / "1")
            text = (source / layout.name / model / CONFIG).read_text(encoding="utf-8")
            (folder / CONFIG).write_text(_filled_in(text, values | {"name": folder.name}), encoding="utf-8")
    return [f"{prefix}{own}" for own in models]


def read_models(repository: Path) -> dict[str, Mapping[str, str]]:
    """Read the parameters of the models of a repository that `write_models` wrote, by name; raises ServerError."""
    found: dict[str, Mapping[str, str]] = {}
    for path in sorted(repository.glob(f"*/{CONFIG}")):
        try:
            config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
        except (text_format.ParseError, UnicodeDecodeError):
            continue  # a model of somebody else
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        if parameters.keys() >= PARAMETERS:
            found[path.parent.name] = parameters
    if not found:
        raise ServerError(
            f"{repository} has no model of kvseek; write one with kvseek repository --output {repository}"
        )
    return found


def _escaped(text: str) -> str:
    """Escape a text for a string of Protocol Buffers' text format."""
    escaped: str = text_encoding.CEscape(text, as_utf8=True)
    return escaped


def _filled_in(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    return text


def make_parser() -> Parser:
    """Make the parser of `kvseek repository`."""
    parser = Parser(
        prog="kvseek repository", description="Write a model repository for a tritonserver that you start yourself."
    )
    parser.add_argument(
        "--engine_dir", type=Path, action="append", required=True, help="what kvseek build wrote; once for each engine"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        help="of the engine at the same place: its models are NAME_tensorrt_llm and so on (default: no prefix, one engine)",
    )
    parser.add_argument(
        "--decoupled_mode",
        choices=("true", "false"),
        default="true",
        help="false: one response a request, for clients that use ModelInfer; no streams (default: %(default)s)",
    )
    add_flags(parser, FLAGS)
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of `kvseek repository`."""
    return make_parser().parse_args(argv)  # type: ignore[no-any-return]


def _checked_names(names: Sequence[str], engines: Sequence[Path]) -> list[str]:
    """Return a name for each engine; raises ServerError."""
    if not names and len(engines) == 1:
        return [""]
    if len(names) != len(engines):
        raise ServerError(f"--name is given {len(names)} times: must be {len(engines)}, once for each --engine_dir")
    for name in names:
        if not NAME.fullmatch(name):
            raise ServerError(f"--name = {name!r}: must be 1 to 64 letters, digits or _.-; choose another")
        if names.count(name) > 1:
            raise ServerError(f"--name = {name!r} is given twice: must be once; choose another")
    return list(names)


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvseek repository`; returns the exit status."""
    arguments = parse_arguments(argv)
    target: Path = arguments.output
    part = target.with_name(f"{target.name}.part")
    try:
        settings = settings_of(arguments, FLAGS)
        _ = settings.keys  # a wrong file is an error here already
        names = _checked_names(arguments.name, arguments.engine_dir)
        for directory in arguments.engine_dir:
            verify(directory)
        if target.exists():
            raise ServerError(f"--output = {target}: is there already; choose another folder, or remove it")
        written = [
            model
            for directory, name in zip(arguments.engine_dir, names, strict=True)
            for model in write_models(
                part, directory, settings, name=name, aliases=True, decoupled=arguments.decoupled_mode == "true"
            )
        ]
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    print(f"wrote {', '.join(written)}; start them with: tritonserver --model-repository {target}")
    print(f"(the tritonserver of the wheel nvidia-pytriton: kvseek tritonserver --model-repository {target})")
    return 0
