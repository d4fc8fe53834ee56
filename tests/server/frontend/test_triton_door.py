"""A Triton model as a door, over a real engine process. Only the module that exists inside Triton alone is a stand-in."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from tests.conftest import BuildEngine
from tests.server.frontend.test_llmapi_request import configuration
from tests.support.door_processes import engine_process
from tests.support.random_models import save_random_model
from tests.support.waiting import wait_for

from kvseek.core.errors import UnavailableError
from kvseek.server.errors import INTERNAL
from kvseek.server.settings import ServeSettings
from kvseek.server.triton.model import TritonModel

FINAL = 1


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = 1, 2, 3, 4

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class ToyTensor(tuple[str, Any]):
    """A pair of name and array."""

    def __new__(cls, name: str, value: Any) -> ToyTensor:
        return super().__new__(cls, (name, value))

    def as_numpy(self) -> Any:
        return self[1]

    @staticmethod
    def from_dlpack(name: str, tensor: ToyTensor) -> ToyTensor:
        return ToyTensor(name, tensor.as_numpy())


TRITON = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    TritonError=TritonError,
    Tensor=ToyTensor,
    triton_string_to_numpy={
        "TYPE_INT32": np.int32,
        "TYPE_INT64": np.int64,
        "TYPE_FP32": np.float32,
        "TYPE_STRING": object,
    }.get,
    InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(values=dict(tensors), error=error),
)


class ToyRequest:
    """A request of tensorrt_llm, and what is sent for it."""

    def __init__(self, count: int, request_id: str = "", **parameters: Any) -> None:
        values = {"input_ids": [[5, 6, 7]], "request_output_len": [[count]], "end_id": [[-1]]}
        self._tensors = {name: np.array(value, np.int32) for name, value in values.items()} | {
            "streaming": np.array([[True]])
        }
        self._id, self._parameters = request_id, parameters
        self.responses: list[Any] = []
        self.ended = threading.Event()

    def inputs(self) -> list[Any]:
        return [
            SimpleNamespace(name=lambda name=name: name, as_numpy=lambda value=value: value)
            for name, value in self._tensors.items()
        ]

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def get_response_sender(self) -> Any:
        return self

    def is_cancelled(self) -> bool:
        return False

    def send(self, response: Any = None, flags: int = 0) -> None:
        if response is not None:
            self.responses.append(response)
        if flags == FINAL:
            self.ended.set()

    @property
    def reason(self) -> str:
        return str(self.responses[-1].values["finish_reason"][0, 0].decode()) if self.responses else ""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, build_engine: BuildEngine) -> Iterator[TritonModel]:
    folder = tmp_path_factory.mktemp("door")
    model = save_random_model(folder / "llama", "llama", max_position_embeddings=20_000)
    directory = build_engine(model, "full", "--max_batch_size", "2", "--max_seq_len", "20000")
    settings, socket = ServeSettings(threads=1, max_queue_size=8), folder / "engine.sock"
    parameters = {
        "model": "tensorrt_llm",
        "engine_dir": str(directory),
        "socket": str(socket),
        "settings": settings.to_json(),
    }
    outputs = MessageToDict(configuration("inflight_batcher_llm/tensorrt_llm"), preserving_proto_field_name=True)[
        "output"
    ]
    config = {
        "name": "tensorrt_llm",
        "output": outputs,
        "model_transaction_policy": {"decoupled": True},
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    with engine_process(directory, socket, settings):
        door = TritonModel(TRITON, {"model_config": json.dumps(config)})
        wait_for(lambda: door._client.connected)
        yield door
        door.finalize()


def running(door: TritonModel, request: ToyRequest) -> ToyRequest:
    door.execute([request])
    wait_for(lambda: request.responses)
    return request


def test_a_late_request_of_a_client_that_has_left_ends_no_other(door: TritonModel) -> None:
    """Its id may be another client's too."""
    other = running(door, ToyRequest(19_000, "same", kvseek_call="b"))
    door.execute([ToyRequest(4, "same", kvseek_call="a", kvseek_leave=True)])
    late = ToyRequest(4, "same", kvseek_call="a")
    door.execute([late])
    wait_for(late.ended.is_set)
    assert not late.responses
    count = len(other.responses)
    wait_for(lambda: len(other.responses) > count + 5)
    door.execute([ToyRequest(4, "same", kvseek_call="b", kvseek_leave=True)])
    wait_for(other.ended.is_set)
    assert other.reason == "cancelled"


def test_stop_ends_no_request_of_another_client(door: TritonModel) -> None:
    """It is answered like one of an id that nobody has."""
    own = running(door, ToyRequest(19_000, "same", kvseek_call="own", kvseek_owner="first"))
    answers = []
    for name, owner in (("same", "second"), ("same", ""), ("none", "first"), ("", "first")):
        stopper = ToyRequest(4, name, kvseek_call="other", kvseek_owner=owner)
        stopper._tensors["stop"] = np.array([[True]])
        door.execute([stopper])
        wait_for(stopper.ended.is_set)
        answers.append(stopper.responses)
    assert answers == [[]] * 4
    count = len(own.responses)
    wait_for(lambda: len(own.responses) > count + 5)
    stopper = ToyRequest(4, "same", kvseek_call="other", kvseek_owner="first")
    stopper._tensors["stop"] = np.array([[True]])
    door.execute([stopper])
    wait_for(own.ended.is_set)


def test_each_secret_shares_what_was_read_with_itself_alone(door: TritonModel) -> None:
    rates = []
    for secret in ("aa", "bb", "aa", "bb"):
        request = ToyRequest(2, kvseek_call="c", kvseek_owner=secret, kvseek_secret=secret)
        request._tensors["input_ids"] = np.full((1, 600), 9, np.int32)
        request._tensors["return_perf_metrics"] = np.array([[True]])
        door.execute([request])
        wait_for(request.ended.is_set)
        rates.append(float(request.responses[-1].values["kv_cache_hit_rate"][0, 0]))
    assert rates == [0, 0, 1, 1]


def test_a_part_that_cannot_be_submitted_ends_the_others(door: TritonModel, monkeypatch: pytest.MonkeyPatch) -> None:
    start, numbers = door._client.start, list[int]()

    def start_once(number: int, *more: Any) -> None:
        if numbers:
            raise UnavailableError("gone")
        numbers.append(number)
        start(number, *more)

    monkeypatch.setattr(door._client, "start", start_once)
    request = ToyRequest(19_000)
    request._tensors["num_return_sequences"] = np.array([[2]], np.int32)
    door.execute([request])
    wait_for(request.ended.is_set)
    assert request.responses[-1].error.message == "UNAVAILABLE: gone"
    count = len(request.responses)
    wait_for(lambda: numbers[0] not in door._client._callbacks)  # it was cancelled
    assert len(request.responses) == count, "nothing follows the last response"


def test_exceptions_that_nobody_has_foreseen_stay_inside(door: TritonModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("/private/path")

    monkeypatch.setattr(type(door._factory), "make", fail)
    request = ToyRequest(4)
    door.execute([request])
    wait_for(request.ended.is_set)
    (response,) = request.responses
    assert response.error.message == f"INTERNAL: {INTERNAL}"


@pytest.mark.parametrize("last", [False, True])
def test_a_response_that_cannot_be_sent_ends_its_request(
    last: bool, door: TritonModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of shared memory, say. All sequences of the request end, and there is one last response."""
    request, finals, failing = ToyRequest(40 if last else 19_000), list[Any](), [True]
    send, numbers, start = request.send, list[int](), door._client.start

    def fail_once(response: Any = None, flags: int = 0) -> None:
        if (flags == FINAL) is last and failing and failing.pop():
            raise RuntimeError("no shared memory")
        finals.extend([response] if flags == FINAL else [])
        send(response, flags)

    def start_and_note(number: int, *more: Any) -> None:
        numbers.append(number)
        start(number, *more)

    monkeypatch.setattr(request, "send", fail_once)
    monkeypatch.setattr(door._client, "start", start_and_note)
    request._tensors["num_return_sequences"] = np.array([[2]], np.int32)
    door.execute([request])
    wait_for(request.ended.is_set)
    wait_for(lambda: not set(numbers) & set(door._client._callbacks))
    (final,) = finals
    assert final.error.code == TritonError.INTERNAL


def test_a_text_that_cannot_be_made_ends_its_request(door: TritonModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("no room for a text")

    monkeypatch.setattr("kvseek.server.requests.models.TokenRequest.push", fail)
    request = ToyRequest(19_000)
    door.execute([request])
    wait_for(request.ended.is_set)
    assert request.responses[-1].error.code == TritonError.INTERNAL
    wait_for(lambda: not door._client._callbacks)
