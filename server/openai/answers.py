"""What a model's answers consist of, thinking, text and calls: how it is found in them, and the guide that they follow.

Which form of each a model writes is found in its chat template and its vocabulary, or named by `kvseek serve`.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvseek.core.guide import Guide, GuideType
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.settings import AUTO, NONE

from .fields import FieldError
from .tool_formats import (
    CALL_ARGUMENTS,
    CALL_CLOSE,
    CALL_OPEN,
    CONTENT,
    END,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_FORMATS,
    WS,
    Characters,
    Function,
    Output,
    Part,
    Tags,
    ToolFormat,
    format_of_template,
    json_rule,
    read_text,
    read_thinking,
)

THINK_TAGS = ("<think>", "</think>")
LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Thinking:
    """The thinking of one answer: the tokens around it, and whether the prompt has begun it."""

    opening: int
    closing: int
    opened: bool
    budget: int | None = None  # most tokens of it

    def count(self, ids: Sequence[int]) -> int:
        """Count the tokens of an answer's thinking, without those around it."""
        begun = 0 if self.opened else 1
        if begun and (not ids or ids[0] != self.opening):
            return 0
        return (ids.index(self.closing) if self.closing in ids else len(ids)) - begun


@dataclass(frozen=True)
class AnswerForm:
    """What one request's answers consist of.

    Attributes
    ----------
    tools : ToolFormat or None
        The form of calls; None: what looks like a call is text.
    several : bool
        Whether an answer may have more than one call.
    marks : dict
        Characters for the tokens of tags, and `spelt`, the text of each of them.
    """

    thinking: Thinking | None = None
    tools: ToolFormat | None = None
    functions: Sequence[Function] = ()
    several: bool = True
    marks: dict[int, str] = field(default_factory=dict)
    spelt: dict[str, str] = field(default_factory=dict)

    def reader(self) -> AnswerReader | None:
        """Make the reader of one answer; None: all of it is text."""
        return AnswerReader(self) if self.thinking is not None or self.tools is not None else None

    def call_id(self) -> str:
        """Make the id of a call."""
        count = 24 if self.tools is None else self.tools.id_characters
        own = "".join(secrets.choice(LETTERS) for _ in range(count))
        return own if count < 24 else f"call_{own}"


class AnswerReader:
    """Reads one answer while its text grows: `push` and `finish` return new parts, however the text is cut."""

    def __init__(self, form: AnswerForm) -> None:
        schemas = {function.name: function.schema for function in form.functions}
        self._out = Output(schemas, form.spelt, None if form.several else 1)
        self._form, self._plain = form, False
        self._steps: Characters = self._read()
        next(self._steps)

    @property
    def calls(self) -> int:
        """Calls that have begun so far."""
        return self._out.calls

    @property
    def whole(self) -> bool:
        """Whether the last call's arguments are complete."""
        try:
            json.loads("".join(self._out.last))
        except (ValueError, RecursionError):
            return False
        return True

    def push(self, text: str) -> list[Part]:
        """Take more text."""
        out, send = self._out, self._steps.send
        for place, character in enumerate(text):
            if self._plain:
                out.put(CONTENT, out.spell(text[place:]))
                break
            if out.raw is not None:
                out.raw.append(character)
            send(character)
        return out.take()

    def finish(self) -> list[Part]:
        """End the answer."""
        if not self._plain:
            try:
                self._steps.send(END)
            except StopIteration:
                self._plain = True
        return self._out.take()

    def _read(self) -> Characters:
        form, out = self._form, self._out
        character = yield
        if form.thinking is not None:
            character = yield from read_thinking(character, out, form.thinking.opened)
        if form.tools is not None:
            return (yield from read_text(character, out, form.tools))
        self._plain = True
        out.put(CONTENT, out.spell_one(character))
        return (yield)


class AnswerForms:
    """The forms that a model writes. Thread-safe; what they need is read when first asked for.

    Parameters
    ----------
    tool_parser, reasoning_parser : str
        A form's name, AUTO for that of the chat template, or NONE.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        self._tokenizer, self._tool_parser, self._reasoning_parser = tokenizer, tool_parser, reasoning_parser

    @cached_property
    def template(self) -> str:
        """The chat template."""
        return self._tokenizer.template_source

    @cached_property
    def tools(self) -> ToolFormat | None:
        """The form of calls; None: the model knows none."""
        return format_of_template(self.template) if self._tool_parser == AUTO else TOOL_FORMATS.get(self._tool_parser)

    @cached_property
    def thinking(self) -> tuple[int, int] | None:
        """The tokens around thinking; None: the model does not think, or nobody asks for it apart."""
        opening, closing = map(self._tokenizer.added_token, THINK_TAGS)
        asked = self._reasoning_parser
        knows = asked != NONE and (asked != AUTO or THINK_TAGS[1] in self.template)
        return None if opening is None or closing is None or not knows else (opening, closing)

    @cached_property
    def _several(self) -> bool:
        """Whether the template writes a message of several calls; Llama 3's says this when it refuses one."""
        return "only supports single tool-calls" not in self.template

    def tags(self, form: ToolFormat) -> Tags:
        """Find the tokens of a form's tags."""
        texts = (form.opening, form.closing, form.arguments)
        return Tags(*(self._tokenizer.added_token(text) if text else None for text in texts))

    def thinking_of(self, prompt: str, budget: int | None = None, continues: bool = False) -> Thinking | None:
        """Tell by the end of a prompt how its answer thinks; None: it does not. `continues`: the prompt ends within an answer."""
        end = prompt.rstrip()
        inside = prompt.rfind(THINK_TAGS[0]) > prompt.rfind(THINK_TAGS[1])
        if self.thinking is None or end.endswith(THINK_TAGS[1]) or (continues and not inside):
            return None
        opened = continues or end.endswith(THINK_TAGS[0]) or self._reasoning_parser == "deepseek_r1"
        return Thinking(*self.thinking, opened, budget)

    def form(self, thinking: Thinking | None, functions: Sequence[Function] = (), several: bool = True) -> AnswerForm:
        """Make the form of one request's answers."""
        tools = self.tools if functions else None
        found: list[tuple[int | None, str]] = []
        if thinking is not None:
            found += [(thinking.opening, THINK_OPEN), (thinking.closing, THINK_CLOSE)]
        if tools is not None:
            found += zip(self.tags(tools), (CALL_OPEN, CALL_CLOSE, CALL_ARGUMENTS), strict=True)
        marks = {token: mark for token, mark in found if token is not None}
        texts = {
            mark: "" if self._tokenizer.is_special(token) else self._tokenizer.token_bytes(token).decode()
            for token, mark in marks.items()
        }
        return AnswerForm(thinking, tools, tuple(functions), several and self._several, marks, texts)


def can_guide() -> bool:
    """Whether the library that guides need is installed."""
    return importlib.util.find_spec("llguidance") is not None


def answer_guide(
    form: AnswerForm, tags: Tags, must_call: bool, ends: Sequence[int], text: Guide | None = None
) -> Guide | None:
    """Make the guide of an answer: its thinking, then its text, or calls of functions. None: nothing has to be followed.

    Parameters
    ----------
    must_call : bool
        Whether the answer has to call; else it may.
    text : Guide or None
        A schema that the text follows.
    """
    thinking, tools = form.thinking, form.tools
    if tools is None and (thinking is None or (text is None and thinking.budget is None)):
        return text
    schema = None if text is None else json_rule(json.loads(text.guide), strict=True)
    rules = WS
    if tools is None:
        answer = "WS? json" if schema else "<[*]>*"
    else:
        must, may, own = tools.grammar(tools, form.functions, tags, form.several)
        rules += own
        answer = f"WS? {must}" if must_call else may
        if schema is not None and not must_call:
            if tags.opening is None or tools.bare:
                raise FieldError(
                    "response_format",
                    f"response_format = json: must be text with tools and the format {tools.name}, whose calls are JSON or a "
                    "list without a tag; leave one of them out",
                )
            answer = f"WS? json | WS? {must}"
    if schema is not None:
        rules += f"json: {schema}\n"
    start = f"start: {_thinking_rule(thinking, ends)} answer" if thinking is not None else "start: answer"
    return Guide(GuideType.LARK, f"%llguidance {{}}\n{start}\nanswer: {answer}\n{rules}")


def _thinking_rule(thinking: Thinking, ends: Sequence[int]) -> str:
    stops = ",".join(str(token) for token in sorted({thinking.closing, *ends}))
    many = {None: f"<[^{stops}]>*", 0: ""}.get(thinking.budget, f"<[^{stops}]>{{0,{thinking.budget}}}")
    inside = f"{many} <[{thinking.closing}]>"
    return inside if thinking.opened else f"(WS? <[{thinking.opening}]> {inside})?"
