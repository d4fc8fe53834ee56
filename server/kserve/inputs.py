"""JSON of Triton's generate extension: reads the inputs of a model from a request's body.

Kind, range and number of values are checked strictly, by the model's config.pbtxt. A client can send anything here, so no list is
built from JSON before it is known to be short enough, and no nested values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, shortened
from kvseek.server.http.content import MAX_FIELD_BYTES, FieldSplitter, JsonFault, first_character, shown
from kvseek.server.requests.models import MAX_ID_CHARACTERS, RepositoryLayout, TokenRequest
from kvseek.server.requests.translation import Inputs

MAX_LIST = 1024  # most values of an input that is not the prompt
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string = msgspec.json.Decoder(str)
WANTED = {
    "INT32": "an integer",
    "UINT64": "an integer",
    "FP32": "a number",
    "BOOL": "true or false",
    "STRING": "a string",
}
LARGEST_FP32 = (2 - 2**-23) * 2.0**127
RANGES = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1), "FP32": (-LARGEST_FP32, LARGEST_FP32)}
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

    def read(self, raw: msgspec.Raw) -> list[Any]:
        """Read the values from a field's JSON, which is one value or a flat list; raises RequestError."""
        size = memoryview(raw).nbytes
        if size > MAX_FIELD_BYTES and not self.prompt:
            raise RequestError(f"{self.name} has {size} bytes of JSON: must be <= {MAX_FIELD_BYTES}; send less")
        values = self._values(raw)
        for value in values:
            self._check_number(value)
        fixed = math.prod(size for size in self.dims if size > 0)
        if len(values) % fixed or (-1 not in self.dims and len(values) != fixed):
            limit = f"a multiple of {fixed}" if -1 in self.dims else f"{fixed}"
            remedy = f"its dimensions are {list(self.dims)}"
            raise RequestError(f"{self.name} has {len(values)} values: must be {limit}; {remedy}")
        return [*map(float, values)] if self.datatype == "FP32" else values

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


@dataclass(frozen=True)
class GenerateBody:
    """The body of a request to generate: the client's id of the request (empty without one), and the model's inputs."""

    request_id: str
    inputs: Inputs


class ModelSchema:
    """The inputs of a model, from its config.pbtxt.

    Parameters
    ----------
    layout : str
        Name of the model's layout.
    config : EngineConfig
        Configuration whose max_input_len limits the number of token ids.
    """

    def __init__(self, layout: str, served: type[TokenRequest], config: EngineConfig) -> None:
        self.served, self.model, self.max_batch = served, served.model, config.max_batch_size
        path = files("kvseek.model_repository").joinpath(layout, served.model, "config.pbtxt")
        text = re.sub(r"\$\{\w+\}", "1", path.read_text(encoding="utf-8"))
        message = text_format.Parse(text, model_config_pb2.ModelConfig())
        self.inputs = {each.name: self._input(each, config.max_input_len) for each in message.input}
        self._fields = FieldSplitter((*self.inputs, "id", "parameters"))

    def read(self, body: bytes | bytearray) -> GenerateBody:
        """Read the body of a request; raises RequestError that names the field at fault."""
        try:
            fields = self._fields.split(body)
        except JsonFault as fault:
            if not fault.unknown:
                raise
            what = f"{self.model} has no such input; check the spelling, or leave it out"
            raise RequestError(f"{fault.field}: {what}") from None
        request_id = _request_id(fields.pop("id", None))
        _refuse_parameters(fields.pop("parameters", None), self.model)
        for name, field in self.inputs.items():
            if not field.optional and name not in fields:
                raise RequestError(f"{name} is missing: {self.model} needs it; add it to the request")
        return GenerateBody(request_id, {name: self.inputs[name].read(raw) for name, raw in fields.items()})

    def _input(self, message: Any, max_input_len: int) -> Input:
        datatype = model_config_pb2.DataType.Name(message.data_type).removeprefix("TYPE_")
        prompt = message.name == self.served.prompt_input
        limit = MAX_LIST if not prompt else 1 if self.served.takes_text else max_input_len
        return Input(message.name, datatype, tuple(message.dims), message.optional, limit, prompt)


def schemas(layout: RepositoryLayout, config: EngineConfig) -> Mapping[str, ModelSchema]:
    """Make the schemas of a layout's models, by all names under which clients may ask for them."""
    own = {name: ModelSchema(layout.name, served, config) for name, served in layout.models.items()}
    return {name: own[model] for name, model in layout.names.items()}


def _request_id(raw: msgspec.Raw | None) -> str:
    if raw is None:
        return ""
    try:
        text = _string.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(f"id = {shown(raw)}: must be a string; send one, or leave it out") from None
    if len(text) > MAX_ID_CHARACTERS:
        raise RequestError(f"id has {len(text)} characters: must be <= {MAX_ID_CHARACTERS}; choose a shorter one")
    return text


def _refuse_parameters(raw: msgspec.Raw | None, model: str) -> None:
    """Refuse `parameters` unless they are an empty object, because the models take inputs and no parameters."""
    if raw is None:
        return
    size = memoryview(raw).nbytes
    if size > MAX_FIELD_BYTES:
        raise RequestError(f"parameters has {size} bytes of JSON: must be <= {MAX_FIELD_BYTES}; leave it out")
    try:
        names = list(_fields.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(f"parameters = {shown(raw)}: must be an object; leave it out") from None
    if names:
        remedy = "what it takes are fields of the request itself"
        raise RequestError(f"{shortened(names[0])}: {model} has no such parameter; leave it out, {remedy}")
