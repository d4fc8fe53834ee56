"""The tools of a chat's request: functions that the model may call, whether it has to, and the calls that its messages repeat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from kvseek.core.errors import RequestError, renamed
from kvseek.core.guide import MAX_GUIDE_BYTES, check_schema
from kvseek.server.http.content import first_character

from .fields import ABSENT, FieldError, decode, is_absent, require
from .tool_formats import Function, Json

MAX_TOOLS = 128  # OpenAI's
MAX_CALLS = 128  # of one message
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}  # OpenAI's for no parameters


class FunctionFields(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function as a client describes it."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool; kinds other than functions are refused. `cache_control`, which proxies send, has no effect."""

    type: str
    function: FunctionFields
    cache_control: msgspec.Raw = ABSENT


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function that has to be called."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call, with its arguments as the model wrote them, and as OpenAI's client has read them."""

    name: str
    arguments: str
    parsed_arguments: msgspec.Raw = ABSENT  # without effect


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an assistant's message repeats."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # of a stream, which some clients send back


class Tools(NamedTuple):
    """The functions that a model may call, and what its template gets of them.

    `named` is one that it has to call, and `must` says whether it has to call any.
    """

    functions: Sequence[Function] = ()
    written: Sequence[Json] = ()
    must: bool = False
    named: str | None = None

    @property
    def callable(self) -> Sequence[Function]:
        """The functions that may be called."""
        return [each for each in self.functions if self.named in (None, each.name)]


_tools = msgspec.json.Decoder(list[Tool])
_choice = msgspec.json.Decoder(str | NamedTool)
_calls = msgspec.json.Decoder(list[ToolCall])


def read_tools(raw: msgspec.Raw, raw_choice: msgspec.Raw) -> Tools:
    """Read `tools` and `tool_choice`; raises FieldError."""
    found: list[Tool] = [] if is_absent(raw) else decode("tools", _tools, raw)
    require(len(found) <= MAX_TOOLS, "tools", f"{len(found)} tools", f"<= {MAX_TOOLS} tools", "send fewer")
    choice: str | NamedTool = "auto" if is_absent(raw_choice) else decode("tool_choice", _choice, raw_choice)
    kinds = '"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'
    known = not isinstance(choice, str) or choice in ("none", "auto", "required")
    require(known, "tool_choice", choice, kinds, "correct it")
    functions, written = list[Function](), list[Json]()
    for number, tool in enumerate(found):
        function, own = _function(f"tools[{number}]", tool)
        twice = any(function.name == other.name for other in functions)
        require(not twice, f"tools[{number}].function.name", function.name, "another name than before", "send it once")
        functions.append(function)
        written.append(own)
    if not functions:
        none = isinstance(choice, str) and choice != "required"
        require(none, "tool_choice", "a call", '"none" or "auto" without tools', "send tools")
        return Tools()
    if isinstance(choice, NamedTool):
        name = choice.function.name
        known = any(name == function.name for function in functions)
        require(known, "tool_choice.function.name", name, "the name of one of the tools", "correct it")
        return Tools(functions, written, True, name)
    # As with OpenAI, a model that may not call is told of the tools all the same.
    return Tools([] if choice == "none" else functions, written, choice == "required")


def _function(place: str, tool: Tool) -> tuple[Function, Json]:
    require(tool.type == "function", f"{place}.type", tool.type, '"function"', "kvseek has no tools of its own")
    given, name = tool.function, tool.function.name
    place = f"{place}.function"
    characters = "1 to 128 letters, digits and _ . : / -"
    require(NAME.fullmatch(name) is not None, f"{place}.name", name, characters, "rename the function")
    schema = NO_ARGUMENTS if is_absent(given.parameters) else _schema(f"{place}.parameters", given.parameters)
    own: Json = {"name": name}
    if given.description is not None:
        own["description"] = given.description
    own["parameters"] = schema if schema is not NO_ARGUMENTS else {"type": "object", "properties": {}}
    return Function(name, schema, bool(given.strict)), {"type": "function", "function": own}


def _schema(place: str, raw: msgspec.Raw) -> Json:
    size = memoryview(raw).nbytes
    require(size <= MAX_GUIDE_BYTES, place, f"{size} bytes", f"<= {MAX_GUIDE_BYTES} bytes of JSON", "shorten it")
    require(first_character(raw) == "{", place, "no object", "a JSON schema of an object", "send one, or leave it out")
    text = bytes(raw).decode("utf-8", "replace")
    try:
        check_schema(text)
    except RequestError as error:
        raise FieldError("tools", renamed(str(error), {"guided_decoding_guide": place})) from None
    schema: Json = json.loads(text)
    kind = schema.get("type", "object")
    require(kind == "object", f"{place}.type", kind, '"object"', "arguments have names; put the value into an object")
    for name, wanted in (("properties", dict), ("required", list)):
        fits = isinstance(schema.get(name, wanted()), wanted)
        require(fits, f"{place}.{name}", schema.get(name), "an object" if wanted is dict else "a list", "correct it")
    return {"type": "object"} | schema


def read_calls(place: str, raw: msgspec.Raw) -> list[Json]:
    """Read the calls of an assistant's message as templates take them, with arguments as objects; raises FieldError."""
    calls: list[ToolCall] = decode("messages", _calls, raw)
    few = len(calls) <= MAX_CALLS
    require(few, f"{place}.tool_calls", f"{len(calls)} calls", f"<= {MAX_CALLS} calls", "send fewer")
    written = []
    for number, call in enumerate(calls):
        where = f"{place}.tool_calls[{number}].function.arguments"
        text = call.function.arguments or "{}"  # some clients send nothing for a call without arguments
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = str(error)[:100]
            raise FieldError("messages", f"{where}: is no JSON ({reason}); send the arguments as valid JSON") from None
        require(isinstance(arguments, dict), where, text, "a JSON object", "send arguments by their names")
        function = {"name": call.function.name, "arguments": arguments}
        written.append({"id": call.id, "type": "function", "function": function})
    return written


def text_of(value: Any) -> list[str]:
    """Return the texts of JSON, for their bytes."""
    texts, left = list[str](), [value]
    while left:  # arguments of calls may nest as deep as Python's stack
        each = left.pop()
        if isinstance(each, str):
            texts.append(each)
        elif isinstance(each, Mapping):
            left += (*each, *each.values())
        elif isinstance(each, list):
            left += each
    return texts
