"""The field `response_format`: which form the answer has to have."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvseek.core.guide import MAX_GUIDE_BYTES, Guide, GuideType

from .errors import FieldError
from .fields import decode, is_absent
from .parameters import require

NAME = "response_format"
ANY_OBJECT = '{"type": "object"}'  # OpenAI's json_object


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema, with what OpenAI shows of it to the model, or has for its own use: without effect here."""

    name: str
    schema: msgspec.Raw = msgspec.Raw()
    description: str | None = None
    strict: bool | None = None  # the answer follows the schema in any case


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


_decoder = msgspec.json.Decoder(ResponseFormat)


def read_guide(raw: msgspec.Raw) -> Guide | None:
    """Read the guide that the field asks for, None for plain text; raises FieldError. Compiling it may still fail."""
    if is_absent(raw):
        return None
    size, limit = memoryview(raw).nbytes, f"<= {2 * MAX_GUIDE_BYTES} bytes of JSON"
    require(size <= 2 * MAX_GUIDE_BYTES, NAME, f"{size} bytes", limit, "send a smaller schema")
    wanted: ResponseFormat = decode(NAME, _decoder, raw)
    given = wanted.json_schema is not None
    fits = given == (wanted.type == "json_schema")
    place = f"{NAME}.json_schema"
    require(
        fits,
        place,
        "an object" if given else None,
        "there if type is json_schema, and only then",
        "correct one of them",
    )
    if wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return Guide(GuideType.JSON_SCHEMA, ANY_OBJECT)
    schema = bytes(wanted.json_schema.schema)
    require(
        schema[:1] == b"{", f"{place}.schema", schema[:40].decode("utf-8", "replace"), "an object", "send a JSON schema"
    )
    require(
        len(schema) <= MAX_GUIDE_BYTES, f"{place}.schema", f"{len(schema)} bytes", f"<= {MAX_GUIDE_BYTES}", "shorten it"
    )
    try:
        return Guide(GuideType.JSON_SCHEMA, schema.decode())
    except UnicodeDecodeError as error:
        raise FieldError(NAME, f"{place}.schema: not UTF-8 ({error.reason}); send the text encoded as UTF-8") from None
