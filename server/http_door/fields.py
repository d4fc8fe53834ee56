"""Makes the tensor of a model's input from a JSON field; kind, range and number of values are checked strictly.

A client can send anything here. So no list is built from JSON before it is known to be short enough, and no nested values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvseek.core.errors import RequestError

MAX_FIELD_BYTES = 1 << 20  # most bytes of JSON for a field that is not the prompt
MAX_HALVES = 1 << 16  # places of a faulty body that are looked at, as each takes 0.5 µs
SHOWN_CHARACTERS = 40  # most characters of a value in an error message
KINDS = {'"': "a string", "{": "an object", "[": "a list", "t": "true", "f": "false", "n": "null"}
WANTED = {
    "INT32": "an integer",
    "UINT64": "an integer",
    "FP32": "a number",
    "BOOL": "true or false",
    "STRING": "a string",
}
LARGEST_FP32 = float(np.finfo(np.float32).max)
RANGES = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1), "FP32": (-LARGEST_FP32, LARGEST_FP32)}
DTYPES: dict[str, Any] = {
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "STRING": object,
}
_number = int | float  # for integers too, because a decoder of integers alone would accept 2.0
_TYPES: dict[str, Any] = {"INT32": _number, "UINT64": _number, "FP32": _number, "BOOL": bool, "STRING": str}
_ONE = {name: msgspec.json.Decoder(kind) for name, kind in _TYPES.items()}
_MANY = {name: msgspec.json.Decoder(list[kind]) for name, kind in _TYPES.items()}  # type: ignore[valid-type]
_ONE_IN_A_LIST: msgspec.json.Decoder[tuple[str]] = msgspec.json.Decoder(tuple[str])


@dataclass(frozen=True)
class Input:
    """One input of a model, as its config.pbtxt states it.

    Attributes
    ----------
    datatype : str
        One of WANTED's keys.
    dims : tuple of int
        Shape of a request's tensor without its first dimension; -1 for any number.
    max_values : int
        Most values that the input may have.
    prompt : bool
        Whether the input is the prompt, for whose size the limit of a body is made.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool
    max_values: int
    prompt: bool = False

    def tensor(self, raw: msgspec.Raw) -> NDArray[Any]:
        """Make the tensor, [1, *dims], from a field's JSON, which is one value or a flat list; raises RequestError."""
        size = memoryview(raw).nbytes
        if size > MAX_FIELD_BYTES and not self.prompt:
            raise RequestError(f"{self.name} has {size} bytes of JSON: must be <= {MAX_FIELD_BYTES}; send less")
        values = self._values(raw)
        for value in values:
            self._check_number(value)
        fixed = int(np.prod([size for size in self.dims if size > 0]))
        if len(values) % fixed or (-1 not in self.dims and len(values) != fixed):
            limit = f"a multiple of {fixed}" if -1 in self.dims else f"{fixed}"
            remedy = f"its dimensions are {list(self.dims)}"
            raise RequestError(f"{self.name} has {len(values)} values: must be {limit}; {remedy}")
        array = np.empty(len(values), dtype=DTYPES[self.datatype])
        array[:] = values
        return array.reshape(1, *self.dims)

    def _values(self, raw: msgspec.Raw) -> list[Any]:
        """Decode the values and check their kind, but not yet the range of numbers."""
        try:
            if first_character(raw) != "[":
                return [_ONE[self.datatype].decode(raw)]
            if self.prompt and self.datatype == "STRING":
                return list(_ONE_IN_A_LIST.decode(raw))
            if self.datatype != "STRING" and bytes(raw).count(b",") >= self.max_values:
                raise RequestError(f"{self.name} has more than {self.max_values} values: that is the limit; send fewer")
            values: list[Any] = _MANY[self.datatype].decode(raw)
            return values
        except UnicodeDecodeError as error:
            remedy = "send the text encoded as UTF-8"
            raise RequestError(f"{self.name}: not UTF-8 ({error.reason}); {remedy}") from None
        except msgspec.ValidationError as error:
            raise self._wrong_kind(raw, str(error)) from None
        except msgspec.DecodeError as error:
            raise RequestError(f"{self.name} = {shown(raw)}: not JSON ({error}); send valid JSON") from None

    def _check_number(self, value: Any) -> None:
        if self.datatype in ("STRING", "BOOL"):
            return
        if self.datatype != "FP32" and not isinstance(value, int):
            raise RequestError(f"{self.name} = {value!r}: must be an integer; {self._remedy}")
        low, high = RANGES[self.datatype]
        if not low <= value <= high:
            raise self._out_of_range(shortened(value))

    def _wrong_kind(self, raw: msgspec.Raw, reason: str) -> RequestError:
        """Make the error for JSON that msgspec has refused; its `reason` names the place in a list and the kind found there."""
        if "out of range" in reason and self.datatype in RANGES:
            return self._out_of_range(shown(raw))
        if "of length 1" in reason:
            return RequestError(f"{self.name} is a list of several texts: must be one; send one request per prompt")
        place = re.search(r"got `(\w+)` - at `\$(\[\d+\])`", reason)
        if place is None:
            return RequestError(f"{self.name} = {shown(raw)}: must be {WANTED[self.datatype]}; {self._remedy}")
        kind, index = place.groups()
        remedy = "send one flat list" if kind == "array" else self._remedy
        return RequestError(f"{self.name}{index} is of kind {kind}: must be {WANTED[self.datatype]}; {remedy}")

    def _out_of_range(self, value: str) -> RequestError:
        low, high = RANGES[self.datatype]
        limit = f"in [{low:.8g}, {high:.8g}]" if self.datatype == "FP32" else f"in [{low}, {high}]"
        return RequestError(f"{self.name} = {value}: must be {limit}, the range of {self.datatype}; {self._remedy}")

    @property
    def _remedy(self) -> str:
        return "leave it out for its default" if self.optional else "every request needs it"


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


def json_fault(body: bytes | bytearray, error: Exception, names: Iterable[str]) -> tuple[str, str]:
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
