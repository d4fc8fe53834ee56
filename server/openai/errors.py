"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}, and the status of each."""

from __future__ import annotations

import msgspec

from kvseek.core.errors import LEADING_NAMES, ErrorCode, RequestError, code_of, renamed
from kvseek.core.selected_rows import FIELD
from kvseek.server.http.errors import HttpError, describe

CODES = {
    ErrorCode.QUEUE_FULL: "queue_full",
    ErrorCode.UNAVAILABLE: "engine_unavailable",
    ErrorCode.TIMEOUT: "timeout",
    ErrorCode.INTERNAL: "internal_error",
}
# The engine's errors begin with TensorRT-LLM's names of inputs; here they have OpenAI's. Those of the prompt and of the number of
# tokens depend on the request (Choice.names).
PARAMS = {
    "end_id": "stop_token_ids",
    "bad_words_list": "bad_words",
    "guided_decoding_guide": "response_format",
    "guided_decoding_guide_type": "response_format",
    "apply_chat_template": "messages",
}
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens", "stop", "priority", "timeout")
TOKENS = ("bad_words", "forced_tokens", "logit_bias", "logprobs", "stop_token_ids", "response_format", FIELD)
TEMPLATE = ("messages", "prompt", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
REUSE = ("cache_salt", "session_id", "retention_priority", "retention_seconds")
FIELDS = frozenset((*SAMPLING, *LIMITS, *TOKENS, *TEMPLATE, *REUSE))


class FieldError(RequestError):
    """A field of a request's body that cannot be served as it stands.

    Parameters
    ----------
    param : str
        Name of the field at fault; empty for the body as a whole.
    code : str or None
        OpenAI's code of the error, for clients that look for one.
    """

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


def require(condition: bool, name: str, value: object, limit: str, remedy: str) -> None:
    """Raise FieldError unless a condition holds; a value's text is shortened."""
    if not condition:
        text = repr(value)
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise FieldError(name, f"{name} = {shown}: must be {limit}; {remedy}")


def openai_error(error: Exception) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON of an error; what is no KvseekError is logged and not shown."""
    status, message = describe(error)
    param: str | None = None
    code: str | None = None
    if isinstance(error, HttpError):
        param, code = error.param, error.openai_code
    elif isinstance(error, FieldError):
        param, code = error.param or None, error.code
    else:
        kind = code_of(error)
        code = CODES.get(kind)
        if kind is ErrorCode.INVALID:
            message = renamed(message, PARAMS)
            param = field_of(message)
    content = {"message": message, "type": error_type(status), "param": param, "code": code}
    return status, msgspec.json.encode({"error": content})


def error_type(status: int) -> str:
    """Return OpenAI's type of an error with this HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def field_of(message: str) -> str | None:
    """Return the field with which a message begins; None if it begins with something else."""
    found = LEADING_NAMES.match(message)
    name = "" if found is None else found[0].split(", ")[0]
    return name if name in FIELDS else None
