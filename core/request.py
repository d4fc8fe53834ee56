"""The engine's input and output: requests, sampling parameters, step outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from .config import EngineConfig
from .errors import ErrorCode, RequestError
from .statistics import RequestStatistics

MAX_SEED = 2**64 - 1
DEFAULT_PRIORITY = 128
MAX_PRIORITY = 255
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0  # as good as no limit, and far below the longest time that a thread can wait
REPETITION_PENALTIES = 0.01, 100.0  # smaller and larger penalties can overflow the logits, whose size no client knows


def _require(condition: bool, name: str, value: object, limit: str, remedy: str) -> None:
    if not condition:
        raise RequestError(f"{name} = {value!r}: must be {limit}; {remedy}")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of drawing the next token. Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole.

    They apply in this order: repetition penalty, temperature, top-k, top-p, one draw from the request's own generator.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        _require(finite, "temperature", self.temperature, "finite and >= 0", "0 decodes greedily")
        _require(self.top_k >= 0, "top_k", self.top_k, ">= 0", "0 keeps all tokens")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]", "1 keeps all tokens")
        low, high = REPETITION_PENALTIES
        penalty = low <= self.repetition_penalty <= high
        _require(penalty, "repetition_penalty", self.repetition_penalty, f"in [{low}, {high}]", "1 is no penalty")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in [0, {MAX_SEED}]", "any such number will do")


@dataclass(frozen=True)
class Request:
    """One generation request, in token ids.

    `end_id` ends the request when drawn and is not part of the output; None: only max_tokens and stop words end it.
    `stop_words` are token sequences; output that ends with one stops there (the stop word stays in the output's token ids).
    `priority`, 0 to 255: of the requests that wait, those with the larger number start first, as in TensorRT-LLM
    (engine/schedule/queue.py). `timeout_seconds` counts from submission and is at most a week: when it has passed, a waiting
    request ends with an error, and a running request ends with the tokens it has and FinishReason.TIMEOUT. None: no limit.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_ids: tuple[int, ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    priority: int = DEFAULT_PRIORITY
    timeout_seconds: float | None = None

    def validate(self, config: EngineConfig) -> None:
        """Raise RequestError unless an engine of this configuration can serve the request."""
        n, vocabulary = len(self.prompt_ids), config.model.vocab_size
        _require(n >= 1, "input_ids", f"{n} tokens", "at least one token", "send a prompt")
        limit = f"<= max_input_len = {config.max_input_len} tokens"
        _require(
            n <= config.max_input_len, "input_lengths", n, limit, "shorten it or build with a larger max_input_len"
        )
        _require(self.max_tokens >= 1, "max_tokens (request_output_len)", self.max_tokens, ">= 1", "ask for a token")
        limit = f"<= max_seq_len = {config.max_seq_len} together with the prompt of {n} tokens"
        fits = n + self.max_tokens <= config.max_seq_len
        _require(fits, "max_tokens (request_output_len)", self.max_tokens, limit, "ask for fewer tokens")
        limit = f"in [0, {vocabulary})"
        for name, ids in (
            ("input_ids", self.prompt_ids),
            ("end_id", self.end_ids),
            *(("stop_words_list", w) for w in self.stop_words),
        ):
            bad = next((i for i in ids if not 0 <= i < vocabulary), None)
            _require(bad is None, name, bad, limit, "the vocabulary of the model has no such id")
        _require(all(self.stop_words), "stop_words_list", (), "non-empty sequences", "leave empty stop words out")
        limit = f"in [0, {MAX_PRIORITY}]"
        _require(0 <= self.priority <= MAX_PRIORITY, "priority", self.priority, limit, "larger numbers start first")
        seconds = self.timeout_seconds
        within = seconds is None or 0 < seconds <= MAX_TIMEOUT_SECONDS
        limit = f"> 0 and <= {MAX_TIMEOUT_SECONDS:.0f} s, a week"
        _require(within, "timeout", seconds, limit, "leave it out for no limit")


class FinishReason(StrEnum):
    """Why a request ended."""

    END_ID = "end_id"
    STOP_WORD = "stop_word"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"  # the request's own time limit
    SHUTDOWN = "shutdown"  # the server was told to stop and waited as long as it may
    ERROR = "error"


@dataclass(frozen=True)
class StepOutput:
    """Result of one engine step for one request: a token, prefill progress, or the end.

    `token_id` is None when the step gave no token (prefill progress; end by end_id, cancellation or error).
    The step's attention read `attended_tokens` of the request's `cached_tokens` per KV head, averaged over the layers; both
    are 0 for the first token, which prefill computes densely.
    """

    request_id: int
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    prefill_progress: float = 1.0
    cached_tokens: int = 0
    attended_tokens: float = 0.0
    statistics: RequestStatistics | None = None  # with the first token, and with finish_reason
    error: str = ""  # with FinishReason.ERROR
    code: ErrorCode = ErrorCode.INTERNAL  # with FinishReason.ERROR
