"""gRPC client: one stream per request, text as it is generated."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from kvseek.core.errors import RequestError, check_unicode

from .chunk import Chunk
from .errors import ClientError, RefusedError, check_address, no_reply
from .text_models import BLS, REPLY_SECONDS, GenerateOptions, TextModel, bearer

# Of tensorrt_llm_bls; the inputs of other models have the types of those that they rename.
DTYPES: dict[str, tuple[str, Any]] = {
    "text_input": ("BYTES", object),
    "stop_words": ("BYTES", object),
    "max_tokens": ("INT32", np.int32),
    "top_k": ("INT32", np.int32),
    "end_id": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "top_p": ("FP32", np.float32),
    "repetition_penalty": ("FP32", np.float32),
    "seed": ("UINT64", np.uint64),
    "cache_salt": ("BYTES", object),
    "session_id": ("BYTES", object),
    "retention_priority": ("INT32", np.int32),
    "retention_seconds": ("FP32", np.float32),
}
BOOL = ("BOOL", np.bool_)
METADATA_SECONDS = 10.0


class GrpcClient:
    """Streams answers from a kvseek server. Nothing is held between requests.

    Parameters
    ----------
    url : str
        host:port of the gRPC service.
    timeout : float
        Seconds, > 0, that may pass until the first reply and between two of them.
    model : TextModel
        The model that the server has, by its layout.
    api_key : str
        Key that the server asks for; empty for none.

    Raises
    ------
    ClientError
        If `url` is no host:port.
    """

    def __init__(self, url: str, timeout: float = REPLY_SECONDS, model: TextModel = BLS, api_key: str = "") -> None:
        check_address(url)
        self.url, self.timeout, self._model = url, timeout, model
        self._headers = bearer(api_key)

    def generate_stream(self, text_input: str, options: GenerateOptions) -> Iterator[Chunk]:
        """Send a prompt and yield chunks until the answer ends; closing the iterator cancels the request.

        Raises
        ------
        ClientError
            If the server cannot be reached, refuses the request, or sends nothing for `timeout` seconds.
        """
        return self._model.pieces(self._stream(options.fields(text_input, stream=True)))

    def inputs(self, model: str) -> set[str]:
        """Ask for the names of a model's inputs; empty if the server has no such model, or does not say."""
        client = grpc.InferenceServerClient(self.url)
        try:
            found = client.get_model_metadata(model, headers=self._headers, client_timeout=METADATA_SECONDS)
            return {one.name for one in found.inputs}
        except grpc.InferenceServerException:
            return set()
        finally:
            client.close()

    def _stream(self, fields: Mapping[str, Any]) -> Iterator[Chunk]:
        responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client = grpc.InferenceServerClient(self.url)
        try:
            client.start_stream(lambda result, error: responses.put((result, error)), headers=self._headers)
            inputs = self._tensors(fields)
            with contextlib.suppress(
                grpc.InferenceServerException
            ):  # a stream that broke at once: `responses` says why
                client.async_stream_infer(self._model.name, inputs, enable_empty_final_response=True)
            while True:
                try:
                    result, error = responses.get(timeout=self.timeout)
                except queue.Empty:
                    raise no_reply(self.url, self.timeout) from None
                if error is not None:
                    raise _error(self.url, error)
                response = result.get_response()
                if response.outputs:
                    yield _chunk(result)
                if response.parameters["triton_final_response"].bool_param:
                    return
        finally:
            client.stop_stream(cancel_requests=True)
            client.close()

    def _tensors(self, fields: Mapping[str, Any]) -> list[Any]:
        types = {self._model.names.get(name, name): kind for name, kind in DTYPES.items()}
        tensors = []
        for name, value in self._model.inputs(fields).items():
            kind, dtype = types.get(name, BOOL)
            values = value if isinstance(value, list) else [value]
            if kind == "BYTES":
                try:
                    for item in values:
                        check_unicode(name, item)
                except RequestError as error:
                    raise ClientError(str(error)) from None
                values = [item.encode("utf-8") for item in values]
            elif np.issubdtype(dtype, np.integer):
                for number in values:
                    _check_range(name, number, np.iinfo(dtype))
            array = np.array([values] if self._model.batched else values, dtype=dtype)
            tensors.append(grpc.InferInput(name, list(array.shape), kind))
            tensors[-1].set_data_from_numpy(array)
        return tensors


def _check_range(name: str, number: int, limits: Any) -> None:
    """Raise ClientError on a number that the input's type does not hold: NumPy would send another one."""
    if not limits.min <= number <= limits.max:
        raise ClientError(f"{name} = {number}: must be in [{limits.min}, {limits.max}]; give another number")


def _chunk(result: Any) -> Chunk:
    def value(name: str, default: Any) -> Any:
        array = result.as_numpy(name)
        return default if array is None else array.reshape(-1)[0]

    return Chunk(
        text=value("text_output", b"").decode("utf-8"),
        finish_reason=value("finish_reason", b"").decode("utf-8"),
        prefill_progress=float(value("prefill_progress", 1.0)),
        cached_tokens=int(value("cached_tokens", 0)),
        attended_tokens=float(value("attended_tokens", 0.0)),
        num_input_tokens=int(value("num_input_tokens", 0)),
        num_output_tokens=int(value("num_output_tokens", 0)),
    )


def _error(url: str, error: Any) -> ClientError:
    """Make the error for a stream that the library or the server has broken off."""
    message, ports = str(error.message()), "give the --url of its gRPC port"
    if "HTTP/2" in message:
        return ClientError(
            f"what listens at {url} does not speak gRPC ({message}); {ports}, or --protocol http with HTTP's"
        )
    if "failed to connect" in message:
        return ClientError(f"no server answers at {url} ({message}); start one with kvseek serve, or {ports}")
    if "resol" in message and "UNAVAILABLE" in str(error.status()):
        return ClientError(f"no host has the name in {url} ({message}); {ports}")
    if "UNAVAILABLE" in str(error.status()) and ("removed" in message or "closed" in message):
        return ClientError(
            f"{url} closed the connection ({message}): the server has ended or is being restarted; send it again"
        )
    return RefusedError(message)
