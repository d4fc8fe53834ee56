"""Asks Triton about itself and its models over gRPC, and takes out of its answers what it cannot know of these models: how long
requests take, and how they end.

Triton's Python backend reports a request of a decoupled model as done when the model's `execute` returns
(github.com/triton-inference-server/server/issues/8463). That is when the model has taken the request, a millisecond after it
came, and long before its answer; a request that is answered with an error counts as a success. The engine's own metrics have
both (docs/metrics.md).
"""

from __future__ import annotations

import re
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
MISLEADING = re.compile(
    r"^(?:# (?:HELP|TYPE) )?nv_inference_(?:request_success|request_failure|\w+_duration_us|\w+_summary_us\w*)\b.*\n?",
    re.MULTILINE,
)


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


def metrics_without_durations(text: str) -> str:
    """Return Triton's metrics, in Prometheus' text format, without those of durations, successes and failures."""
    return MISLEADING.sub("", text)


def clear_durations(response: Any) -> None:
    """Set the durations of a ModelStatisticsResponse to 0; counts stay, as perf_analyzer asks for them."""
    for model in response.model_stats:
        for part in (model.inference_stats, *model.batch_stats, *model.response_stats.values()):
            for _, statistic in part.ListFields():
                if hasattr(statistic, "ns"):
                    statistic.ns = 0
