"""The process of a rank that is not rank 0. It ends when rank 0 closes the connection, or has died.

On rank 0's host followers.py starts it, with the file descriptor of its connection:

    python -m kvseek.engine.leading.follower DESCRIPTOR

On other hosts `kvseek serve --node_rank` starts it, with the flags of `parse_arguments`, and it connects to rank 0.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch
from msgspec.structs import replace
from torch import Tensor

from kvseek.core.command_line import tells_errors
from kvseek.core.liveness import answer_from_thread
from kvseek.core.manifest import read_manifest
from kvseek.core.ranks import rank_config
from kvseek.engine.cache.prefix import Prefix, Reuse
from kvseek.engine.loading.load import load_rank
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.prefill import Prefill
from kvseek.engine.parallel.channel import Channel
from kvseek.engine.parallel.cuda.ranks import DeviceRanks
from kvseek.engine.parallel.nodes import Nodes, join_ranks
from kvseek.engine.parallel.ranks import Ranks, find_store
from kvseek.engine.parallel.reports import Reporter
from kvseek.engine.parallel.watch import end_with_rank_0

from .commands import Begin, Call, Command, Decode, Load, Open, decode, digest, name_of

READY = b""  # what a rank answers to Load if nothing is wrong; anything else is an error
logger = logging.getLogger(__name__)


class Follower:
    """Does what rank 0 says, with its own part of the model."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._rows = decoder, decoder.prefix_rows()
        self._prefills: dict[int, Prefill] = {}

    def do(self, command: Command) -> None:
        """Do what a command says; an exception means that this rank is no longer what rank 0 believes."""
        match command:
            case Open(slot, tokens, reuse):
                self._decoder.cache.open(slot, tokens, self._prefix(reuse))
            case Begin(number, prompts, asked):
                self._prefills[number] = self._decoder.prefill(prompts, dict.fromkeys(asked, _ignore))
            case Call("cache.close", (int(slot),)):
                self._close(slot)
            case Call(method, arguments, number):
                of, _, name = method.partition(".")
                if of == "prefill":
                    target: object = self._prefills.pop(number) if name == "finish" else self._prefills[number]
                else:
                    target = self._rows if of == "rows" else self._decoder
                getattr(target, name)(*arguments)
            case Decode(tokens, slots, expected, verifies):
                found = digest(self._decoder.cache)
                if found != expected:
                    raise RuntimeError(f"checksum of the cache's state = {found:08x}: must be rank 0's, {expected:08x}")
                # Rank 0 draws from the logits. This rank only waits for its part of the step, of which a token is less to copy.
                if verifies:
                    self._decoder.verify(tokens, slots).draw([0], [None])
                else:
                    self._decoder.launch(tokens, slots, [None] * len(slots)).collect()

    def _prefix(self, reuse: Reuse | None) -> Prefix | None:
        if reuse is None:
            return None
        sink_rows = self._rows.sink_rows[reuse.extents[0]]
        return Prefix(reuse.tokens, reuse.extents, reuse.shared, reuse.sparse, sink_rows=sink_rows)

    def _close(self, slot: int) -> None:
        # A prefill that is given up is dropped without a word: it ends with the last of its slots.
        for number, prefill in list(self._prefills.items()):
            if slot in prefill.slots:
                prefill.drop(slot)
                if prefill.dropped.issuperset(prefill.slots):
                    del self._prefills[number]
        self._decoder.cache.close(slot)


def _ignore(first: int, logits: Tensor) -> None:
    """Take logits that rank 0 has, too."""


def serve(channel: Channel, load: Load, up: Path | None = None) -> NoReturn:
    """Load, and do what rank 0 says until it closes the connection. The file `up` is made when all is loaded."""
    torch.set_num_threads(load.threads)
    end_with_rank_0(channel)
    reporter = Reporter(load.stall_seconds)
    reporter.waiting("joins the other ranks")
    limit = load.timeout_seconds
    reporter.publish(find_store(load.host, load.port, limit), load.rank)
    try:
        store = find_store(load.host, load.port, limit)
        ranks = Ranks.join(store, load.rank, load.config.tp_size, limit, reporter)
        if load.config.device == "cuda":
            ranks = DeviceRanks.over(ranks, load.config, [])
        follower = Follower(load_rank(Path(load.directory), rank_config(load.config), ranks))
        reporter.waiting("waits for rank 0")
        channel.send(READY)
        if up is not None:
            up.touch()
        with torch.inference_mode():
            while True:
                command = decode(channel.receive())
                if isinstance(command, Load):
                    raise RuntimeError("rank 0 has said twice what to load")
                reporter.step()
                reporter.doing(name_of(command))
                follower.do(command)
    finally:
        reporter.close()


def follow(channel: Channel, own: argparse.Namespace | None = None) -> NoReturn:
    """Serve rank 0, and end this process: with status 1 after an error, which rank 0 is told. `own`: flags of another node.

    It ends at once, before any memory is given back: that may take longer than `end_with_rank_0` allows, and on a GPU it would
    wait for kernels, which may wait for other ranks.
    """
    try:
        load = decode(channel.receive())
        if not isinstance(load, Load):
            raise RuntimeError(f"rank 0 has said {type(load).__name__} before what to load")
        if own is None:
            serve(channel, load)
        else:
            serve(channel, replace(load, directory=str(own.engine_dir), threads=own.threads), own.up)
    except (EOFError, ConnectionError):
        _end(0)  # rank 0 has ended, or needs this rank no longer
    except Exception as error:
        logger.exception("rank 0 is told of an error")
        try:
            channel.send(f"{type(error).__name__}: {error}".encode())
        except OSError:
            _end(0)
        _end(1)


def _end(status: int) -> NoReturn:
    logging.shutdown()
    os._exit(status)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags of a rank of another node than rank 0's."""
    parser = argparse.ArgumentParser(prog="python -m kvseek.engine.leading.follower", description=__doc__)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--rdzv_endpoint", required=True)
    parser.add_argument("--ranks_key_file", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--up", type=Path, required=True, help="file to make when the rank is loaded")
    parser.add_argument("--alive", type=Path, required=True, help="socket at which to answer that the process works")
    return parser.parse_args(argv)


@tells_errors
def main(argv: Sequence[str]) -> int:
    """Run the rank until the process ends; returns the exit status of one that does not join rank 0."""
    if len(argv) == 1:
        # These may reach all processes of a terminal or a unit at once: rank 0 decides what they mean.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        follow(Channel(Connection(int(argv[0]))))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    arguments = parse_arguments(argv)
    answer_from_thread(arguments.alive)
    nodes = Nodes.of(arguments.nnodes, arguments.rdzv_endpoint, arguments.ranks_key_file)
    follow(join_ranks(nodes, arguments.rank, read_manifest(arguments.engine_dir).fingerprint), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
