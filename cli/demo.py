"""`make demo`: starts a server, asks questions about a long document, prints the figures, shuts the server down.

The server reads the document for the first question, and reuses what it has read for the others (docs/conversations.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvseek.client.chat import build_prompt, read_text, show
from kvseek.client.grpc_client import GrpcClient
from kvseek.client.text_models import GenerateOptions
from kvseek.core.command_line import tells_errors
from kvseek.core.config import read_config
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.launch import running_server
from kvseek.server.settings import ServeSettings


def shorten(document: str, tokenizer: Tokenizer, tokens: int) -> str:
    """Take whole paragraphs from the beginning of a document, as many as fit into `tokens` tokens."""
    kept = ""
    for paragraph in document.split("\n\n"):
        longer = f"{kept}\n\n{paragraph}" if kept else paragraph
        if len(tokenizer.encode(longer)) > tokens:
            break
        kept = longer
    return kept


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run the whole demonstration."""
    config, tokenizer = read_config(arguments.engine_dir), Tokenizer(arguments.engine_dir)
    document = shorten(read_text(arguments.document), tokenizer, arguments.document_tokens)
    tokens = len(tokenizer.encode(document))
    console.print(
        f"document: {arguments.document}, {tokens:,} tokens; method: {config.method}; dtype: {config.dtype}",
        soft_wrap=True,
    )
    started = time.perf_counter()
    with running_server(arguments.engine_dir, settings=ServeSettings(threads=arguments.threads)) as server:
        console.print(f"the server is ready after {time.perf_counter() - started:.1f} s (gRPC {server.grpc_url})")
        options = GenerateOptions(
            max_tokens=arguments.max_tokens, apply_chat_template=True, return_prefill_progress=True
        )
        for question in arguments.question:
            console.print(f"question: {question}")
            chunks = GrpcClient(server.grpc_url).generate_stream(build_prompt(document, question), options)
            _, figures = show(chunks, console)
            console.print(figures.summary(), highlight=False, soft_wrap=True)
    console.print(f"the server has shut down (exit status {max(map(abs, server.statuses.values()))})")


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvseek.cli.demo", description=__doc__)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--document", type=Path, required=True)
    parser.add_argument("--document_tokens", type=int, default=6240, help="use at most this much of it")
    parser.add_argument("--question", required=True, action="append", help="give it once for each question")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    run(parser.parse_args(argv), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
