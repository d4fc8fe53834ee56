"""Tensors of Triton: values of a model's inputs, arrays of its outputs of TensorRT-LLM's shapes, and the responses with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvseek.core.errors import ErrorCode, RequestError
from kvseek.server.errors import INTERNAL, TRITON_CODE
from kvseek.server.requests.models import Chunk, Logits
from kvseek.server.requests.translation import Inputs

LISTS = ("output_ids", "output_log_probs")  # [1, 1, n]: request, beam, tokens


def as_tensor(name: str, value: Any, dtype: Any, batched: bool) -> np.ndarray[Any, Any]:
    """Make the array of an output for Triton, of the type that the model's configuration states and of TensorRT-LLM's shape.

    That is [1, 1, n] for LISTS, [1] for text and for outputs of a model without a batch dimension, [1, ...] for logits, else
    [1, 1].
    """
    if isinstance(value, Logits):
        return np.frombuffer(value.data, dtype).reshape(1, *value.shape)
    if name in LISTS:
        return np.asarray(value, dtype=dtype).reshape(1, 1, -1)
    array = np.array([[value.encode("utf-8") if isinstance(value, str) else value]], dtype=dtype)
    return array if batched and name != "text_output" else array[0]


def rows_of(tensors: Mapping[str, NDArray[Any]]) -> list[Inputs]:
    """Return the inputs of each prompt from tensors, [batch, ...] each; raises RequestError.

    A float32 becomes the shortest number that it can stand for, which is what the client has written: 0.1, not 0.10000000149.
    """
    batch = max(tensor.shape[0] for tensor in tensors.values())
    for name, tensor in tensors.items():
        if tensor.shape[0] != batch:
            raise RequestError(f"{name} has {tensor.shape[0]} rows: must be {batch}, one for each prompt; send as many")
    return [{name: _values(tensor[row : row + 1]) for name, tensor in tensors.items()} for row in range(batch)]


def _values(tensor: NDArray[Any]) -> list[Any]:
    flat = tensor.reshape(-1)
    return [float(str(value)) for value in flat] if flat.dtype == np.float32 else flat.tolist()


logger = logging.getLogger(__name__)


class Stream:
    """Sends the responses of one request to its client, and nothing after the last one. To be used by one thread alone.

    `dtypes` are NumPy's types of the model's outputs.
    """

    def __init__(self, triton: Any, sender: Any, dtypes: Mapping[str, Any], batched: bool, decoupled: bool) -> None:
        self._triton, self._sender, self._dtypes = triton, sender, dtypes
        self._batched, self._decoupled = batched, decoupled
        self._closed = False  # the last response has been sent

    def send(self, chunk: Chunk) -> None:
        """Send a response that is not the last."""
        if not self._closed:
            self._sender.send(self._response(chunk))

    def has_left(self) -> bool:
        """Ask Triton whether the client has left, which takes some 0.1 ms."""
        return not self._closed and bool(self._sender.is_cancelled())

    def close(self, chunk: Chunk | None = None) -> None:
        """Send the last response, with `chunk` if there is one."""
        self._send_last(None if chunk is None else self._response(chunk))

    def fail(self, message: str, code: ErrorCode) -> None:
        """End the stream with an error."""
        self._send_last(self._error(message, code))

    def _error(self, message: str, code: ErrorCode) -> Any:
        name = TRITON_CODE[code]
        if code is not ErrorCode.INVALID:  # clients of a stream see only the message, not the code
            message = f"{name}: {message}"
        return self._triton.InferenceResponse(
            error=self._triton.TritonError(message, getattr(self._triton.TritonError, name))
        )

    def _send_last(self, response: Any) -> None:
        if self._closed:
            return
        self._closed = True
        final = self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is None and self._decoupled:
            self._sender.send(flags=final)
            return
        try:  # a model that is not decoupled has to send a response, also for a request such as `stop`
            self._sender.send(response or self._triton.InferenceResponse([]), flags=final)
        except Exception:  # for want of shared memory, say, of which an error needs little
            logger.exception("the last response could not be sent; an error is sent instead")
            self._sender.send(self._error(INTERNAL, ErrorCode.INTERNAL), flags=final)

    def _response(self, chunk: Chunk) -> Any:
        arrays = {name: as_tensor(name, value, self._dtypes[name], self._batched) for name, value in chunk.items()}
        return self._triton.InferenceResponse([self._triton.Tensor(*each) for each in arrays.items()])
