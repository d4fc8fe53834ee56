"""What the output of a request has to look like: its text follows a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .errors import RequestError

MAX_GUIDE_BYTES = 1 << 16
MAX_GRAMMAR_BYTES = 1 << 13  # of ebnf_grammar: the time of its translation grows with the square of its length


class GuideType(StrEnum):
    """Kinds of guides, by TensorRT-LLM's names."""

    JSON = "json"  # any JSON value; has no text
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"  # GBNF, llama.cpp's notation, whose first rule is `root`


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
            raise RequestError(
                f"guided_decoding_guide_type = {self.type!r:.80}: must be one of {', '.join(kinds)}; correct it"
            )
        object.__setattr__(self, "type", GuideType(self.type))
        if (self.type is GuideType.JSON) == bool(self.guide):
            wanted = "absent" if self.guide else f"the {self.type}"
            raise RequestError(
                f"guided_decoding_guide = {self.guide!r:.80}: must be {wanted} for guided_decoding_guide_type = {self.type}; "
                "correct one of them"
            )
        size = len(self.guide.encode("utf-8", "surrogatepass"))
        limit = MAX_GRAMMAR_BYTES if self.type is GuideType.EBNF_GRAMMAR else MAX_GUIDE_BYTES
        if size > limit:
            raise RequestError(
                f"guided_decoding_guide has {size} bytes: must be <= {limit} for guided_decoding_guide_type = {self.type}; "
                "send a shorter one"
            )
