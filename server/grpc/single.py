"""ModelInfer for models that Triton serves by streams alone: a request that has one response, and that response."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from kvseek.server.kserve.inputs import ModelSchema
from kvseek.server.requests.models import SEVERAL
from kvseek.server.requests.unread import PIECE_BYTES, UnreadAnswer

SEQUENCES = "num_return_sequences"
STATUS = {  # of the models' codes (TRITON_CODE)
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "CANCELLED": grpc.StatusCode.DEADLINE_EXCEEDED,  # Triton has no code for a time limit that has passed
    "INTERNAL": grpc.StatusCode.INTERNAL,
}


def asks_for_several(request: Any, schemas: Mapping[str, ModelSchema]) -> str:
    """Say by which input and value a ModelInferRequest asks for more than one response; empty if it asks for one.

    Malformed tensors ask for one: they are refused later.
    """
    raw, schema = request.raw_input_contents, schemas.get(request.model_name)
    batched = schema is not None and schema.served.batched
    for number, tensor in enumerate(request.inputs):
        own = raw[number] if number < len(raw) else None
        if batched and tensor.shape and tensor.shape[0] > 1:
            return f"{tensor.name}: shape = {list(tensor.shape)[:8]}"
        if tensor.name in SEVERAL and (any(own) if own is not None else any(tensor.contents.bool_contents)):
            return f"{tensor.name} = true"
        if tensor.name == SEQUENCES:
            values = struct.unpack("<i", own) if own is not None and len(own) == 4 else tensor.contents.int_contents
            if any(value > 1 for value in values):
                return f"{SEQUENCES} = {max(values)}"
    return ""


class Collected:
    """Takes the responses of a stream in place of a client; they count in `answer` until they are forgotten."""

    def __init__(self, answer: UnreadAnswer) -> None:
        self._responses: list[Any] = []
        self._answer, self._size = answer, 0

    async def write(self, data: bytes) -> None:
        """Take one response, a ModelStreamInferResponse."""
        self._responses.append(service_pb2.ModelStreamInferResponse.FromString(data))
        self._size += PIECE_BYTES + len(data)

    async def answer(self, request_id: str, model: str, context: Any) -> bytes:
        """Return the ModelInferResponse and forget it; ends the client's call with an error if that is what the stream gave."""
        responses, self._responses = self._responses, []
        self._answer.remove(self._size)
        for response in responses:
            if response.error_message:  # the models put their code before all messages but those about bad input
                name, _, rest = response.error_message.partition(": ")
                if name in STATUS:
                    await context.abort(STATUS[name], rest)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, response.error_message)
        answers = [response.infer_response for response in responses if response.infer_response.outputs]
        # A request that stops another one has no outputs.
        last = (
            answers[-1]
            if answers
            else service_pb2.ModelInferResponse(model_name=model, model_version="1", id=request_id)
        )
        return bytes(last.SerializeToString())
