"""`kvseek tritonserver`: runs the tritonserver that `kvseek serve` would run, with the arguments that it is given."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from kvseek.core.command_line import Parser
from kvseek.core.errors import KvseekError
from kvseek.server.processes import UMASK, die_without_core
from kvseek.server.scratch import scratch_folder
from kvseek.server.triton.find import find_server

DESCRIPTION = (
    "Run tritonserver; all arguments are its own, such as --model-repository DIR (kvseek repository writes such folders). "
    "It is the tritonserver on PATH or of an NGC container, else the one of the wheel nvidia-pytriton, for which this "
    "command sets up the libraries and the backend directory."
)


def make_parser() -> Parser:
    """Make the parser of `kvseek tritonserver`, which has no flags of its own."""
    return Parser(prog="kvseek tritonserver", usage="%(prog)s [ARGUMENT ...]", description=DESCRIPTION)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a tritonserver until it ends; returns its exit status."""
    _, arguments = make_parser().parse_known_args(argv)
    with ExitStack() as stack:
        try:
            server = find_server(stack.enter_context(scratch_folder()))
        except KvseekError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        command = [str(server.binary), f"--backend-directory={server.backends}", *arguments]
        process = subprocess.Popen(command, env=server.environment, preexec_fn=die_without_core, umask=UMASK)
        signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server itself, which this process waits for
        return process.wait()
