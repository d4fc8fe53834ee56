"""Checks gRPC requests before they reach Triton, which 2.51 crashes or hangs on much that is refused here (docs/security.md).

A request passes if its tensors are those that the model's config.pbtxt names, lie in the request itself, and are as large as
they say, and if it uses no feature of Triton that kvseek does not need: shared memory, classification, sequences.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, shortened
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.kserve.inputs import Input, ModelSchema
from kvseek.server.requests.models import MAX_ID_CHARACTERS
from kvseek.server.requests.translation import max_text_bytes

MAX_PARAMETERS = 8
MAX_BATCH = 1024  # a batch beyond this is refused whatever max_batch_size is
BYTES_PER_ID = 10  # most bytes of a token id: four in raw contents, up to ten as a number of the protocol
OTHER_BYTES = 1 << 20
PARAMETERS = frozenset({"triton_enable_empty_final_response", "traceparent", "Streaming"})  # that requests may have
ITEM_BYTES = {"INT32": 4, "UINT64": 8, "FP32": 4, "BOOL": 1}
CONTENTS = {
    "INT32": "int_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "BOOL": "bool_contents",
    "STRING": "bytes_contents",
}
WIRE_TYPES = {"STRING": "BYTES"}  # where the protocol has another name than config.pbtxt
PRIORITY = "priority"  # a parameter of Triton, for its own queues
TIMEOUT = "timeout"  # a parameter of Triton, in microseconds; an input of kvseek's models, in seconds


def message_limit(config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Return the most bytes of an inference request: max_batch_size prompts of max_input_len tokens, and other inputs."""
    prompt = max(max_text_bytes(config, tokenizer), config.max_input_len * BYTES_PER_ID)
    return config.max_batch_size * prompt + OTHER_BYTES


def admit(request: Any, schemas: Mapping[str, ModelSchema]) -> None:
    """Make a ModelInferRequest ready for Triton; raises RequestError if the request may not reach Triton.

    Triton's parameter `timeout`, which its client libraries offer, becomes the models' input of that name, and a model's other
    name (RepositoryLayout.aliases) the name that Triton knows.
    """
    schema = schemas.get(request.model_name)
    if schema is None:
        known = ", ".join(schemas)
        raise RequestError(f"model_name = {shortened(request.model_name)}: must be one of {known}; choose one")
    request.model_name = schema.model
    if request.model_version not in ("", "1"):
        raise RequestError(f"model_version = {shortened(request.model_version)}: must be 1; leave it out")
    if len(request.id) > MAX_ID_CHARACTERS:
        raise RequestError(f"id has {len(request.id)} characters: must be <= {MAX_ID_CHARACTERS}; choose a shorter one")
    _move_timeout(request, schema.served.batched)
    _check_parameters(request.parameters, schema.model)
    _check_outputs(request.outputs)
    _check_inputs(request, schema)


def _move_timeout(request: Any, batched: bool) -> None:
    if TIMEOUT not in request.parameters:
        return
    if request.parameters[TIMEOUT].WhichOneof("parameter_choice") != "int64_param":
        raise RequestError(f"{TIMEOUT}: must be an integer as a parameter, microseconds; convert it, or send the input")
    seconds = request.parameters[TIMEOUT].int64_param / 1e6
    del request.parameters[TIMEOUT]
    # One number for each prompt; a batch that is too large is refused afterwards.
    batch = max(1, min(_batch(request), MAX_BATCH)) if batched else 1
    tensor = request.inputs.add(name=TIMEOUT, datatype="FP32", shape=[batch, 1] if batched else [1])
    if request.raw_input_contents:
        request.raw_input_contents.append(struct.pack("<f", seconds) * batch)
    else:
        tensor.contents.fp32_contents.extend([seconds] * batch)


def _batch(request: Any) -> int:
    """Return the first dimension of a request's first tensor."""
    return request.inputs[0].shape[0] if request.inputs and request.inputs[0].shape else 1


def _check_parameters(parameters: Mapping[str, Any], model: str) -> None:
    if len(parameters) > MAX_PARAMETERS:
        raise RequestError(f"parameters: {len(parameters)} are given: must be <= {MAX_PARAMETERS}; send fewer")
    for name in parameters:
        if name not in PARAMETERS:
            spelling = "check the spelling, or leave it out"
            remedy = "send the input `priority`, 0 to 255" if name == PRIORITY else spelling
            raise RequestError(f"{shortened(name)}: {model} has no such parameter; {remedy}")


def _check_outputs(outputs: Any) -> None:
    for output in outputs:
        if len(output.parameters):
            name = shortened(min(output.parameters))
            raise RequestError(
                f"outputs: parameter {name} is not supported; leave it out, outputs come in the response"
            )


def _check_inputs(request: Any, schema: ModelSchema) -> None:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError(
            f"raw_input_contents has {len(raw)} items: must be {len(request.inputs)}, one for each input, or none"
        )
    seen: set[str] = set()
    batch = _batch(request) if schema.served.batched else None
    for number, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in schema.inputs:
            raise RequestError(
                f"{shortened(name)}: {schema.model} has no such input; check the spelling, or leave it out"
            )
        if name in seen:
            raise RequestError(f"{name} is given twice: must be once; leave one out")
        seen.add(name)
        _check_tensor(tensor, schema.inputs[name], raw[number] if raw else None, batch, schema.max_batch)
    missing = next((name for name, field in schema.inputs.items() if not field.optional and name not in seen), None)
    if missing is not None:
        raise RequestError(f"{missing} is missing: {schema.model} needs it; add it to the request")


def _check_tensor(tensor: Any, field: Input, raw: bytes | None, batch: int | None, max_batch: int) -> None:
    """Raise RequestError unless a tensor is as `field` says, in a batch of this size; None: there is no batch dimension."""
    name, wire = field.name, WIRE_TYPES.get(field.datatype, field.datatype)
    if tensor.datatype != wire:
        raise RequestError(f"{name}: datatype = {shortened(tensor.datatype)}: must be {wire}; convert it")
    if len(tensor.parameters):
        given = shortened(min(tensor.parameters))
        raise RequestError(f"{name}: parameter {given} is not supported; send the tensor in the request itself")
    shape, first = list(tensor.shape), [] if batch is None else ["batch"]
    if len(shape) != len(first) + len(field.dims) or min(shape) < 1:
        wanted = [*first, *("n" if size < 0 else size for size in field.dims)]
        raise RequestError(f"{name}: shape = {shape[:8]}: must be {wanted} with n >= 1; reshape it")
    if batch is not None and (shape[0] != batch or batch > max_batch):
        limit = f"{batch} as in the first input, and at most max_batch_size = {max_batch}"
        raise RequestError(f"{name}: shape = {shape[:8]}: its first number must be {limit}; send several requests")
    for size, wanted_size in zip(shape[len(first) :], field.dims, strict=True):
        if wanted_size > 0 and size != wanted_size:
            raise RequestError(f"{name}: shape = {shape}: must be {[*first, *field.dims]}, -1 for any size; reshape it")
    count, most = math.prod(shape), (batch or 1) * field.max_values  # Python's integers do not overflow
    if count > most:
        raise RequestError(f"{name} has {count} values: must be <= {most}; send fewer")
    _check_contents(tensor, field, raw, count)


def _check_contents(tensor: Any, field: Input, raw: bytes | None, count: int) -> None:
    """Raise RequestError unless exactly one field has the tensor's `count` values."""
    contents = {descriptor.name: value for descriptor, value in tensor.contents.ListFields()}
    if raw is None:
        values = contents.pop(CONTENTS[field.datatype], ())
        if len(values) != count:
            raise RequestError(
                f"{field.name} has {len(values)} values: must be {count} as its shape says; send them all"
            )
    elif field.datatype == "STRING":
        _check_strings(field.name, raw, count)
    elif len(raw) != count * ITEM_BYTES[field.datatype]:
        size = count * ITEM_BYTES[field.datatype]
        raise RequestError(f"{field.name} has {len(raw)} bytes: must be {size} as its shape says; send them all")
    if contents:
        raise RequestError(f"{field.name}: contents.{min(contents)} is given beside its values; leave it out")


def _check_strings(name: str, raw: bytes, count: int) -> None:
    """Raise RequestError unless `raw` is `count` strings, each after its length in four bytes, little-endian."""
    at = 0
    for number in range(count):
        end = at + 4
        if end <= len(raw):
            end += int.from_bytes(raw[at:end], "little")
        if end > len(raw) or at + 4 > len(raw):
            raise RequestError(f"{name}: value {number} of {count} reaches past its {len(raw)} bytes; send them all")
        at = end
    if at != len(raw):
        raise RequestError(f"{name}: {len(raw) - at} bytes follow its {count} values; leave them out")
