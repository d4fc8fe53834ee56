"""Status of every error code in each protocol, in one table, so that every door answers alike."""

from __future__ import annotations

from kvseek.core.errors import ErrorCode

INTERNAL = (
    "the server failed to answer; its log says why"  # for clients, in the place of an exception nobody has foreseen
)
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
