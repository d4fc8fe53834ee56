"""The forms in which models write calls of functions: how each is read from an answer, and its grammar for llguidance.

An answer is read character by character, so that what is read never depends on how it was cut into pieces. Readers are
generators: they take a character at a time, put out parts by `Output`, and return the first character that is not theirs. A tag
that is a token of the vocabulary stands in the text as a mark, half a surrogate pair, which no other token can be: so a tag that
the model spells with other tokens is text. Grammars are written with the token's number for the same reason.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

Json = dict[str, Any]
END = ""  # stands for the end of an answer
THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE, CALL_ARGUMENTS = map(chr, range(0xDC00, 0xDC05))  # marks
REASONING, CONTENT, CALL, ARGUMENTS = "reasoning", "content", "call", "arguments"  # kinds of parts; CALL has a name
Part = tuple[str, str]
Characters = Generator[None, str, str]
CONSTANTS = {"true": True, "false": False, "null": None}  # which some models write in Python
MAX_NAME = 256  # characters in which a name ends that is one
HALF_PAIR = re.compile("[\ud800-\udfff]")
VALUE_END = re.compile(r"\n?</parameter>")
UNKNOWN_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9]")  # looks around, or back at a group
NEXT_TAGS = ("<parameter=", "</function>")
WS = r"WS: /[ \n\r\t]{1,20}/" + "\n"  # as in JSON_OPTIONS of engine/schedule/guide_compiler.py
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"


class Function(NamedTuple):
    """A function that a model may call; `schema` is that of its arguments, an object's."""

    name: str
    schema: Json
    strict: bool = False


class NotACallError(Exception):
    """What began like a call is text; `next` is the character that told, which may begin something else."""

    def __init__(self, next: str) -> None:
        super().__init__("not a call")
        self.next = next


class Output:
    """The parts of an answer, and what its readers know.

    Parameters
    ----------
    schemas : mapping
        The schema of the arguments of each function that may be called.
    spelt : mapping
        The text of each mark, where it stands for nothing else.
    most_calls : int or None
        Further calls are left out.
    """

    def __init__(
        self, schemas: Mapping[str, Json], spelt: Mapping[str, str] | None = None, most_calls: int | None = None
    ) -> None:
        self.schemas, self._spelt, self._most = schemas, spelt or {}, most_calls
        self._parts: list[tuple[str, list[str]]] = []
        self.calls = 0
        self.last = list[str]()  # arguments of the last call
        self.raw: list[str] | None = None  # characters since the beginning of what may be a call

    def put(self, kind: str, text: str) -> None:
        """Add a part, to the last one if that is of the same kind."""
        if kind == CALL:
            self.calls += 1
        if not text or (kind in (CALL, ARGUMENTS) and self._most is not None and self.calls > self._most):
            return
        if kind == CALL:
            self.last = []
        elif kind == ARGUMENTS:
            self.last.append(text)
        if self._parts and kind != CALL and self._parts[-1][0] == kind:
            self._parts[-1][1].append(text)
        else:
            self._parts.append((kind, [text]))

    def take(self) -> list[Part]:
        """Return the parts, and begin anew."""
        parts, self._parts = self._parts, []
        return [(kind, "".join(texts)) for kind, texts in parts]

    def spell(self, text: str) -> str:
        """Return text with the text of its marks."""
        return "".join(map(self.spell_one, text)) if any(map(self._spelt.__contains__, text)) else text

    def spell_one(self, character: str) -> str:
        """Return a character, or the text of a mark."""
        return self._spelt.get(character, character)


def is_mark(character: str) -> bool:
    """Whether a character stands for a token."""
    return THINK_OPEN <= character <= CALL_ARGUMENTS


def _after_space(character: str) -> Characters:
    while character.isspace():
        character = yield
    return character


def _read_string(out: Output, sink: Callable[[str], None]) -> Characters:
    """Read the rest of a JSON string, in which a mark is text, up to its quote."""
    escaped = False
    while character := (yield):
        sink(out.spell_one(character))
        if character == '"' and not escaped:
            return (yield)
        escaped = character == "\\" and not escaped
    return END


def _read_value(character: str, out: Output, sink: Callable[[str], None]) -> Characters:
    """Read a JSON value from its first character, which `sink` gets as it is written."""
    depth = 0
    while character and not is_mark(character):
        if depth == 0 and (character in ",}]" or character.isspace()):
            return character
        sink(character)
        if character == '"':
            character = yield from _read_string(out, sink)
            if depth == 0:
                return character
            continue
        depth += (character in "{[") - (character in "}]")
        character = yield
        if depth == 0 and character and character not in "0123456789+-.eEtrufalsn":
            return character
    return character


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_object(character: str, out: Output) -> Characters:
    """Read {"name": ..., "arguments": {...}} from its brace; raises NotACallError unless it names a function.

    Arguments go out as they are written, or when the name is known; some models write "parameters", or the object in a string.
    """
    if character != "{":
        raise NotACallError(character)
    name, early, given = "", "", False
    character = yield from _after_space((yield))
    while character == '"':
        key = ['"']
        character = yield from _after_space((yield from _read_string(out, key.append)))
        label = _loads("".join(key))
        if character != ":" or (not name and label not in ("name", "arguments", "parameters", "type", "id")):
            if not name:
                raise NotACallError(character)
            break
        character = yield from _after_space((yield))
        if label in ("arguments", "parameters") and not given:
            given = True
            if name and character == "{":
                character = yield from _read_value(character, out, partial(out.put, ARGUMENTS))
            else:
                value: list[str] = []
                character = yield from _read_value(character, out, value.append)
                early = _written("".join(value))
                if name:
                    out.put(ARGUMENTS, early)
        else:
            value = []
            character = yield from _read_value(character, out, value.append)
            if label == "name" and not name:
                found = _loads("".join(value))
                if not isinstance(found, str) or found not in out.schemas:
                    raise NotACallError(character)
                name = found
                out.put(CALL, name)
                out.put(ARGUMENTS, early)
        character = yield from _after_space(character)
        if character == ",":
            character = yield from _after_space((yield))
    if not name:
        raise NotACallError(character)
    if character == "}":
        if not given:
            out.put(ARGUMENTS, "{}")
        character = yield
    return character


def _written(value: str) -> str:
    """Return arguments that are no object as one: JSON in a string, or null for none."""
    if value.startswith("{"):
        return value
    found = _loads(value)
    if isinstance(found, str) and isinstance(_loads(found), dict):
        return _whole_characters(found)
    return "{}" if found is None else value


def _whole_characters(text: str) -> str:
    """Return JSON in which half of a surrogate pair, which no answer may have, is written as an escape."""
    return HALF_PAIR.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _dumps(value: Any) -> str:
    """Write a value as JSON; raises ValueError for numbers that JSON does not have."""
    return _whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _read_tagged(character: str, out: Output, form: ToolFormat) -> Characters:
    """Read an object of JSON, and the closing tag."""
    character = yield from _after_space(character)
    character = yield from _read_object(character, out)
    return (yield from _closing(character, form))


def _closing(character: str, form: ToolFormat) -> Characters:
    """Read a closing tag, as a mark or a text; where there is none, nothing but space."""
    character = yield from _after_space(character)
    if character == CALL_CLOSE:
        return (yield)
    for expected in form.closing:
        if character != expected:
            break
        character = yield
    return character


def _read_llama(character: str, out: Output, form: ToolFormat) -> Characters:
    """Read objects of JSON with semicolons between them."""
    while True:
        character = yield from _after_space(character)
        character = yield from _after_space((yield from _read_object(character, out)))
        if character != ";":
            return character
        out.raw = [";"]
        character = yield


def _read_mistral(character: str, out: Output, form: ToolFormat) -> Characters:
    """Read a list of objects of JSON, or a name and its arguments."""
    character = yield from _after_space(character)
    if character == "[":
        character = yield from _after_space((yield))
        if character != "{":
            raise NotACallError(character)
        while character == "{":
            character = yield from _after_space((yield from _read_object(character, out)))
            if character == ",":
                out.raw = [","]
                character = yield from _after_space((yield))
        return (yield) if character == "]" else character
    name = ""
    while character and character != "{" and not is_mark(character) and not character.isspace():
        name += character
        character = yield
    if name not in out.schemas:
        raise NotACallError(character)
    if character == CALL_ARGUMENTS:
        character = yield
    out.put(CALL, name)
    character = yield from _after_space(character)
    if character != "{":
        return character
    return (yield from _read_value(character, out, partial(out.put, ARGUMENTS)))


def _read_pythonic(character: str, out: Output, form: ToolFormat) -> Characters:
    """Read a list of calls as Python writes them, whose arguments have names."""
    if character != "[":
        raise NotACallError(character)
    while True:
        name, character = "", (yield from _after_space((yield)))
        while character and character != "(" and not is_mark(character) and len(name) <= MAX_NAME:
            name += character
            character = yield
        if character != "(" or name not in out.schemas:
            raise NotACallError(character)
        out.put(CALL, name)
        out.put(ARGUMENTS, "{")
        character = yield from _python_arguments(out)
        character = yield from _after_space(character)
        if character != ",":
            return (yield) if character == "]" else character
        out.raw = [","]


def _python_arguments(out: Output) -> Characters:
    """Read arguments up to the closing bracket."""
    separator = ""
    while True:
        name, character = "", (yield from _after_space((yield)))
        while character and character not in "=),":
            name += character
            character = yield
        if character == "=":
            value = list[str]()
            character = yield from _python_value((yield), out, value.append)
            if not character:  # cut off
                return END
            text = _dumps(out.spell(name.strip())) + ": " + _python_json("".join(value).strip())
            out.put(ARGUMENTS, separator + text)
            separator = ", "
        if character != ",":
            out.put(ARGUMENTS, "}" if character else "")
            return (yield) if character == ")" else character


def _python_value(character: str, out: Output, sink: Callable[[str], None]) -> Characters:
    depth, quote, escaped = 0, "", False
    while character:
        if not quote and depth == 0 and character in ",)":
            return character
        sink(out.spell_one(character))
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "\"'":
            quote, escaped = character, False
        else:
            depth += (character in "([{") - (character in ")]}")
        character = yield
    return END


def _python_json(text: str) -> str:
    """Return a literal of Python, or of JSON, as JSON; what is neither, as a text."""
    try:
        json.loads(text, parse_constant=int)  # refuses NaN, which is no JSON
    except (ValueError, RecursionError):
        try:
            return _dumps(ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return _dumps(CONSTANTS.get(text, text))
    return text


def _read_xml(character: str, out: Output, form: ToolFormat) -> Characters:
    """Read <function=name>, with a <parameter=name> for each argument, up to </function> and the closing tag."""
    character = yield from _after_space(character)
    name, character = yield from _xml_name(character, "", "<function=")
    if name not in out.schemas:
        raise NotACallError(character)
    out.put(CALL, name)
    properties, separator, tag = out.schemas[name].get("properties"), "{", ""
    while True:
        if not tag:
            character = yield from _after_space(character)
        parameter, character = yield from _xml_name(character, tag, "<parameter=")
        if not parameter:
            break
        out.put(ARGUMENTS, f"{separator}{json.dumps(parameter, ensure_ascii=False)}: ")
        separator = ", "
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        tag, character = yield from _xml_value(character, is_text(schema), out)
        if tag != "<parameter=":
            break
    if character or tag:
        out.put(ARGUMENTS, "{}" if separator == "{" else "}")
    return (yield from _closing(character, form))


def _xml_name(character: str, begun: str, opening: str) -> Generator[None, str, tuple[str, str]]:
    """Read a tag of which `begun` has been read; returns its name, empty for another tag, and the next character."""
    tag = begun
    while character and not is_mark(character) and character != "\n" and len(tag) < MAX_NAME:
        tag += character
        character = yield
        if tag.endswith(">"):
            return (tag[len(opening) : -1] if tag.startswith(opening) else ""), character
    return "", character


def _xml_value(character: str, text: bool, out: Output) -> Generator[None, str, tuple[str, str]]:
    """Read the value of a parameter: a text as it stands, but for a line end at each side, or JSON.

    </parameter> ends it only before another parameter or the function's end, so that it may stand in the text. Returns the
    tag that has been read besides, and the next character.
    """
    held, whole = "", list[str]()
    give = (lambda piece: out.put(ARGUMENTS, _escaped(piece))) if text else whole.append
    out.put(ARGUMENTS, '"' if text else "")
    if character == "\n":
        character = yield
    while character:
        held += out.spell_one(character)
        found = VALUE_END.search(held)
        if found is not None:
            rest = held[found.end() :].lstrip()
            if rest in NEXT_TAGS:
                give(held[: found.start()])
                out.put(ARGUMENTS, '"' if text else _as_json("".join(whole)))
                return rest, (yield)
            wait = any(tag.startswith(rest) for tag in NEXT_TAGS)
            cut = 0 if wait else found.start() + 1
        else:
            may_end = "<" in held or held[-1] == "\n"
            cut = len(held) - (max(_begun(held, "\n</parameter>"), _begun(held, "</parameter>")) if may_end else 0)
        give(held[:cut])
        held = held[cut:]
        character = yield
    give(held)
    out.put(ARGUMENTS, "".join(whole))
    return "", END


def _begun(text: str, ending: str) -> int:
    """Return the length of the longest end of a text with which `ending` begins."""
    return next((n for n in range(min(len(text), len(ending)), 0, -1) if text.endswith(ending[:n])), 0)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """Return the value of a parameter that is no text as JSON."""
    return _python_json(text.strip())


def is_text(schema: Any) -> bool:
    """Whether a value may be a text by its schema, or the schema does not say what it is."""
    if not isinstance(schema, dict):
        return True
    if isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return any(map(is_text, schema[name]))
    kinds = schema.get("type", "" if {"allOf", "$ref", "const"} & schema.keys() else "string")
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def read_text(character: str, out: Output, form: ToolFormat) -> Characters:
    """Read an answer's text and calls. Space beside calls is left out."""
    space, first, line = "", True, True  # whether the text, or a line of it, has not begun
    while character:
        opens, tag = character == CALL_OPEN, character
        if not opens and line and not form.bare and character == form.opening[0]:
            tag = ""
            while character and form.opening.startswith(tag + character) and tag != form.opening:
                tag += character
                character = yield
            if tag != form.opening:
                out.put(CONTENT, space + tag)
                space, first, line = "", False, False
                continue
            opens, out.raw = True, [tag, character]
        elif opens or (first and character == form.bare):
            out.raw, opens = [character], True
            character = (yield) if character == CALL_OPEN else character
        if opens:
            try:
                character = yield from form.read(character, out, form)
            except NotACallError as error:
                character = error.next
                text = (out.raw or [])[: len(out.raw or ()) - len(character)]
                out.put(CONTENT, space + out.spell("".join(text)))
            out.raw, space, first, line = None, "", False, True
            continue
        if character.isspace():
            space, line = space + character, line or character == "\n"
        else:
            out.put(CONTENT, space + out.spell_one(character))
            space, first, line = "", False, False
        character = yield
    if not out.calls:
        out.put(CONTENT, space)
    return END


def read_thinking(character: str, out: Output, opened: bool) -> Characters:
    """Read thinking, if there is any, without the space around it; `opened`: the prompt has begun it."""
    if not opened or character == THINK_OPEN:
        lead = ""
        while character.isspace():
            lead += character
            character = yield
        if character != THINK_OPEN:
            out.put(CONTENT, lead)
            return character
        character = yield
    space, character = "", (yield from _after_space(character))
    while character and character != THINK_CLOSE:
        if character.isspace():
            space += character
        else:
            out.put(REASONING, space + out.spell_one(character))
            space = ""
        character = yield
    return (yield from _after_space((yield))) if character else END


class Tags(NamedTuple):
    """The tokens of a format's tags; None: the tag is no token."""

    opening: int | None = None
    closing: int | None = None
    arguments: int | None = None


def _quoted(text: str) -> str:
    return json.dumps(text)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _tag(token: int | None, text: str) -> str:
    return f"<[{token}]>" if token is not None else _quoted(text)


def json_rule(schema: Json, strict: bool) -> str:
    """Write a schema as a rule; one that is not strict may have what the library does not know, which is then not followed."""
    options = {"lenient": not strict, "coerce_one_of": not strict, "whitespace_pattern": JSON_SPACE}
    return f"%json {json.dumps((schema if strict else _without_unknown(schema)) | {'x-guidance': options})}"


def _without_unknown(schema: Any) -> Any:
    """Return a schema without the patterns that the library does not know, such as zod's for addresses of email."""
    if isinstance(schema, list):
        return list(map(_without_unknown, schema))
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_unknown(value)
        for name, value in schema.items()
        if not (name == "pattern" and isinstance(value, str) and UNKNOWN_PATTERN.search(value))
    }


def _argument_rule(schema: Any, function: Function) -> str:
    """Write the schema of one argument as a rule. Its references are to the schema of all arguments."""
    own = schema if isinstance(schema, dict) else {}
    if '"$ref"' in json.dumps(own):
        own = _moved(own) | {"$defs": {"arguments": _moved(function.schema)}}
    return json_rule(own, function.strict)


def _moved(schema: Any) -> Any:
    """Return a schema with references to where the schema of all arguments is."""
    if isinstance(schema, list):
        return list(map(_moved, schema))
    if not isinstance(schema, dict):
        return schema
    below = {name: _moved(value) for name, value in schema.items()}
    at = schema.get("$ref")
    return below | {"$ref": f"#/$defs/arguments{at[1:]}"} if isinstance(at, str) and at.startswith("#") else below


def _objects(functions: Sequence[Function], key: str, lead: str = "") -> str:
    """Write rules of objects of JSON with a name and arguments: `object`, and those that it needs. `lead` is before the brace."""
    rules = "object: " + " | ".join(f"object_{number}" for number in range(len(functions))) + "\n"
    for number, function in enumerate(functions):
        head = rf'HEAD_{number}: /{lead}\{{[ \n]{{0,20}}"name"[ \n]{{0,20}}:[ \n]{{0,20}}"{_pattern(function.name)}"/'
        body = f'WS? "," WS? {_quoted(_quoted(key))} WS? ":" WS? arguments_{number} WS? "}}"'
        rules += f"object_{number}: HEAD_{number} {body}\n{head}\n"
        rules += f"arguments_{number}: {json_rule(function.schema, function.strict)}\n"
    return rules


def _grammar_of_tags(body: str, tags: Tags, several: bool, opening: str, closing: str) -> tuple[str, str, str]:
    rules = f"call: {_tag(tags.opening, opening)} inside\ninside: WS? {body} WS? {_tag(tags.closing, closing)}\n"
    more = " (WS? call)*" if several else ""
    if tags.opening is not None:
        return f"call{more}", f"TEXT (call{more})?", f"{rules}TEXT: /(?s:.*)/\n"
    place = r"((?s:.*)\n)?[ \t]*" + re.escape(opening)
    rules += f"first[lazy]: /{place}/\nTEXT: /(?s:.*)/ & ~/{place}(?s:.*)/\n"
    return f"call{more}", f"TEXT | first inside{more}", rules


def _hermes_grammar(form: ToolFormat, functions: Sequence[Function], tags: Tags, several: bool) -> tuple[str, str, str]:
    call, answer, rules = _grammar_of_tags("object", tags, several, form.opening, form.closing)
    return call, answer, rules + _objects(functions, "arguments")


def _xml_grammar(form: ToolFormat, functions: Sequence[Function], tags: Tags, several: bool) -> tuple[str, str, str]:
    call, answer, rules = _grammar_of_tags("function", tags, several, form.opening, form.closing)
    rules += "function: " + " | ".join(f"function_{number}" for number in range(len(functions))) + "\n"
    rules += "any[lazy]: /(?s:.*)\\n<\\/parameter>/\n"
    for number, function in enumerate(functions):
        properties = function.schema.get("properties") or {}
        required = function.schema.get("required") or ()
        parts = []
        for place, (name, schema) in enumerate(properties.items()):
            rule = f"parameter_{number}_{place}"
            opening = _quoted(f"<parameter={name}>\n")
            if is_text(schema) and not (isinstance(schema, dict) and "enum" in schema):
                value = "any"
            elif isinstance(schema, dict) and all(isinstance(each, str) for each in schema.get("enum", (0,))):
                value = "(" + " | ".join(_quoted(each) for each in schema["enum"]) + ') "\\n</parameter>"'
            else:
                rules += f"value_{number}_{place}: {_argument_rule(schema, function)}\n"
                value = f'value_{number}_{place} "\\n</parameter>"'
            rules += f'{rule}: {opening} {value} "\\n"\n'
            parts.append(rule if name in required else f"{rule}?")
        rules += f'function_{number}: {_quoted(f"<function={function.name}>")} WS {" ".join(parts)} "</function>"\n'
    return call, answer, rules


def _llama_grammar(form: ToolFormat, functions: Sequence[Function], tags: Tags, several: bool) -> tuple[str, str, str]:
    names = "|".join(_pattern(function.name) for function in functions)
    space = r"[ \n]{0,20}"
    head = rf'\s*\{{{space}"name"{space}:{space}"({names})"'
    rules = _objects(functions, "parameters", r"\s*") + f"TEXT: /(?s:.*)/ & ~/{head}(?s:.*)/\n"
    tag = "" if tags.opening is None else f"<[{tags.opening}]>? "
    more = ' (WS? ";" WS? object)*' if several else ""
    tagged = "" if tags.opening is None else f" (<[{tags.opening}]> object{more})?"
    return f"{tag}object{more}", f"TEXT{tagged} | object{more}", rules


def _mistral_grammar(
    form: ToolFormat, functions: Sequence[Function], tags: Tags, several: bool
) -> tuple[str, str, str]:
    opening, text = _tag(tags.opening, form.opening), "TEXT: /(?s:.*)/\n"
    if tags.arguments is None:
        more = ' (WS? "," WS? object)*' if several else ""
        rules = _objects(functions, "arguments") + f'call: {opening} WS? "[" WS? object{more} WS? "]"\n'
        return "call", "TEXT call?", rules + text
    rules = "call: " + " | ".join(f"call_{number}" for number in range(len(functions))) + "\n"
    for number, function in enumerate(functions):
        rules += f"call_{number}: {opening} {_quoted(function.name)} <[{tags.arguments}]> arguments_{number}\n"
        rules += f"arguments_{number}: {json_rule(function.schema, function.strict)}\n"
    more = "call*" if several else ""
    return f"call {more}", f"TEXT (call {more})?", rules + text


def _pythonic_grammar(
    form: ToolFormat, functions: Sequence[Function], tags: Tags, several: bool
) -> tuple[str, str, str]:
    names = "|".join(_pattern(function.name) for function in functions)
    rules = rf"TEXT: /(?s:.*)/ & ~/\s*\[\s*({names})\((?s:.*)/" + "\n"
    calls, heads = [], []
    for number, function in enumerate(functions):
        own = function.schema.get("properties") or {}
        required = [name for name in own if name in (function.schema.get("required") or ())]
        given = []
        for place, name in enumerate((*required, *(name for name in own if name not in required))):
            schema = own[name]
            kind = schema.get("type") if isinstance(schema, dict) else None
            value = {"boolean": '("True" | "False")', "null": '"None"'}.get(str(kind), f"value_{number}_{place}")
            rules += f"argument_{number}_{place}: {_quoted(f'{name}=')} {value}\n"
            if value.startswith("value"):
                rules += f"{value}: {_argument_rule(schema, function)}\n"
            given.append(f"argument_{number}_{place}")
        rules += f"arguments_{number}: {_list_of(given, len(required))}\n"
        rules += rf"HEAD_{number}: /\s*\[{_pattern(function.name)}\(/" + "\n"
        heads.append(f'HEAD_{number} arguments_{number} ")"')
        calls.append(f'{_quoted(f"{function.name}(")} arguments_{number} ")"')
    more = ' (", " call)*' if several else ""
    rules += f"call: {' | '.join(calls)}\nfirst: {' | '.join(heads)}\n"
    return f'first{more} "]"', f'TEXT | first{more} "]"', rules


def _list_of(names: Sequence[str], required: int) -> str:
    """Write rules of which the first ones must stand there, and others may, in their order, with commas between them."""
    if not names:
        return '""'
    if required:
        return " ".join(
            (
                *(('", " ' if place else "") + name for place, name in enumerate(names[:required])),
                *(f'(", " {name})?' for name in names[required:]),
            )
        )
    # the first that stands there has no comma before it
    ways = (name + "".join(f' (", " {later})?' for later in names[place + 1 :]) for place, name in enumerate(names))
    return " | ".join((*(f"({way})" for way in ways), '""'))


@dataclass(frozen=True)
class ToolFormat:
    """One of the forms; `name` is vLLM's.

    Attributes
    ----------
    opening, closing, arguments : str
        Tags around a call, and before its arguments. Where the vocabulary has no such token, an opening tag counts as text at
        the beginning of a line.
    bare : str
        The character with which an answer begins that is calls without a tag; empty: there are none.
    read : callable
        Reads calls from the first character behind the tag, or from `bare`; raises NotACallError.
    grammar : callable
        Writes, for functions, tags and whether several calls are allowed: rules, and what of them an answer that has to call, and
        one that may, consists of.
    id_characters : int
        Length of a call's id.
    """

    name: str
    read: Callable[[str, Output, ToolFormat], Characters]
    grammar: Callable[[ToolFormat, Sequence[Function], Tags, bool], tuple[str, str, str]]
    opening: str = ""
    closing: str = ""
    arguments: str = ""
    bare: str = ""
    id_characters: int = 24


TOOL_FORMATS = {
    form.name: form
    for form in (
        ToolFormat("hermes", _read_tagged, _hermes_grammar, "<tool_call>", "</tool_call>"),
        ToolFormat("qwen3_coder", _read_xml, _xml_grammar, "<tool_call>", "</tool_call>"),
        ToolFormat("llama3_json", _read_llama, _llama_grammar, "<|python_tag|>", bare="{"),
        ToolFormat("pythonic", _read_pythonic, _pythonic_grammar, "<|python_start|>", "<|python_end|>", bare="["),
        # Its templates take ids of nine letters and digits alone.
        ToolFormat("mistral", _read_mistral, _mistral_grammar, "[TOOL_CALLS]", arguments="[ARGS]", id_characters=9),
    )
}


def format_of_template(source: str) -> ToolFormat | None:
    """Find the form that a chat template tells its model to write, by what stands in it; None: it knows no tools."""
    if "tools" not in source:
        return None
    signs = {
        "qwen3_coder": ("<function=",),
        "hermes": ("<tool_call>",),
        "mistral": ("[TOOL_CALLS]",),
        "pythonic": ("func_name1(", "[func_name"),
        "llama3_json": ("<|python_tag|>", '"parameters": '),
    }
    return next((TOOL_FORMATS[name] for name, texts in signs.items() if any(text in source for text in texts)), None)
