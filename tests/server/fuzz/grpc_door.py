"""Fuzzes the gRPC door: requests of the inference protocol with bent fields, bent bytes, wrong methods, cancelled streams."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from random import Random
from typing import Any

import grpc
from tests.server.fuzz.mutations import ANSWER_SECONDS, EXCEPTION, STRANGE, FaultError, mutated_bytes, mutated_fields
from tests.support.grpc_inputs import inputs_of
from tritonclient.grpc import service_pb2

SERVICE = "/inference.GRPCInferenceService/"
UNARY = (
    *("ModelInfer", "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelStatistics"),
    *("ModelConfig", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryStatus"),
    *("SystemSharedMemoryRegister", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings", "Nothing", ""),
)
HEALTH = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/grpc.reflection.v1.ServerReflection/Info")
OUR_FAULT = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS,
)
UNPARSABLE = "Unable to parse request"  # gRPC's own words, with the code INTERNAL, for what the door passes on unread
MODELS = ("tensorrt_llm_bls", "tensorrt_llm")
TYPES = ("INT32", "INT64", "UINT64", "FP32", "FP16", "BF16", "BOOL", "BYTES", "STRING", "", "X" * 200)
PARAMETERS = (
    "triton_enable_empty_final_response",
    "timeout",
    "priority",
    "sequence_id",
    "sequence_start",
    "classification",
    "x",
)
TENSOR_PARAMETERS = ("shared_memory_region", "shared_memory_byte_size", "classification", "binary_data_size", "x")
INTEGERS = (0, 1, -1, 2, 3, 7, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
CONTENTS = ("int_contents", "int64_contents", "uint64_contents", "fp32_contents", "bool_contents", "bytes_contents")
CALLS_PER_CHANNEL = 200


class GrpcFuzzer:
    """See fuzz_doors.Fuzzer. Messages are bytes on both sides, so that anything can be sent."""

    def __init__(self, url: str) -> None:
        self._url, self._calls, self.last = url, 0, b""
        self._channel = self._open()

    def shoot(self, random: Random) -> str:
        """Call one method."""
        self._calls += 1
        if self._calls % CALLS_PER_CHANNEL == 0:
            self._channel.close()
            self._channel = self._open()
        try:
            return self._stream(random) if random.random() < 0.75 else self._unary(random)
        except grpc.RpcError as error:
            return _judge(error)

    def _open(self) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return grpc.insecure_channel(self._url, options=options)

    def _unary(self, random: Random) -> str:
        method = SERVICE + random.choice(UNARY) if random.random() < 0.9 else random.choice(HEALTH)
        self.last = _message(random) if method.endswith("ModelInfer") else _other_message(random)
        metadata = [("x-key", "a" * random.choice((0, 1, 5000)))] if random.random() < 0.1 else None
        self._channel.unary_unary(method)(self.last, timeout=ANSWER_SECONDS, metadata=metadata)
        return f"ok {method.rpartition('/')[2]}"

    def _stream(self, random: Random) -> str:
        messages = [_message(random) for _ in range(random.choice((1, 1, 1, 2, 5)))]
        self.last = b"\n--- next message ---\n".join(messages)
        hurry, limit = random.random(), random.choice((0, 1, 3))

        def send() -> Iterator[bytes]:
            for message in messages:
                yield message
                if hurry < 0.1:
                    time.sleep(0.02)

        call = self._channel.stream_stream(SERVICE + "ModelStreamInfer")(send(), timeout=ANSWER_SECONDS)
        kinds = set()
        for count, data in enumerate(call):
            response = service_pb2.ModelStreamInferResponse.FromString(data)
            kinds.add(_judge_message(response.error_message))
            if 0.1 < hurry < 0.3 and count >= limit:
                call.cancel()
                return "cancelled"
        return " and ".join(sorted(kinds)) or "empty stream"


def _judge(error: Any) -> str:
    code, details = error.code(), str(error.details())
    if details == UNPARSABLE:
        return "unparsable"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and details.startswith("timeout = "):
        return "timed out"  # by the limit that the input itself asks for
    if code in OUR_FAULT or EXCEPTION.search(details):
        raise FaultError(f"{code}: {details[:500]}")
    if code is grpc.StatusCode.UNAVAILABLE and "queue" not in details:
        raise FaultError(f"{code}: {details[:500]}")
    return str(code.name).lower()


def _judge_message(message: str) -> str:
    if EXCEPTION.search(message):
        raise FaultError(f"the words of an exception reach the client: {message[:500]}")
    return "error" if message else "answer"


def _message(random: Random) -> bytes:
    """A ModelInferRequest, bent."""
    model = random.choice(MODELS)
    request = service_pb2.ModelInferRequest(
        model_name=model, id=random.choice(("", "a", "b", "\0", "é" * 100, "x" * 257))
    )
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    is_raw = random.random() < 0.8
    for name, value in mutated_fields(random, model).items():
        _add_input(request, name, value, is_raw)
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        _bend(random, request)
    data: bytes = request.SerializeToString()
    return mutated_bytes(random, data) if random.random() < 0.3 else data


def _add_input(request: Any, name: str, value: Any, is_raw: bool) -> None:
    """Add a field as a tensor; what no tensor can be made of becomes one of the wrong kind."""
    try:
        with warnings.catch_warnings(action="ignore"):  # numbers that do not fit: any will do
            (tensor,) = inputs_of({name: value})
        shape, kind, data = tensor.shape(), tensor.datatype(), tensor._get_content()
    except Exception:  # numpy and tritonclient refuse much in their own ways
        shape, kind, data = [1, 1], "INT32", b"\1\0\0\0"
    field = request.inputs.add(name=name.encode("utf-8", "replace").decode(), datatype=kind, shape=shape)
    if is_raw:
        request.raw_input_contents.append(data or b"")
    else:
        getattr(field.contents, CONTENTS[5] if kind == "BYTES" else CONTENTS[0]).extend(
            [data or b""] if kind == "BYTES" else [1]
        )


def _bend(random: Random, request: Any) -> None:
    """Change one field of a request."""
    tensor = random.choice(request.inputs) if request.inputs else request.inputs.add()
    match random.randrange(11):
        case 0:
            tensor.datatype = random.choice(TYPES)
        case 1:
            tensor.shape[:] = [random.choice(INTEGERS) for _ in range(random.choice((0, 1, 2, 3, 9)))]
        case 2 if request.raw_input_contents:
            at = random.randrange(len(request.raw_input_contents))
            request.raw_input_contents[at] = mutated_bytes(random, request.raw_input_contents[at])
        case 3:
            request.raw_input_contents.append(random.randbytes(random.choice((0, 4, 5000))))
        case 4:
            values = getattr(tensor.contents, random.choice(CONTENTS[:4]))
            values.extend([1] * random.choice((1, 3, 5000)))
        case 5:
            request.parameters[random.choice(PARAMETERS)].int64_param = random.choice(INTEGERS)
        case 6:
            tensor.parameters[random.choice(TENSOR_PARAMETERS)].string_param = random.choice(
                ("", "a", "triton_python_backend")
            )
        case 7:
            request.outputs.add(name=random.choice(("text_output", "output_ids", "nope", "")))
        case 8:
            request.outputs.add(name="text_output").parameters["classification"].int64_param = random.choice(INTEGERS)
        case 9:
            request.model_name = random.choice((*MODELS, "", "nope", "../x", "é", "x" * 5000))
            request.model_version = random.choice(("", "1", "2", "-1", "x", "1" * 400))
        case _:
            request.inputs.append(tensor)


def _other_message(random: Random) -> bytes:
    kinds = (service_pb2.ModelReadyRequest, service_pb2.ModelStatisticsRequest, service_pb2.ModelConfigRequest)
    name = (
        str(random.choice([value for value in STRANGE if isinstance(value, str)])).encode("utf-8", "replace").decode()
    )
    message = random.choice(kinds)(name=random.choice((*MODELS, name)), version=random.choice(("", "1", "9")))
    data: bytes = message.SerializeToString()
    return mutated_bytes(random, data) if random.random() < 0.5 else data
