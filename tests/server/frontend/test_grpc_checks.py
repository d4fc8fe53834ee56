"""Which gRPC requests may reach Triton: what crashed or hung Triton 2.51 is refused by name, all that clients need passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import tritonclient.grpc as grpc
from hypothesis import given
from tritonclient.grpc import _utils, service_pb2

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError
from kvseek.core.model_config import ModelConfig
from kvseek.server.grpc.call import asks_for_several
from kvseek.server.grpc.checks import admit
from kvseek.server.kserve.inputs import schemas
from kvseek.server.requests.models import INFLIGHT_BATCHER_LLM, LLMAPI

MODEL = ModelConfig("llama", 101, 32, 64, 2, 4, 2, 8, 1e-5, 1e4, 2048)
CONFIG = EngineConfig(MODEL, "full", max_input_len=1000, max_seq_len=1200)
SCHEMAS, LLMAPI_SCHEMAS = schemas(INFLIGHT_BATCHER_LLM, CONFIG), schemas(LLMAPI, CONFIG)
Change = Callable[[Any], object]


def tensor(name: str, values: Any, datatype: str) -> Any:
    made = grpc.InferInput(name, list(np.shape(values)), datatype)
    made.set_data_from_numpy(
        np.asarray(values, dtype={"INT32": np.int32, "BYTES": object, "FP32": np.float32}[datatype])
    )
    return made


def request(model: str = "tensorrt_llm", inputs: Any = None, **rest: Any) -> Any:
    """What tritonclient sends."""
    if inputs is None:
        inputs = [tensor("input_ids", [[5, 6, 7]], "INT32"), tensor("request_output_len", [[4]], "INT32")]
    arguments = {"model_version": "", "request_id": "", "outputs": None, "sequence_id": 0, "sequence_start": False}
    arguments |= {"sequence_end": False, "priority": 0, "timeout": None, "parameters": None} | rest
    return _utils._get_inference_request(model_name=model, inputs=inputs, **arguments)


def text_request(*texts: bytes) -> Any:
    inputs = [tensor("text_input", [list(texts)], "BYTES"), tensor("max_tokens", [[4]], "INT32")]
    return request("tensorrt_llm_bls", inputs)


def test_requests_of_tritons_client_pass_unchanged() -> None:
    for made in (request(), text_request(b"the sea"), text_request("é".encode() * 100), request(request_id="a" * 256)):
        before = made.SerializeToString()
        admit(made, SCHEMAS)
        assert made.SerializeToString() == before
    stop_words = tensor("stop_words_list", [[[5, 6], [2, -1]]], "INT32")
    admit(request(inputs=[*request_tensors(), stop_words]), SCHEMAS)
    made = request(parameters={"traceparent": "00-ab-cd-01"})
    made.parameters["triton_enable_empty_final_response"].bool_param = True  # as async_stream_infer adds it
    admit(made, SCHEMAS)


def test_batches_pass_up_to_max_batch_size() -> None:
    def rows(count: int) -> list[Any]:
        return [tensor("input_ids", [[5, 6]] * count, "INT32"), tensor("request_output_len", [[4]] * count, "INT32")]

    made = request(inputs=rows(4), timeout=1_500_000)
    admit(made, SCHEMAS)
    assert list(made.inputs[2].shape) == [4, 1]
    with pytest.raises(RequestError, match=r"input_ids: shape = \[5, 2\]: .* at most max_batch_size = 4"):
        admit(request(inputs=rows(5)), SCHEMAS)
    with pytest.raises(RequestError, match=r"request_output_len: shape = \[1, 1\]: its first number must be 2"):
        admit(request(inputs=[rows(2)[0], rows(1)[1]]), SCHEMAS)


def request_tensors() -> list[Any]:
    return [tensor("input_ids", [[5, 6, 7]], "INT32"), tensor("request_output_len", [[4]], "INT32")]


def test_typed_contents_pass() -> None:
    made = service_pb2.ModelInferRequest(model_name="tensorrt_llm")
    for name, values in (("input_ids", [5, 6]), ("request_output_len", [3])):
        part = made.inputs.add(name=name, datatype="INT32", shape=[1, len(values)])
        part.contents.int_contents.extend(values)
    admit(made, SCHEMAS)
    made.parameters["timeout"].int64_param = 2_500_000
    admit(made, SCHEMAS)
    assert made.inputs[2].contents.fp32_contents == [2.5]


def test_tritons_timeout_becomes_the_models_input() -> None:
    made = request(timeout=1_500_000)
    admit(made, SCHEMAS)
    assert [part.name for part in made.inputs] == ["input_ids", "request_output_len", "timeout"]
    assert np.frombuffer(made.raw_input_contents[2], np.float32).tolist() == [1.5]
    assert not made.parameters


def llmapi_request(prompt: Any = (b"the sea",), **inputs: tuple[Any, str]) -> Any:
    """A request of the LLM API layout, whose tensors have no batch dimension."""
    made = {"text_input": (list(prompt), "BYTES"), "sampling_param_max_tokens": ([4], "INT32")} | inputs
    return request("tensorrt_llm", [tensor(name, values, datatype) for name, (values, datatype) in made.items()])


def test_tensors_without_a_batch_dimension() -> None:
    made = llmapi_request(sampling_param_stop=([b"a", b"b"], "BYTES"))
    made.parameters["timeout"].int64_param = 1_500_000
    admit(made, LLMAPI_SCHEMAS)
    assert (made.inputs[3].name, list(made.inputs[3].shape)) == ("timeout", [1])
    assert not asks_for_several(made, LLMAPI_SCHEMAS)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (llmapi_request([[b"the sea"]]), r"text_input: shape = \[1, 1\]: must be \['n'\] with n >= 1"),
        (llmapi_request([b"a", b"b"]), "text_input has 2 values: must be <= 1"),
        (llmapi_request(timeout=([[1.0]], "FP32")), r"timeout: shape = \[1, 1\]: must be \[1\] with n >= 1"),
        (llmapi_request(timeout=([1.0, 2.0], "FP32")), r"timeout: shape = \[2\]: must be \[1\]"),
        (llmapi_request(max_tokens=([4], "INT32")), "max_tokens: tensorrt_llm has no such input"),
        (request("tensorrt_llm_bls"), "model_name = tensorrt_llm_bls: must be one of tensorrt_llm; choose one"),
    ],
)
def test_what_the_llm_api_layout_refuses(made: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        admit(made, LLMAPI_SCHEMAS)


def set_shape(number: int, *shape: int) -> Change:
    def change(made: Any) -> None:
        del made.inputs[number].shape[:]
        made.inputs[number].shape.extend(shape)

    return change


def set_raw(number: int, data: bytes) -> Change:
    def change(made: Any) -> None:
        made.raw_input_contents[number] = data

    return change


REFUSED: list[tuple[Change, str]] = [
    # Each of these ended Triton 2.51's server process, a model's process, or hung.
    (
        lambda r: r.outputs.add(name="output_ids").parameters["classification"].__setattr__("int64_param", 1),
        "outputs: ",
    ),
    (set_shape(0, 1, 2**62), "input_ids has 4611686018427387904 values: must be <= 1000"),
    (set_shape(0, 4, 2**62 + 1), "input_ids has 18446744073709551620 values: must be <= 4000"),
    (set_shape(0, 1, -(2**63)), "input_ids: shape"),
    (set_shape(0, 0, 0), "input_ids: shape"),
    # And the rest of what a request can be made of.
    (set_shape(0, 3), "input_ids: shape"),
    (set_shape(0, 1, 1, 3), "input_ids: shape"),
    (set_shape(0), "input_ids: shape"),
    (set_shape(0, 1, 2), "input_ids has 12 bytes: must be 8 as its shape says"),
    (set_shape(1, 1, 2), r"request_output_len: shape = \[1, 2\]: must be \['batch', 1\]"),
    (set_raw(0, b""), "input_ids has 0 bytes: must be 12"),
    (lambda r: r.raw_input_contents.append(b""), "raw_input_contents has 3 items: must be 2"),
    (lambda r: r.raw_input_contents.pop(), "raw_input_contents has 1 items: must be 2"),
    (lambda r: r.inputs[0].__setattr__("datatype", "FP32"), "input_ids: datatype = FP32: must be INT32"),
    (lambda r: r.inputs[1].__setattr__("name", "input_ids"), "input_ids is given twice"),
    (lambda r: r.inputs[1].__setattr__("name", "lora_weights"), "lora_weights: tensorrt_llm has no such input"),
    (lambda r: (r.inputs.pop(), r.raw_input_contents.pop()), "request_output_len is missing"),
    (lambda r: r.inputs[0].contents.int_contents.append(1), "input_ids: contents.int_contents is given beside"),
    (
        lambda r: r.inputs[0].parameters["shared_memory_region"].__setattr__("string_param", "x"),
        "input_ids: parameter shared_memory_region is not supported",
    ),
    (
        lambda r: r.__setattr__("model_name", "other"),
        "model_name = other: must be one of tensorrt_llm, tensorrt_llm_bls",
    ),
    (lambda r: r.__setattr__("model_version", "2"), "model_version = 2: must be 1"),
    (lambda r: r.__setattr__("id", "a" * 257), "id has 257 characters: must be <= 256"),
    (lambda r: r.parameters["priority"].__setattr__("int64_param", 2), "priority: .* send the input `priority`"),
    (lambda r: r.parameters["sequence_id"].__setattr__("int64_param", 2), "sequence_id: tensorrt_llm has no such"),
    (lambda r: r.parameters["timeout"].__setattr__("string_param", "2"), "timeout: must be an integer as a parameter"),
    (lambda r: [r.parameters[f"p{i}"] for i in range(9)], "parameters: 9 are given: must be <= 8"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_triton_does_not_survive_or_kvseek_does_not_know_is_refused(change: Change, message: str) -> None:
    made = request()
    change(made)
    with pytest.raises(RequestError, match=message):
        admit(made, SCHEMAS)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x05\0\0\0sea", "text_input: value 0 of 1 reaches past its 7 bytes"),
        (b"\xff\xff\xff\xffsea", "text_input: value 0 of 1 reaches past its 7 bytes"),
        (b"\x02\0\0\0sea", "text_input: 1 bytes follow its 1 values"),
        (b"\x02\0\0", "text_input: value 0 of 1 reaches past its 3 bytes"),
        (b"", "text_input: value 0 of 1 reaches past its 0 bytes"),
    ],
)
def test_strings_that_lie_about_their_length_are_refused(raw: bytes, message: str) -> None:
    made = text_request(b"the sea")
    set_raw(0, raw)(made)
    with pytest.raises(RequestError, match=message):
        admit(made, SCHEMAS)


@given(st.binary(max_size=200))
def test_no_message_breaks_the_checks(data: bytes) -> None:
    """Whatever parses is admitted or refused by name."""
    made = request()
    try:
        made.MergeFromString(data)
    except Exception:  # no message at all: the door answers that
        return
    try:
        admit(made, SCHEMAS)
    except RequestError:
        return
    assert len(made.inputs) == len(made.raw_input_contents) >= 2
