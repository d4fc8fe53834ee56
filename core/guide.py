"""What the output of a request has to look like: its text follows a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .errors import RequestError, check_unicode, typed

MAX_GUIDE_BYTES = 1 << 16
# The library's time for an expression or a grammar grows with the square of its length, and what is nested deep enough ends the
# process that compiles it: a chain of 1,100 references in a schema did, 800 did not.
MAX_BYTES = {"regex": 1 << 11, "ebnf_grammar": 1 << 12, "lark": 1 << 19}  # of these kinds
MAX_TEXT_CHARACTERS = 1 << 11  # of one text in a schema, which may be an expression
MAX_REFERENCES = 128  # in a schema
MAX_DEPTH = 64  # of a schema's JSON
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class GuideType(StrEnum):
    """Kinds of guides, by TensorRT-LLM's names."""

    JSON = "json"  # any JSON value; has no text
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"  # GBNF, llama.cpp's notation, whose first rule is `root`
    LARK = "lark"  # llguidance's notation, with tokens and schemas in it: the server's own, which no client may send


KINDS = ", ".join(kind for kind in GuideType if kind is not GuideType.LARK)  # that clients may send


@dataclass(frozen=True)
class Guide:
    """A guide for the output's text, which follows it from the first byte to the last.

    `guide` is the schema, expression or grammar. Whether it can be compiled is known when a request with it is submitted.
    """

    type: GuideType
    guide: str = ""

    def __post_init__(self) -> None:
        kinds = [str(kind) for kind in GuideType]
        if self.type not in kinds:
            raise RequestError(f"guided_decoding_guide_type = {self.type!r:.80}: must be one of {KINDS}; correct it")
        object.__setattr__(self, "type", GuideType(self.type))
        check_unicode("guided_decoding_guide", typed("guided_decoding_guide", self.guide, str))
        if (self.type is GuideType.JSON) == bool(self.guide):
            wanted = "absent" if self.guide else f"the {self.type}"
            raise RequestError(
                f"guided_decoding_guide = {self.guide!r:.80}: must be {wanted} for guided_decoding_guide_type = {self.type}; "
                "correct one of them"
            )
        size = len(self.guide.encode())
        limit = MAX_BYTES.get(self.type, MAX_GUIDE_BYTES)
        if size > limit:
            raise RequestError(
                f"guided_decoding_guide has {size} bytes: must be <= {limit} for guided_decoding_guide_type = {self.type}; "
                "send a shorter one"
            )
        if self.type is GuideType.JSON_SCHEMA:
            check_schema(self.guide)


def check_schema(text: str) -> None:
    """Raise RequestError if a schema is no JSON, or larger in one of its dimensions than the library can compile safely."""
    try:
        level, depth, references, longest = [json.loads(text)], 0, 0, 0
    except (ValueError, RecursionError) as error:
        raise RequestError(f"guided_decoding_guide: not a JSON schema ({error}); send JSON") from None
    while level and depth <= MAX_DEPTH:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                references += sum(name in REFERENCES for name in value)
                longest = max(longest, *map(len, value)) if value else longest
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                longest = max(longest, len(value))
        level, depth = below, depth + 1
    for name, found, limit in (
        ("levels of nesting", depth, MAX_DEPTH),
        ("references", references, MAX_REFERENCES),
        ("characters in one text", longest, MAX_TEXT_CHARACTERS),
    ):
        if found > limit:
            raise RequestError(f"guided_decoding_guide has {found} {name}: must be <= {limit}; simplify the schema")
