"""What all bodies of JSON share: limits, and messages that name the field and the place at fault.

A client can send anything. So a body is first split into its fields without building values, and each is decoded by its type.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import msgspec

from kvseek.core.errors import RequestError

MAX_FIELD_BYTES = 1 << 20  # most bytes of JSON for a field that is not the prompt
MAX_HALVES = 1 << 16  # places of a faulty body that are looked at, as each takes 0.5 µs
SHOWN_CHARACTERS = 40  # most characters of a value in an error message
KINDS = {'"': "a string", "{": "an object", "[": "a list", "t": "true", "f": "false", "n": "null"}


class JsonFault(RequestError):
    """A body that is no JSON object of known fields.

    Parameters
    ----------
    field : str
        The field at fault; empty if there is none.
    unknown : bool
        Whether there is no such field.
    """

    def __init__(self, field: str, message: str, unknown: bool = False) -> None:
        super().__init__(message)
        self.field, self.unknown = field, unknown


class FieldSplitter:
    """Splits bodies into their fields. An unknown field ends that at once, because a body could have a million of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        fields = [(name, msgspec.Raw, None) for name in self.names]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Body", fields, forbid_unknown_fields=True))

    def split(self, body: bytes | bytearray) -> dict[str, msgspec.Raw]:
        """Return the JSON of each field that is there; its syntax is right. Raises JsonFault."""
        try:
            found = self._decoder.decode(body)
        except RecursionError:
            raise JsonFault("", "the body nests too deeply: must be an object of fields; send such") from None
        except msgspec.ValidationError as error:
            unknown = re.search(r"unknown field `(.*)`", str(error), re.DOTALL)
            if unknown is None:
                raise JsonFault(
                    "", "the body is not a JSON object; send {...} with the fields of the request"
                ) from None
            name = shortened(unknown[1])
            raise JsonFault(
                name, f"{name}: there is no such field; check the spelling, or leave it out", unknown=True
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JsonFault(*_fault(body, error, self.names)) from None
        fields = ((name, getattr(found, name)) for name in self.names)
        return {name: raw for name, raw in fields if raw is not None}


# An escape that is half of a surrogate pair: a first half before no second one, or a second behind no first.
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB]..\\u....))",
    re.DOTALL,
)


def _half_character(body: bytes | bytearray, end: int) -> int | None:
    """Return where the first half of a surrogate pair stands in JSON before byte `end`; None: nowhere."""
    for found in itertools.islice(_HALF.finditer(body, 0, end), MAX_HALVES):
        at = found.start()
        while at > 0 and body[at - 1] == ord("\\"):
            at -= 1
        if (found.start() - at) % 2 == 0:  # else the backslash is itself escaped
            return found.start()
    return None


def _fault(body: bytes | bytearray, error: Exception, names: Iterable[str]) -> tuple[str, str]:
    """Find what is wrong with a body that msgspec refuses as JSON; its message does not always tell.

    Parameters
    ----------
    names : iterable of str
        The fields that a body may have.

    Returns
    -------
    field : str
        The last field before the fault; empty if there is none.
    message : str
    """
    place = re.search(r"\(byte (\d+)\)", str(error))
    end = int(place[1]) if place else len(body)
    half = _half_character(body, end)
    known = "|".join(map(re.escape, names))
    fields = re.findall(rf'"({known})"\s*:'.encode(), body[: end if half is None else half])
    field = fields[-1].decode() if fields else ""
    if half is not None:
        shown = body[half : half + 6].decode("ascii", "replace")
        what = f"{shown} at byte {half} of the body is half of a surrogate pair, such as half an emoji"
        return field, f"{field or 'the body'}: {what}; send the whole character"
    where = f" (in or after the field {field})" if field else ""
    if place is None and "truncated" in str(error):
        return field, f"the body is not JSON{where}: it ends at byte {end}, before it is complete; send all of it"
    return field, f"the body is not JSON{where}: {error}; send valid JSON, encoded as UTF-8"


def first_character(raw: msgspec.Raw) -> str:
    """Return the first character of JSON, which tells its kind; characters that are not in KINDS begin numbers."""
    return chr(memoryview(raw)[0])


def shown(raw: msgspec.Raw) -> str:
    """Shorten a client's JSON for an error message; lists and objects are only named as such."""
    kind = first_character(raw)
    if kind in "{[":
        return KINDS[kind]
    return shortened(bytes(memoryview(raw)[: 4 * SHOWN_CHARACTERS]).decode("utf-8", "replace"))


def shortened(value: object) -> str:
    """Shorten a value for an error message, to what a reader needs to find it."""
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
