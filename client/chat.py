"""`kvseek chat`: ask a running server and watch the answer arrive."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvseek.core.errors import KvseekError

from .chunk import AnswerFigures, Chunk
from .errors import ClientError
from .grpc_client import GrpcClient
from .http_client import HttpClient
from .options import REPLY_SECONDS, GenerateOptions

DEFAULT_URLS = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}
DOCUMENT_TEMPLATE = "{document}\n\n{question}"


def build_prompt(document: str | None, question: str) -> str:
    """Make the text that is sent: the question alone, or a document followed by the question."""
    return question if document is None else DOCUMENT_TEMPLATE.format(document=document.strip(), question=question)


def show(chunks: Iterator[Chunk], console: Console) -> tuple[str, AnswerFigures]:
    """Print an answer as it arrives, after a progress bar of the prefill; returns the text and the figures."""
    figures, text = AnswerFigures(), ""
    columns = (TextColumn("reading the prompt"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=not console.is_terminal) as progress:
        task = progress.add_task("prefill", total=1.0)
        first = Chunk("", "cancelled")
        for first in chunks:
            figures.add(first)
            progress.update(task, completed=first.prefill_progress)
            if first.num_output_tokens or first.finish_reason:
                break
    text = first.text
    console.out(text, end="", highlight=False)
    for chunk in chunks:
        figures.add(chunk)
        text += chunk.text
        console.out(chunk.text, end="", highlight=False)
        console.file.flush()
    console.out("")
    return text, figures


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of `kvseek chat`."""
    parser = argparse.ArgumentParser(prog="kvseek chat", description="Ask a running kvseek server.")
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    parser.add_argument(
        "--url", help=f"host:port (defaults: {DEFAULT_URLS['grpc']} for grpc, {DEFAULT_URLS['http']} for http)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=REPLY_SECONDS,
        help="seconds that the server may be silent (default: %(default)g)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", "--question", dest="prompt", help="the text to send (default: standard input)")
    source.add_argument("--prompt_file", type=Path, help="read the text from a file")
    parser.add_argument(
        "--document", type=Path, help="a file that the question is about; it is sent before the question"
    )
    parser.add_argument("--chat_template", action=argparse.BooleanOptionalAction, default=True, help="default: on")
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top_k", type=int)
    parser.add_argument("--top_p", type=float)
    parser.add_argument("--repetition_penalty", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--end_id", type=int, help="default: the model's end ids; -1: none")
    parser.add_argument(
        "--stop_word", action="append", default=[], dest="stop_words", help="may be given several times"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of live text")
    return parser.parse_args(argv)


def read_text(path: Path) -> str:
    """Read a UTF-8 file; raises ClientError that names it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError(f"cannot read {path}: {error}; give a readable UTF-8 file") from None


def ask(arguments: argparse.Namespace) -> None:
    """Send the question of the arguments and print the answer."""
    if not 0 < arguments.timeout < threading.TIMEOUT_MAX:
        limit = f"> 0 and < {threading.TIMEOUT_MAX:g} seconds"
        raise ClientError(f"--timeout = {arguments.timeout:g}: must be {limit}; leave it out for the default")
    question = arguments.prompt
    if arguments.prompt_file:
        question = read_text(arguments.prompt_file)
    elif question is None:
        question = sys.stdin.read()
    document = read_text(arguments.document) if arguments.document else None
    options = GenerateOptions(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        end_id=arguments.end_id,
        stop_words=tuple(arguments.stop_words),
        apply_chat_template=arguments.chat_template,
        return_prefill_progress=True,
    )
    url = arguments.url or DEFAULT_URLS[arguments.protocol]
    kind = GrpcClient if arguments.protocol == "grpc" else HttpClient
    client = kind(url, arguments.timeout)
    console = Console(quiet=arguments.json)
    with closing(client.generate_stream(build_prompt(document, question), options)) as chunks:  # type: ignore[type-var]
        text, figures = show(chunks, console)
    if arguments.json:
        print(json.dumps({"text": text, **figures.to_dict()}))
    else:
        console.print(figures.summary(), style="dim", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """`kvseek chat`."""
    try:
        ask(parse_arguments(argv))
    except KeyboardInterrupt:
        return 130
    except KvseekError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
