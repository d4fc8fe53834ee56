"""The responses of one request to a Triton model."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from kvseek.core.errors import ErrorCode
from kvseek.server.errors import INTERNAL, TRITON_CODE
from kvseek.server.requests.keys import Tenant
from kvseek.server.requests.models import Chunk, ServedRequest

from .outputs import as_tensor

ASK_SECONDS = 0.5  # a question to Triton takes some 0.1 ms of the thread that passes on all outputs

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ReturnSequence:
    """One sequence of one prompt of a request, of which `num_return_sequences` says how many there are.

    Attributes
    ----------
    index : dict
        The outputs `batch_index` and `sequence_index`, if the model has them.
    number : int or None
        Number of the sequence at the engine, once it has been submitted.
    reserved : int
        Bytes that are reserved for its logits.
    """

    served: ServedRequest
    index: Chunk
    number: int | None = None
    reserved: int = 0
    ended: bool = False


class Stream:
    """Sends the responses of one request to its client, and nothing after the last one, whichever threads send."""

    def __init__(self, triton: Any, sender: Any, request_id: str, batched: bool, decoupled: bool) -> None:
        self._triton, self._sender, self._batched, self._decoupled = triton, sender, batched, decoupled
        self.request_id = request_id
        self.call = ""  # the gRPC port's name of the client's call
        self.owner = ""  # whose requests may stop this one; without a gRPC port all have the same
        self.tenant = Tenant()
        self.sequences: list[ReturnSequence] = []
        self.left = False  # whether the client has left
        self.stopped = False  # whether another request has stopped this one
        self.arrived = time.monotonic()
        self.closed = False  # the last response has been sent
        self._sending, self._asked_at = threading.Lock(), self.arrived

    def send(self, chunk: Chunk) -> None:
        """Send a response that is not the last."""
        with self._sending:
            if not self.closed:
                self._sender.send(self._response(chunk))

    def has_left(self) -> bool:
        """Ask Triton whether the client has left, at most once in ASK_SECONDS, unless the gRPC port tells."""
        now = time.monotonic()
        if self.call or now - self._asked_at < ASK_SECONDS:
            return False
        self._asked_at = now
        with self._sending:
            return not self.closed and bool(self._sender.is_cancelled())

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
        with self._sending:
            if self.closed:
                return
            self.closed = True
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
        return self._triton.InferenceResponse(
            [self._triton.Tensor(name, as_tensor(name, value, self._batched)) for name, value in chunk.items()]
        )
