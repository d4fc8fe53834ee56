"""Asks Triton about itself and its models over gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2_grpc

ANSWER_SECONDS = 2.0
TO_TRITON = [  # options of channels: after a restart Triton is found again soon; no proxy stands in between
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
]


class TritonRelay:
    """Passes questions on to Triton.

    Parameters
    ----------
    target : str
        host:port of Triton's gRPC endpoint.
    """

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=TO_TRITON)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    @property
    def connected(self) -> bool:
        """Whether there is a connection; it breaks at once when Triton dies. A question makes a new connection."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def ask(self, method: str, message: Message) -> Any:
        """Call a method of Triton's service; raises AioRpcError."""
        return await getattr(self._stub, method)(message, timeout=ANSWER_SECONDS)

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()
