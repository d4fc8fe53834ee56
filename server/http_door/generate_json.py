"""JSON of Triton's generate extension: makes tensors from a request's body, and JSON from a chunk of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.requests.layouts import Layout, ServedModel
from kvseek.server.requests.served_request import MAX_ID_CHARACTERS, Chunk
from kvseek.server.requests.text_request import max_text_bytes
from kvseek.server.requests.translation import Tensors

from .fields import MAX_FIELD_BYTES, Input, json_fault, shortened, shown

MODEL_VERSION = "1"
MAX_LIST = 1024  # most values of an input that is not the prompt
JSON_BYTES_PER_BYTE = 6  # a byte of text takes at most \\u0000
JSON_BYTES_PER_ID = 12  # ten digits, a comma and a space
Fields = dict[str, msgspec.Raw]  # JSON of each field; its syntax has been checked, but no values are built from it
_fields = msgspec.json.Decoder(Fields)
_string = msgspec.json.Decoder(str)


@dataclass(frozen=True)
class GenerateBody:
    """The body of a request to generate: the client's id of the request (empty without one), and tensors of [1, ...]."""

    request_id: str
    tensors: Tensors


class ModelSchema:
    """The inputs of a model, from its config.pbtxt.

    Parameters
    ----------
    layout : str
        Name of the model's layout.
    config : EngineConfig
        Configuration whose max_input_len limits the number of token ids.
    """

    def __init__(self, layout: str, model: ServedModel, config: EngineConfig) -> None:
        self.served, self.model, self.max_batch = model, model.name, config.max_batch_size
        path = files("kvseek.model_repository").joinpath(layout, model.name, "config.pbtxt")
        text = re.sub(r"\$\{\w+\}", "1", path.read_text(encoding="utf-8"))
        message = text_format.Parse(text, model_config_pb2.ModelConfig())
        self.inputs = {each.name: self._input(each, config.max_input_len) for each in message.input}
        # An unknown field ends the decoding, because a body could have a million of them.
        names = (*self.inputs, "id", "parameters")
        known = msgspec.defstruct("Body", [(name, msgspec.Raw, None) for name in names], forbid_unknown_fields=True)
        self._decoder = msgspec.json.Decoder(known)

    def read(self, body: bytes | bytearray) -> GenerateBody:
        """Read the body of a request; raises RequestError that names the field at fault."""
        fields = self._split(body)
        request_id = _request_id(fields.pop("id", None))
        _refuse_parameters(fields.pop("parameters", None), self.model)
        for name, field in self.inputs.items():
            if not field.optional and name not in fields:
                raise RequestError(f"{name} is missing: {self.model} needs it; add it to the request")
        return GenerateBody(request_id, {name: self.inputs[name].tensor(raw) for name, raw in fields.items()})

    def _input(self, message: Any, max_input_len: int) -> Input:
        datatype = model_config_pb2.DataType.Name(message.data_type).removeprefix("TYPE_")
        prompt = message.name == self.served.prompt
        limit = MAX_LIST if not prompt else 1 if self.served.takes_text else max_input_len
        return Input(message.name, datatype, tuple(message.dims), message.optional, limit, prompt)

    def _split(self, body: bytes | bytearray) -> Fields:
        try:
            found = self._decoder.decode(body)
            fields = ((name, getattr(found, name)) for name in found.__struct_fields__)
            return {name: raw for name, raw in fields if raw is not None}
        except RecursionError:
            raise RequestError(
                "the body nests too deeply: must be an object of values and flat lists; send such"
            ) from None
        except msgspec.ValidationError as error:
            unknown = re.search(r"unknown field `(.*)`", str(error), re.DOTALL)
            if unknown is not None:
                name = shortened(unknown[1])
                raise RequestError(
                    f"{name}: {self.model} has no such input; check the spelling, or leave it out"
                ) from None
            raise RequestError("the body is not a JSON object; send {...} with the model's inputs as fields") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(json_fault(body, error, (*self.inputs, "id", "parameters"))[1]) from None


def schemas(layout: Layout, config: EngineConfig) -> Mapping[str, ModelSchema]:
    """Make the schemas of a layout's models, by all names under which clients may ask for them."""
    own = {name: ModelSchema(layout.name, model, config) for name, model in layout.models.items()}
    return {name: own[model] for name, model in layout.names.items()}


def body_limit(model: ServedModel, config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Return the most bytes of a body for `model`: a prompt of max_input_len tokens, escaped, and the other fields."""
    if model.takes_text:
        return max_text_bytes(config, tokenizer) * JSON_BYTES_PER_BYTE + MAX_FIELD_BYTES
    return config.max_input_len * JSON_BYTES_PER_ID + MAX_FIELD_BYTES


def chunk_to_json(model: str, request_id: str, chunk: Chunk) -> bytes:
    """Write an answer or a part of one as JSON. A list of one value becomes that value, as in Triton."""
    own: Chunk = {"model_name": model, "model_version": MODEL_VERSION}
    if request_id:
        own["id"] = request_id
    return msgspec.json.encode(own | {name: _plain(value) for name, value in chunk.items()})


def error_to_json(message: str) -> bytes:
    """Write an error as JSON for a client."""
    return msgspec.json.encode({"error": message})


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)  # an enum's value
    if isinstance(value, np.ndarray):
        return value.ravel().tolist()  # flat, as Triton writes tensors
    return value[0] if isinstance(value, list) and len(value) == 1 else value


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
