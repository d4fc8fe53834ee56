"""The process that clients reach over HTTP and gRPC, which also serves the metrics. `kvseek serve` starts it.

The gRPC port (server/grpc/) stands in front of Triton's. The HTTP port (server/kserve/) stands in for Triton's own HTTP endpoint,
which deeply nested JSON and floods of chunks crash, and which lets requests run on that are not streamed and whose client has
left. The OpenAI port (server/openai/) answers clients of OpenAI's API. These two and the metrics port are servers of one kind
(server/http/). All hand requests to the engine (server/requests/) and ask Triton about itself (server/triton/relay.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from kvseek.core.config import read_config
from kvseek.core.liveness import answer_at
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.grpc.checks import message_limit
from kvseek.server.grpc.server import GrpcServer
from kvseek.server.http.content import BODY_SECONDS, BodyReader, largest_body
from kvseek.server.http.health import ServerState
from kvseek.server.http.metrics import ENDPOINTS, MAX_METRICS_CONNECTIONS, MetricsRoutes
from kvseek.server.http.server import SPARE_CONNECTIONS, HttpServer
from kvseek.server.kserve import generate
from kvseek.server.kserve.inputs import schemas
from kvseek.server.kserve.metadata import MetadataRoutes
from kvseek.server.openai.app import OpenAIRoutes
from kvseek.server.requests.engine_client import EngineClient
from kvseek.server.requests.generations import Generations, wait_for_ends
from kvseek.server.requests.models import LAYOUTS, RequestFactory
from kvseek.server.triton.relay import TritonRelay

from .ports import CLOSED, Ports, read_port
from .processes import raise_file_limit, require_open_files, run_process
from .settings import ServeSettings

OTHER_FILES = 128  # open ones beside clients' connections
logger = logging.getLogger(__name__)


class Frontend:
    """All parts of the process, put together.

    Parameters
    ----------
    triton_grpc, triton_metrics : str, optional
        Triton's gRPC endpoint as gRPC names it, host:port or unix:/PATH, and host:port of its metrics. Without them the OpenAI
        port alone can be open.
    state : Path, optional
        The supervisor's file of restarts.
    body_seconds : float
        See BodyReader.
    open_models : bool
        See OpenAIRoutes.
    absent : callable
        See EngineClient.
    """

    def __init__(
        self,
        engine_dir: Path,
        socket: Path,
        settings: ServeSettings,
        triton_grpc: str | None = None,
        triton_metrics: str | None = None,
        state: Path | None = None,
        body_seconds: float = BODY_SECONDS,
        open_models: bool = False,
        absent: Callable[[], None] = lambda: None,
    ) -> None:
        layout, keys = LAYOUTS[settings.layout], settings.keys
        self._config, self._tokenizer = read_config(engine_dir), Tokenizer(engine_dir)
        self._client = EngineClient(socket, asyncio.get_running_loop(), absent)
        self._triton = None if triton_grpc is None else TritonRelay(triton_grpc)
        self._state = ServerState(self._client, self._triton, layout.names)
        metrics = MetricsRoutes(self._client, triton_metrics, state, lambda: self._state.engine_answers)
        unread, connections = settings.unread_answers(self._config), settings.most_connections(self._config)
        self._generations = Generations(self._client, settings.most_requests(self._config), unread)
        self._bodies = BodyReader(body_seconds)
        factory, models = RequestFactory(layout, self._config, self._tokenizer), schemas(layout, self._config)
        generating = generate.GenerateRoutes(self._generations, factory, models, self._bodies)
        metadata = [] if self._triton is None else MetadataRoutes(self._triton, layout.names).routes()
        self._grpc = GrpcServer(triton_grpc, self._state, models, unread, connections, self._client.refused, keys)
        self._http = HttpServer(
            [*self._state.routes(), *generating.routes(), *metadata],
            generate.ENDPOINTS,
            connections,
            default=generate.unknown,
            keys=keys,
            is_open=lambda path: path.startswith("/v2/health/") or path.endswith("/ready"),
            cors_origins=settings.cors_origins,
        )
        openai = OpenAIRoutes(engine_dir, self._config, self._tokenizer, settings, self._generations, self._bodies)
        self._openai = openai.server(self._state.ready, metrics.metrics, open_models)
        # Health is on the metrics port too, so that clients who take all connections of the HTTP port do not make the server
        # seem dead.
        self._metrics = HttpServer([*metrics.routes(), *self._state.routes()], ENDPOINTS, MAX_METRICS_CONNECTIONS)

    async def start(self, host: str, ports: Ports, held: Collection[str] = ()) -> Ports:
        """Load the tokenizer and listen at the ports that are not CLOSED; returns the ports. Raises ServerError.

        `held`: names of ports that are held.
        """
        self._bodies.make_room_for(await asyncio.to_thread(largest_body, self._config, self._tokenizer))
        servers, found = {"http": self._http, "metrics": self._metrics, "openai": self._openai}, asdict(ports)
        for name, port in found.items():
            if port == CLOSED:
                continue
            if name in servers:
                found[name] = await servers[name].start(host, port, f"--{name}_port", name in held)
            else:
                most = message_limit(self._config, self._tokenizer)
                found[name] = await self._grpc.start(host, port, most, name in held)
        return Ports(**found)

    def missing(self) -> str:
        """Name the process behind the ports that does not answer them, or nobody."""
        return "" if self._state.triton_answers else "triton"

    async def finish(self, seconds: float) -> None:
        """Take no requests any more; return when all open ones have ended or cannot end, at most so many seconds later."""
        self._state.stop_accepting()
        self._http.stop_accepting()
        self._openai.stop_accepting()
        await wait_for_ends(lambda: self._generations.busy + self._grpc.open, self._client, seconds)

    async def close(self) -> None:
        """Close all parts, and end the requests that are still open."""
        await asyncio.gather(*(server.close() for server in (self._http, self._metrics, self._grpc, self._openai)))
        await self._state.close()
        if self._triton is not None:
            await self._triton.close()
        self._generations.close()
        self._client.close()


async def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = ServeSettings.from_json(arguments.settings)
    connections = 3 * (settings.most_connections(read_config(arguments.engine_dir)) + SPARE_CONNECTIONS)
    connections += MAX_METRICS_CONNECTIONS + SPARE_CONNECTIONS
    require_open_files(connections + OTHER_FILES, settings.max_queue_size)
    frontend = Frontend(
        arguments.engine_dir,
        arguments.socket,
        settings,
        arguments.triton_grpc,
        arguments.triton_metrics,
        arguments.state,
        open_models=arguments.open_models,
    )
    try:
        wanted = Ports(arguments.http_port, arguments.grpc_port, arguments.metrics_port, arguments.openai_port)
        answering = None if arguments.alive is None else await answer_at(arguments.alive, frontend.missing)
        starting = asyncio.create_task(frontend.start(arguments.host, wanted, arguments.held_ports))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            _announce(f"listening: {starting.result().describe(arguments.host)}")
        await stopping
        starting.cancel()
        await frontend.finish(settings.drain_seconds)
        if answering is not None:
            answering.close()
    finally:
        await frontend.close()


def _announce(line: str) -> None:
    """Write a line to standard output; errors, such as a full disk, are ignored, because they are no reason to end."""
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; its arguments come from `kvseek serve`."""
    parser = argparse.ArgumentParser(prog="python -m kvseek.server.frontend", description=__doc__)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True, help="of the engine process")
    parser.add_argument("--settings", required=True, help="ServeSettings as JSON")
    parser.add_argument("--host", required=True)
    parser.add_argument("--http_port", type=read_port, required=True, help="0 picks a free one")
    parser.add_argument("--metrics_port", type=read_port, required=True, help="0 picks a free one")
    parser.add_argument("--grpc_port", type=read_port, default=0, help="0 picks a free one")
    parser.add_argument("--openai_port", type=read_port, default=0, help="0 picks a free one")
    parser.add_argument(
        "--held_ports", nargs="*", default=[], help="names of those that the launcher holds (Ports.hold)"
    )
    parser.add_argument("--open_models", action="store_true", help="list the models without asking for an API key")
    parser.add_argument("--triton_grpc", required=True, help="Triton's gRPC endpoint: host:port, or unix:/PATH")
    parser.add_argument("--triton_metrics", required=True, help="host:port of Triton's own metrics")
    parser.add_argument("--alive", type=Path, help="socket at which the supervisor asks whether the process works")
    parser.add_argument("--state", type=Path, help="the supervisor's file of restarts, for the metrics")
    raise_file_limit()
    return run_process(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
