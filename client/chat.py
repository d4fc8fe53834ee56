"""`kvseek chat`: ask a running server and watch the answer arrive; conversations of several turns may be kept in a file."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvseek.core.command_line import Parser, tells_errors
from kvseek.core.private_files import PrivateFileError, read_key_file

from .chunk import AnswerFigures, Chunk
from .errors import ClientError, RefusedError
from .grpc_client import GrpcClient
from .http_client import HttpClient
from .openai_client import Message, OpenAIClient
from .text_models import REPLY_SECONDS, TEXT_MODELS, GenerateOptions

Show = Callable[[Iterator[Chunk]], tuple[str, AnswerFigures]]


class Conversation:
    """Messages so far. Every turn sends all of them, because the server remembers nothing.

    Parameters
    ----------
    file : Path or None
        A JSON list of messages, {"role", "content"} each, which the conversation continues, and to which every turn is added;
        it is made if it does not exist. None: the conversation is forgotten.
    system : str or None
        What the model is told first; only for a conversation that has no messages yet.

    Raises
    ------
    ClientError
        If the file is no list of messages, or `system` comes too late.
    """

    def __init__(self, file: Path | None = None, system: str | None = None) -> None:
        self._file = file
        self.messages: list[Message] = read_messages(file) if file is not None and file.exists() else []
        if system is not None:
            if self.messages:
                raise ClientError(f"--system: {file} has messages already; leave it out, or begin another file")
            self.messages.append({"role": "system", "content": system})

    def turn(self, question: str, client: OpenAIClient, options: GenerateOptions, show: Show) -> AnswerFigures:
        """Ask a question, show the answer, and remember both; returns the figures. Raises ClientError."""
        asked = [*self.messages, {"role": "user", "content": question}]
        text, figures = show(client.chat_stream(asked, options))
        self.messages = [*asked, {"role": "assistant", "content": text}]
        if self._file is not None:
            written = json.dumps(self.messages, ensure_ascii=False, indent=1)
            try:
                self._file.write_text(written + "\n", encoding="utf-8")
            except OSError as error:
                raise ClientError(f"--conversation = {self._file}: cannot be written ({error.strerror})") from None
        return figures


# What messages of tools have, by which they are refused with a better reason than that the server knows no such role.
TOOL_ROLES = ("tool", "function")
TOOL_KEYS = ("tool_calls", "tool_call_id", "function_call")
# Values of these keys in the answers that OpenAI's client has saved; the server takes them.
EMPTY: tuple[Any, ...] = (None, [])


def read_messages(file: Path) -> list[Message]:
    """Read a file of messages; raises ClientError that names it."""
    try:
        messages: list[Message] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClientError(f"--conversation = {file}: cannot be read ({error}); give a JSON list of messages") from None
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and (
            message.get("role") in TOOL_ROLES or any(message.get(key) not in EMPTY for key in TOOL_KEYS)
        ):
            raise ClientError(
                f"--conversation = {file}: message {number} belongs to a tool: must be of the system, the user or the assistant, "
                "with role and content alone; kvseek has no tools, remove the message"
            )
    well_formed = isinstance(messages, list) and all(
        isinstance(message, dict) and {type(message.get(name)) for name in ("role", "content")} == {str}
        for message in messages
    )
    if not well_formed:
        wanted = 'a list of {"role": ..., "content": ...} with texts'
        raise ClientError(f"--conversation = {file}: must be {wanted}; correct it, or give another file")
    return messages


DEFAULT_LAYOUT = "inflight_batcher_llm"
DEFAULT_URLS = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}
CONVERSATION_FLAGS = ("system", "conversation")
DOCUMENT_TEMPLATE = "{document}\n\n{question}"


def build_prompt(document: str | None, question: str) -> str:
    """Make the text that is sent: the question alone, or a document followed by the question."""
    return question if document is None else DOCUMENT_TEMPLATE.format(document=document.strip(), question=question)


def show(chunks: Iterator[Chunk], console: Console) -> tuple[str, AnswerFigures]:
    """Print an answer as it arrives, after a progress bar of the prefill, and paler what the model thinks before it.

    Returns the text, without the thinking, and the figures.
    """
    figures, text, thought = AnswerFigures(), "", False

    def counted() -> Iterator[Chunk]:
        for chunk in chunks:
            figures.add(chunk)
            yield chunk

    arriving = counted()
    columns = (TextColumn("reading the prompt"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=not console.is_terminal) as progress:
        task = progress.add_task("prefill", total=1.0)
        first = Chunk("", "cancelled")
        for first in arriving:
            progress.update(task, completed=first.prefill_progress)
            if first.num_output_tokens or first.finish_reason:
                break
    for chunk in itertools.chain([first], arriving):
        if thought and chunk.text and not text:
            console.out("\n")
        text, thought = text + chunk.text, thought or bool(chunk.thinking)
        console.out(chunk.thinking, style="dim", end="", highlight=False)
        console.out(chunk.text, end="", highlight=False)
        console.file.flush()
    console.out("")
    return text, figures


def make_parser() -> Parser:
    """Make the parser of `kvseek chat`."""
    parser = Parser(prog="kvseek chat", description="Ask a running kvseek server.")
    parser.add_argument("--protocol", choices=("grpc", "http"), help="default: grpc")
    parser.add_argument(
        "--url", help=f"host:port (defaults: {DEFAULT_URLS['grpc']} for grpc, {DEFAULT_URLS['http']} for http)"
    )
    parser.add_argument(
        "--layout", choices=TEXT_MODELS, help=f"what the server was started with (default: {DEFAULT_LAYOUT})"
    )
    parser.add_argument(
        "--openai_url",
        help="ask the OpenAI port instead, http://HOST:9000/v1; on a terminal, as many turns as you like",
    )
    parser.add_argument("--api_key_file", type=Path, help="file whose first line is the key that the server asks for")
    parser.add_argument("--system", help="with --openai_url: what the model is told before the conversation")
    parser.add_argument(
        "--conversation",
        type=Path,
        help="with --openai_url: a JSON file of messages to continue, and to add the turn to",
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
    parser.add_argument(
        "--cache_salt",
        help="what the server reads of this is shared with requests of the same salt alone (default: none)",
    )
    parser.add_argument(
        "--session_id", help="name of the conversation that this continues, which the server keeps longer"
    )
    parser.add_argument(
        "--retention_priority", type=int, help="of the session: what is lower goes first, 0 to 100 (default: 70)"
    )
    parser.add_argument("--retention_seconds", type=float, help="how long that priority lasts (default: 3600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of live text")
    return parser


def read_text(path: Path) -> str:
    """Read a UTF-8 file; raises ClientError that names it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError(f"cannot read {path}: {error}; give a readable UTF-8 file") from None


def read_key(path: Path | None) -> str:
    """Read the key in the first line of a file, empty without one; raises ClientError if others may read it."""
    try:
        return "" if path is None else read_key_file(path).partition("\n")[0].strip()
    except PrivateFileError as error:
        raise ClientError(f"--api_key_file = {path}: {error}") from None


def ask(arguments: argparse.Namespace) -> None:
    """Send the question of the arguments and print the answer."""
    if not 0 < arguments.timeout < threading.TIMEOUT_MAX:
        limit = f"> 0 and < {threading.TIMEOUT_MAX:g} seconds"
        raise ClientError(f"--timeout = {arguments.timeout:g}: must be {limit}; leave it out for the default")
    names = [field.name for field in dataclasses.fields(GenerateOptions)]
    named: dict[str, Any] = {name: getattr(arguments, name) for name in names if name in arguments}
    named |= {"stop_words": tuple(arguments.stop_words), "apply_chat_template": arguments.chat_template}
    options = GenerateOptions(**named, return_prefill_progress=True)
    document = read_text(arguments.document) if arguments.document else None
    if arguments.openai_url is not None:
        converse(arguments, options, document)
        return
    if given := [name for name in CONVERSATION_FLAGS if getattr(arguments, name) is not None]:
        raise ClientError(f"--{given[0]}: is for the OpenAI port; give --openai_url, or leave it out")
    question = first_question(arguments)
    protocol = arguments.protocol or "grpc"
    url = arguments.url or DEFAULT_URLS[protocol]
    kind = GrpcClient if protocol == "grpc" else HttpClient
    layout = arguments.layout or DEFAULT_LAYOUT
    client = kind(url, arguments.timeout, TEXT_MODELS[layout], read_key(arguments.api_key_file))
    console = Console(quiet=arguments.json)
    try:
        with closing(client.generate_stream(build_prompt(document, question), options)) as chunks:  # type: ignore[type-var]
            text, figures = show(chunks, console)
    except RefusedError:  # what the server says of a model of another layout misleads
        own = [name for name, model in TEXT_MODELS.items() if model.is_among(client.inputs(model.name))]
        if own and layout not in own:
            limit = f"{' or '.join(own)}, which the server at {url} was started with"
            raise ClientError(f"--layout = {layout!r}: must be {limit}; give --layout {own[0]}") from None
        raise
    tell(text, figures, arguments.json, console)


def first_question(arguments: argparse.Namespace) -> str:
    """Return the question of the arguments, or all of standard input."""
    if arguments.prompt_file:
        return read_text(arguments.prompt_file)
    if arguments.prompt is not None:
        return str(arguments.prompt)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ClientError(f"cannot read standard input: {error}; give UTF-8 text") from None


def converse(arguments: argparse.Namespace, options: GenerateOptions, document: str | None) -> None:
    """Hold a conversation with the OpenAI port: one turn, or as many as are typed on a terminal."""
    nothing = (None,)
    for name, allowed in (
        ("protocol", nothing),
        ("url", nothing),
        ("layout", nothing),
        ("end_id", (None, -1)),
        ("chat_template", (True,)),
    ):
        value = getattr(arguments, name)
        if value not in allowed:
            given = f"--no-{name}" if value is False else f"--{name} = {value}"
            raise ClientError(f"{given}: has no meaning with --openai_url; leave it out")
    client = OpenAIClient(arguments.openai_url, arguments.timeout, read_key(arguments.api_key_file))
    conversation, console = Conversation(arguments.conversation, arguments.system), Console(quiet=arguments.json)
    asked = arguments.prompt is not None or arguments.prompt_file is not None
    on_terminal = not asked and sys.stdin.isatty()
    for question in typed() if on_terminal else [first_question(arguments)]:
        prompt = build_prompt(document, question)
        try:
            figures = conversation.turn(prompt, client, options, lambda chunks: show(chunks, console))
        except ClientError as error:
            if not on_terminal:
                raise
            print(f"error: {error}", file=sys.stderr)  # the conversation is as it was before the question
            continue
        document = None  # it belongs to the first question that is answered
        tell(conversation.messages[-1]["content"], figures, arguments.json, console)


def typed() -> Iterator[str]:
    """Yield the lines that are typed on a terminal, until the end of input (Ctrl-D)."""
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if line.strip():
            yield line


def tell(text: str, figures: AnswerFigures, as_json: bool, console: Console) -> None:
    """Print the figures of an answer, for people or with its text as JSON."""
    if as_json:
        print(json.dumps({"text": text, **figures.to_dict()}))
    else:
        console.print(figures.summary(), style="dim", highlight=False)


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """`kvseek chat`."""
    try:
        ask(make_parser().parse_args(argv))
    except KeyboardInterrupt:
        return 130
    return 0
