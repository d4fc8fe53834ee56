"""A conversation of several turns with a server's OpenAI port, which may be kept in a file from one call to the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .chunk import AnswerFigures, Chunk
from .errors import ClientError
from .openai_client import Message, OpenAIClient
from .options import GenerateOptions

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
