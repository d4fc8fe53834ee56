"""Errors of the server, and the status of every error code in each protocol, so that every port answers alike."""

from __future__ import annotations

from kvseek.core.errors import ErrorCode, KvseekError

# For clients, in the place of an exception nobody has foreseen
INTERNAL = "the server failed to answer; its log says why"
HTTP_STATUS = {
    ErrorCode.INVALID: 400,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.TIMEOUT: 504,
    ErrorCode.INTERNAL: 500,
}
# Names of the codes of triton_python_backend_utils.TritonError.
TRITON_CODE = {
    ErrorCode.INVALID: "INVALID_ARG",
    ErrorCode.QUEUE_FULL: "UNAVAILABLE",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.TIMEOUT: "CANCELLED",
    ErrorCode.INTERNAL: "INTERNAL",
}


class ServerError(KvseekError, RuntimeError):
    """A tritonserver cannot be found, started, or does not become ready."""
