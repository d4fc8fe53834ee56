"""The template that writes a model's conversations, and its limit of time."""

from __future__ import annotations

import ctypes
import inspect
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvseek.core.errors import RequestError

SETTINGS_FILE = "tokenizer_config.json"  # beside tokenizer.json, as transformers writes it: names of special tokens
TEMPLATE_FILE = "chat_template.jinja"  # if the model has one
MAX_REASON = 300  # characters of a template's own error in ours
TEMPLATE_SECONDS = 1.0  # most time of a processor for writing one conversation, which takes some milliseconds
PROBE = "kvseekprobe"  # a text that no template changes
PROBED = {
    "user": ["user"],
    "assistant": ["user", "assistant", "user"],
    "system": ["system", "user"],
}  # conversations by role


class TemplateTimeout(BaseException):
    """A template computes for too long. No Exception, which what a template calls may catch."""


class TimeLimit:
    """Raises TemplateTimeout in a thread that has computed for TEMPLATE_SECONDS; other threads' time does not count.

    A template is a program that came with the model. Python hands the error over between two of its instructions.
    """

    def __init__(self) -> None:
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._ends: dict[int, tuple[int, float]] = {}  # of threads: a clock of its computing, and when it ends
        self._watch: threading.Thread | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        with self._lock:
            self._ends[thread] = clock, time.clock_gettime(clock) + TEMPLATE_SECONDS
            if self._watch is None:
                self._watch = threading.Thread(target=self._run, name="limit-templates", daemon=True)
                self._watch.start()
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:  # so that no error is on its way when this function returns
                self._ends.pop(thread, None)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(TEMPLATE_SECONDS / 10)
            with self._lock:
                if not self._ends:
                    self._wake.clear()
                for thread, (clock, end) in list(self._ends.items()):
                    if time.clock_gettime(clock) >= end:
                        del self._ends[thread]
                        number, error = ctypes.c_ulong(thread), ctypes.py_object(TemplateTimeout)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)


time_limit = TimeLimit()


class ChatTemplate:
    """The template that writes a model's conversations, `source`, and the form in which it reads the content of messages.

    Most templates read a text. Some read a list of parts, as in OpenAI's API, and write nothing of a text. So each role is tried.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TEMPLATE_FILE
        if not path.is_file():
            raise RequestError(
                "apply_chat_template: this model's tokenizer has no chat template; send the text as it is"
            )
        import tokenizers
        from transformers import PreTrainedTokenizerFast

        settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        names = {name: token for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)}
        empty, self.source = tokenizers.Tokenizer(tokenizers.models.BPE()), path.read_text(encoding="utf-8")
        self._writer = PreTrainedTokenizerFast(tokenizer_object=empty, chat_template=self.source, **names)
        # Variables of templates, and parameters of transformers' function, that are no client's to set.
        parameters = inspect.signature(type(self._writer).apply_chat_template).parameters
        self._names = frozenset(("messages", "conversations", *parameters, *self._writer.special_tokens_map))
        self._in_parts: dict[str, bool | None] = {}
        for role in PROBED:
            try:
                self._in_parts[role] = self._reads_parts(role)
            except TemplateTimeout:  # a request tells
                self._in_parts[role] = False
                break

    def render(self, messages: Sequence[Mapping[str, Any]], how: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
        """Write a conversation; raises as Tokenizer.apply_chat_template, whose arguments these are."""
        for name in extra:
            if name in self._names:
                raise RequestError(
                    f"chat_template_kwargs.{name}: is a variable that kvseek sets itself; choose another name, or leave it out"
                )
        for number, message in enumerate(messages):
            for name in ("role", "content"):
                if not isinstance(message.get(name), str):
                    shown = f"{message.get(name)!r:.80}"
                    raise RequestError(f"messages[{number}].{name} = {shown}: must be a text; give it as one")
            if self._in_parts.get(role := message["role"], False) is None:
                raise RequestError(
                    f"messages: the model's chat template writes nothing of what the role {role!r} says, neither of a text nor "
                    "of a list of parts; leave such messages out, or send the conversation as one text that the model expects"
                )
        try:
            return self._write(messages, **how, **extra)
        except TemplateTimeout:
            raise RequestError(
                f"messages: the model's chat template has not written them within {TEMPLATE_SECONDS:g} s of computing, which is "
                "the limit; send fewer or shorter messages, or send the text as it is"
            ) from None
        except Exception as error:  # a template is a program, which may raise anything
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
            raise RequestError(
                f"messages: cannot be written by the model's chat template ({reason}); change them, or send the text as it is"
            ) from None

    def _write(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        written = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if self._in_parts.get(message["role"])
            else message
            for message in messages
        ]
        with time_limit():
            text: str = self._writer.apply_chat_template(written, tokenize=False, **arguments)
        return text

    def _reads_parts(self, role: str) -> bool | None:
        """Whether the template writes a role's content from a list of parts only; None if it writes neither that nor a text."""
        messages = [{"role": each, "content": PROBE if each == role else "x"} for each in PROBED[role]]
        found: bool | None = False  # where the template refuses the role: a request tells how
        for in_parts in (False, True):
            self._in_parts[role] = in_parts
            try:
                text = self._write(messages, add_generation_prompt=True)
            except Exception:
                continue
            if PROBE in text:
                return in_parts
            found = None
        return found
