"""The command `kvseek serve`: one server, several behind a router, or the ranks of a host that serves nothing itself."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvseek.core.command_line import Parser, tells_errors
from kvseek.core.config import read_config
from kvseek.core.errors import require
from kvseek.engine.parallel.nodes import check_nodes

from .launch import LOOPBACK, READY_SECONDS, running_ranks, running_server, signals
from .ports import CLOSED, OFF, Ports, read_port
from .replicas import running_replicas
from .settings import SERVE_FLAGS, ServeSettings, add_flags, settings_of

# What a host has to say on which rank 0 does not run.
NODE_FLAGS = (
    *("engine_dir", "tp_size", "nnodes", "node_rank", "rdzv_endpoint", "ranks_key_file"),
    *("threads", "restarts", "hang_seconds", "log", "ready_seconds", "core_dumps"),
)


def make_parser() -> Parser:
    """Make the parser of `kvseek serve`."""
    parser = Parser(prog="kvseek serve", description="Serve an engine directory with Triton.")
    parser.add_argument("--engine_dir", type=Path, required=True, help="what kvseek build wrote")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on (default: %(default)s)")
    about = f"default: %(default)s; 0 picks a free port, {OFF} closes it"
    parser.add_argument("--http_port", type=read_port, default=8000, help=about)
    parser.add_argument("--grpc_port", type=read_port, default=8001, help=about)
    parser.add_argument("--metrics_port", type=read_port, default=8002, help=about)
    parser.add_argument("--openai_port", type=read_port, default=9000, help=about)
    about = "servers behind one OpenAI port, each with free ports of its own (default: 1, without a router)"
    parser.add_argument("--replicas", type=int, default=1, help=about)
    about = "number of this host among --nnodes, 0 for that of rank 0 (default: %(default)s); the others serve nothing themselves"
    parser.add_argument("--node_rank", type=int, default=0, help=about)
    parser.add_argument("--tp_size", type=int, help="refuse an engine of another number of ranks (default: serve any)")
    add_flags(parser, SERVE_FLAGS)
    parser.add_argument(
        "--log", type=Path, help="file for the server's log, - for standard output (default: none is kept)"
    )
    parser.add_argument(
        "--ready_seconds", type=float, default=READY_SECONDS, help="how long loading may take (default: %(default)g)"
    )
    parser.add_argument("--log_verbose", action="store_true", help="have Triton log every request")
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of `kvseek serve`."""
    return make_parser().parse_args(argv)  # type: ignore[no-any-return]


def _check_node(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if a host that serves nothing has flags of what it would serve."""
    for name, default in vars(parse_arguments(["--engine_dir", "."])).items():
        value = getattr(arguments, name)
        limit = f"left out with --node_rank {arguments.node_rank}"
        require(name in NODE_FLAGS or value == default, name, value, limit, "give it to rank 0's host, which serves")


def _check_ranks(engine_dir: Path, tp_size: int | None, settings: ServeSettings, node_rank: int) -> None:
    """Raise ConfigError unless the engine has so many ranks, and this host some of them."""
    nodes = settings.nodes  # made here too, so that wrong flags are an error before anything is started
    if settings.nnodes > 1 or node_rank:
        config = read_config(engine_dir)
        nodes.ranks(config.tp_size, node_rank)
        check_nodes(config, settings.nnodes)
    if tp_size is not None:
        found = read_config(engine_dir).tp_size
        remedy = f"the engine is divided when it is built, with kvseek build --tp_size: give {found}, or leave it out"
        require(tp_size == found, "tp_size", tp_size, f"{found}, that of {engine_dir}", remedy)


def _serve(arguments: argparse.Namespace, ports: Ports, settings: ServeSettings) -> int:
    with (
        running_server(
            arguments.engine_dir,
            arguments.host,
            ports,
            settings,
            log=arguments.log,
            verbose=arguments.log_verbose,
            ready_seconds=arguments.ready_seconds,
        ) as server,
        signals() as received,
    ):
        print(f"ready: {server.ports.describe(arguments.host)}", flush=True)
        return _wait(server.check, received)


def _serve_node(arguments: argparse.Namespace, settings: ServeSettings) -> int:
    with (
        running_ranks(
            arguments.engine_dir,
            arguments.node_rank,
            settings,
            log=arguments.log,
            ready_seconds=arguments.ready_seconds,
        ) as (ranks, supervisor),
        signals() as received,
    ):
        followers = " ".join(map(str, ranks))
        print(f"ready: ranks {followers} follow rank 0 at {settings.rdzv_endpoint}", flush=True)
        return _wait(supervisor.check, received)


def _serve_replicas(arguments: argparse.Namespace, settings: ServeSettings) -> int:
    require(arguments.replicas >= 1, "replicas", arguments.replicas, ">= 1", "1 is the default")
    remedy = "start a router before several servers of several hosts yourself (docs/parallelism.md)"
    require(settings.nnodes == 1, "nnodes", settings.nnodes, "1 with --replicas", remedy)
    for name in ("http", "grpc"):
        port = getattr(arguments, f"{name}_port")
        remedy = "each replica has free ports, which are printed"
        require(port == getattr(Ports, name), f"{name}_port", port, "left out with --replicas", remedy)
    for name in ("metrics", "openai"):
        port = getattr(arguments, f"{name}_port")
        require(
            port != CLOSED,
            f"{name}_port",
            OFF,
            "a port with --replicas",
            "it is that of all of them; 0 picks a free one",
        )
    with (
        running_replicas(
            arguments.engine_dir,
            arguments.replicas,
            arguments.host,
            arguments.openai_port,
            arguments.metrics_port,
            settings,
            log=arguments.log,
            verbose=arguments.log_verbose,
            device=read_config(arguments.engine_dir).device,
            ready_seconds=arguments.ready_seconds,
        ) as replicas,
        signals() as received,
    ):
        for number, server in enumerate(replicas.servers):
            where = f"gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}/metrics"
            print(f"replica {number}: {where}, OpenAI {server.openai_url}", flush=True)
        print(f"ready: OpenAI {replicas.openai_url}, metrics {replicas.metrics_url}/metrics", flush=True)
        return _wait(replicas.check, received)


def _wait(check: Callable[[], None], received: Sequence[int]) -> int:
    """Wait for a signal; raises ServerError if the server ends by itself."""
    while not received:
        check()
        time.sleep(0.1)
    return 0


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvseek serve` until SIGINT or SIGTERM, or until the server ends."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ports = Ports(arguments.http_port, arguments.grpc_port, arguments.metrics_port, arguments.openai_port)
    try:
        settings = settings_of(arguments, SERVE_FLAGS)
        _check_ranks(arguments.engine_dir, arguments.tp_size, settings, arguments.node_rank)
        if arguments.node_rank:
            _check_node(arguments)
            return _serve_node(arguments, settings)
        if arguments.replicas == 1:
            return _serve(arguments, ports, settings)
        return _serve_replicas(arguments, settings)
    except KeyboardInterrupt:
        return 0
