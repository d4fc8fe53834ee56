"""What Triton says about itself and its models, as its own HTTP endpoint would answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from tritonclient.grpc import service_pb2

from kvseek.server.http.errors import JSON, HttpError
from kvseek.server.triton.relay import TritonRelay, clear_durations

STATUS = {grpc.StatusCode.NOT_FOUND: 404, grpc.StatusCode.INVALID_ARGUMENT: 400, grpc.StatusCode.UNIMPLEMENTED: 404}


class MetadataRoutes:
    """Endpoints about the server and its models.

    Parameters
    ----------
    names : mapping
        Names under which clients may ask for models, and those that Triton knows.
    """

    def __init__(self, triton: TritonRelay, names: Mapping[str, str]) -> None:
        self._triton, self._names = triton, names

    def routes(self) -> list[BaseRoute]:
        """Make the routes of the endpoints about the server and its models."""
        found: list[BaseRoute] = [Route("/v2", self.server), Route("/v2/models/stats", self.statistics)]
        for start in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            handlers = (("", self.model), ("/config", self.config), ("/stats", self.statistics))
            found += [Route(f"{start}{end}", handler) for end, handler in handlers]
        return found

    async def server(self, _: Request) -> Response:
        """Name, version and extensions of the server."""
        return _json(await self._answer("ServerMetadata", service_pb2.ServerMetadataRequest()))

    async def model(self, request: Request) -> Response:
        """Inputs and outputs of a model."""
        return _json(await self._answer("ModelMetadata", service_pb2.ModelMetadataRequest(**self._name(request))))

    async def config(self, request: Request) -> Response:
        """Configuration of a model."""
        config = (await self._answer("ModelConfig", service_pb2.ModelConfigRequest(**self._name(request)))).config
        config.parameters.clear()  # they name this machine's files and the server's shared memory
        return _json(config)

    async def statistics(self, request: Request) -> Response:
        """Statistics of one model, or of all."""
        answer = await self._answer("ModelStatistics", service_pb2.ModelStatisticsRequest(**self._name(request)))
        clear_durations(answer)
        return _json(answer)

    async def _answer(self, method: str, message: Message) -> Any:
        try:
            return await self._triton.ask(method, message)
        except grpc.aio.AioRpcError as error:
            status = STATUS.get(error.code())
            if status is not None:
                raise HttpError(status, error.details() or "not found") from None
            raise HttpError(503, "Triton does not answer; it is being started or restarted, try again later") from None

    def _name(self, request: Request) -> dict[str, str]:
        model = request.path_params.get("model")
        names = {"name": self._names.get(model or "", model), "version": request.path_params.get("version")}
        return {field: value for field, value in names.items() if value is not None}


def _json(message: Message) -> Response:
    return Response(msgspec.json.encode(plain(message)), media_type=JSON)


def plain(message: Message) -> dict[str, Any]:
    """Convert a message to JSON values in Triton's own form: absent fields have their defaults, 64-bit integers are numbers.

    google.protobuf.json_format would make strings of the integers, and [-1] dimensions ["-1"].
    """
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            kind = field.message_type.fields_by_name["value"]
            values[field.name] = {str(key): _plain(kind, value[key]) for key in value}
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            values[field.name] = [_plain(field, each) for each in value]
        elif not field.has_presence or message.HasField(field.name):
            values[field.name] = _plain(field, value)
    return values


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
