"""Command line of the GPU benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvseek.bench.output import GIB, add_output_flags, at_least_one, numbers
from kvseek.bench.speed.shapes import SHAPES
from kvseek.bench.variants import FORM, parse_variants
from kvseek.core.command_line import Parser, memory_size
from kvseek.core.errors import ConfigError

from .memory_plan import OFFLOADS, Cell

DTYPES = ("bfloat16", "float16", "float32")
WARMUP = 5  # steps of each contestant that are not counted
WORK_MEMORY = 3 * GIB
SHORTEST = 4096  # contexts below cache.full_threshold are attended densely by every method
NOT_OF_RANKS = ("batches", "hot_rows", "throughput", "gpu_memory", "work_memory")  # flags without a meaning there
RANKS = f"without {', '.join(f'--{name}' for name in NOT_OF_RANKS)}"
MOST_STEPS = 200  # with the warm-up, fewer than the update buffer holds: no timed step evicts


def make_parser() -> Parser:
    """Make the parser of `kvseek bench` on a GPU."""
    parser = Parser(
        prog="kvseek bench --device cuda",
        description="Time of a decode step on a GPU at long context: random weights, synthetic keys, CUDA graphs.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --tp_size")
    parser.add_argument("--tp_size", help=f"comma list of numbers of ranks: times engines of each instead; {RANKS}")
    parser.add_argument("--shape", default="llama-3.1-8b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="bfloat16", help=f"one of {', '.join(DTYPES)}")
    parser.add_argument("--methods", required=True, help=f"comma list, the baseline first, of {FORM}")
    parser.add_argument("--contexts", default="131072", help="comma list of cached tokens a request")
    parser.add_argument("--batches", default="1", help="comma list of requests a step")
    parser.add_argument("--offload", default="always", help=f"comma list of {', '.join(OFFLOADS)}: where rows lie")
    parser.add_argument("--hot_rows", choices=("both", "on", "off"), default="both", help="device cache of recent rows")
    parser.add_argument("--steps", type=int, default=50, help="decode steps that are timed")
    parser.add_argument("--block", type=int, default=10, help="decode steps in a turn")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--throughput", action="store_true", help="tokens/s of all --batches that fit, offload auto")
    modes.add_argument("--prefill", action="store_true", help="time of a prompt of --contexts tokens instead")
    parser.add_argument("--repeats", type=int, default=3, help="with --prefill: prompts of each method")
    sizes = {
        "host_memory": (108 * GIB, "pinned host memory that rows may use (default: 108GiB)"),
        "gpu_memory": (None, "device memory that may be used (default: all that is free)"),
        "work_memory": (WORK_MEMORY, "of that, for activations, graphs and building of indexes (default: 3GiB)"),
    }
    for name, (default, about) in sizes.items():
        parser.add_argument(f"--{name}", type=memory_size, metavar="SIZE", default=default, help=about)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--details", action="store_true", help="print all figures of a step, its parts and its floor")
    add_output_flags(parser, ", after every context and batch")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings; raises ConfigError on values out of range."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    _check_ranks(arguments, {name: parser.get_default(name) for name in NOT_OF_RANKS})
    return _check(arguments)


def _check_ranks(arguments: argparse.Namespace, defaults: dict[str, object]) -> None:
    """Convert --tp_size, and raise ConfigError if flags do not go with it."""
    if arguments.tp_size is None:
        if arguments.device == "cpu":
            raise ConfigError("--device cpu: must come with --tp_size, or with --model instead of --shape")
        return
    arguments.tp_size = numbers("tp_size", arguments.tp_size, 1)
    for name, default in defaults.items():
        if getattr(arguments, name) != default:
            raise ConfigError(f"--{name}: must be left out with --tp_size, which times engines of one request")
    if arguments.device == "cpu" and arguments.offload != "always":
        raise ConfigError(f"--offload = {arguments.offload!r}: must be always with --device cpu; leave it out")


def _check(arguments: argparse.Namespace) -> argparse.Namespace:
    """Convert lists and raise ConfigError on settings out of range."""
    arguments.contexts = numbers("contexts", arguments.contexts, SHORTEST)
    arguments.batches = numbers("batches", arguments.batches, 1)
    arguments.methods, arguments.offload = parse_variants(arguments.methods), arguments.offload.split(",")
    if len(set(arguments.offload)) < len(arguments.offload):
        raise ConfigError(f"--offload = {','.join(arguments.offload)!r}: must name each once; leave the second out")
    if arguments.dtype not in DTYPES:
        raise ConfigError(f"--dtype = {arguments.dtype!r}: must be one of {', '.join(DTYPES)}; bfloat16 is the default")
    if not 1 <= arguments.steps <= MOST_STEPS:
        limit = f"between 1 and {MOST_STEPS}, so that no timed step evicts"
        raise ConfigError(f"--steps = {arguments.steps}: must be {limit}; 50 is the default")
    at_least_one(arguments, "block", "repeats")
    return arguments


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """Every context with every batch."""
    return [Cell(context, batch) for context in arguments.contexts for batch in arguments.batches]
