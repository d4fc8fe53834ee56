"""`kvseek openai`: the OpenAI port alone, for an engine of a repository that `kvseek repository` wrote."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvseek.core.command_line import Parser, tells_errors
from kvseek.core.config import read_config
from kvseek.server.engine.shared import SharedEngine
from kvseek.server.errors import ServerError
from kvseek.server.frontend import Frontend
from kvseek.server.ports import CLOSED, Ports
from kvseek.server.processes import leave_no_core, raise_file_limit, run_process
from kvseek.server.settings import OPENAI_FLAGS, ServeSettings, add_flags, settings_of
from kvseek.server.triton.repository import read_models

END_SECONDS = 10.0  # time for open requests to end after SIGTERM


def find_engine(repository: Path, name: str | None) -> Mapping[str, str]:
    """Return the parameters of the models of a repository's one engine, or of the engine called `name`; raises ServerError."""
    models = read_models(repository)
    if name is not None:
        models = {model: own for model, own in models.items() if model == f"{name}_{own['model']}"}
        if not models:
            raise ServerError(
                f"--name = {name!r}: {repository} has no engine of this name; see kvseek repository --name"
            )
    engines = {(own["engine_dir"], own["settings"]): own for own in models.values()}
    if len(engines) > 1:
        raise ServerError(f"{repository} has {len(engines)} engines: must be one; choose with --name")
    return next(iter(engines.values()))


async def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM."""
    parameters = find_engine(arguments.repository, arguments.name)
    if parameters["socket"]:
        raise ServerError(
            f"{arguments.repository} belongs to a kvseek serve, which has an OpenAI port of its own; use that"
        )
    engine_dir, settings = Path(parameters["engine_dir"]), ServeSettings.from_json(parameters["settings"])
    own = settings_of(arguments, OPENAI_FLAGS)
    given = {name: value for name in OPENAI_FLAGS if (value := getattr(own, name)) != getattr(ServeSettings, name)}
    settings_here = dataclasses.replace(settings, **given)  # the rest is the repository's, its keys among them
    settings_here.check_page(read_config(engine_dir))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with Ports(0, 0, 0, arguments.openai_port).hold(arguments.host):
        pass  # an error now, before an engine is started in vain
    raise_file_limit()
    leave_no_core()
    engine = SharedEngine(engine_dir, settings)
    frontend = Frontend(engine_dir, engine.socket, settings_here, absent=engine.start_if_absent)
    try:
        ports = await frontend.start(arguments.host, Ports(CLOSED, CLOSED, CLOSED, arguments.openai_port))
        print(f"listening: {ports.describe(arguments.host)}", flush=True)
        await stop.wait()
    finally:
        await frontend.finish(END_SECONDS)
        await frontend.close()


def make_parser() -> Parser:
    """Make the parser of `kvseek openai`."""
    parser = Parser(
        prog="kvseek openai",
        description="Offer an OpenAI port for an engine that a tritonserver of your own serves; the engine is started if needed.",
    )
    parser.add_argument("--repository", type=Path, required=True, help="what kvseek repository wrote")
    parser.add_argument("--name", help="of the engine, where the repository has several")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--openai_port", type=int, default=9000, help="default: %(default)s; 0 picks a free port")
    add_flags(parser, OPENAI_FLAGS)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvseek openai`; returns the exit status."""
    return run_process(run(make_parser().parse_args(argv)))
