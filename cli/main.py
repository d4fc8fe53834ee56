"""The `kvseek` command. A subcommand's module is imported only when it is asked for, so that help is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from kvseek.core.command_line import did_you_mean

COMMANDS = {
    "build": ("kvseek.builder.build", "turn a checkpoint into an engine directory; plan, inspect, verify or check one"),
    "serve": ("kvseek.server.serve", "serve an engine directory with Triton"),
    "repository": ("kvseek.server.triton.repository", "write a model repository for a tritonserver of your own"),
    "tritonserver": ("kvseek.server.triton.find", "run tritonserver, also the one of the wheel nvidia-pytriton"),
    "openai": ("kvseek.server.serve_openai", "an OpenAI port for an engine that such a tritonserver serves"),
    "cache": ("kvseek.cli.cache", "list or drop the prefixes that a server keeps on disk"),
    "chat": ("kvseek.client.chat", "ask a running server"),
    "bench": ("kvseek.bench.speed.decode", "measure the time per output token"),
    "evaluate": ("kvseek.bench.evaluate", "measure what a method loses"),
    "completion": ("kvseek.cli.completion", "print a script that completes commands and flags in a shell"),
}
INTERRUPTED = 130  # exit status after SIGINT, as shells have it: 128 + 2
USAGE = "usage: kvseek [--version] COMMAND [ARGUMENT ...]\n\n" + "\n".join(
    f"  {name:12} {summary}" for name, (_, summary) in COMMANDS.items()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit status, 2 for bad usage, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] == "--version":
        print(f"kvseek {version('kvseek')}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\nkvseek COMMAND --help says more.")
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        hint = did_you_mean(arguments[0], COMMANDS)
        print(f"{USAGE}\n\nerror: unknown command {arguments[0]!r}{hint}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[arguments[0]]
    try:
        status: int = importlib.import_module(module).main(arguments[1:])
    except KeyboardInterrupt:  # what a command had begun, it has removed on the way here
        print(f"\nkvseek {arguments[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
