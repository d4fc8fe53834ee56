"""The engine's input and output: requests, sampling parameters, sessions; step outputs, and statistics of requests and steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import msgspec

from .config import EngineConfig
from .errors import ErrorCode, RequestError, check_types, check_unicode, require, typed
from .guide import Guide, GuideType
from .selected_rows import RowReport, SelectedRows

# Of sessions (docs/conversations.md). The scale and the default are those of TensorRT-LLM's KvCacheRetentionConfig.
MAX_RETENTION_PRIORITY = 100
DEFAULT_RETENTION_PRIORITY = 35  # of what requests without a session leave
SESSION_PRIORITY = 70
SESSION_SECONDS = 3600.0
MAX_RETENTION_SECONDS = 7 * 24 * 3600.0
MAX_SESSION_ID = 256
MAX_SEED = 2**64 - 1
DEFAULT_PRIORITY = 128
MAX_PRIORITY = 255
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0  # as good as no limit, and far below the longest time that a thread can wait
REPETITION_PENALTIES = 0.01, 100.0  # smaller and larger penalties can overflow the logits, whose size no client knows
MAX_PENALTY = 100.0  # of presence and frequency, and of a bias: as good as a ban or an order
MAX_COUNT = 2**31 - 1  # largest of the numbers that count tokens
MAX_LOGPROBS = 20  # likeliest tokens whose log probabilities a step may return
MAX_BAD_WORDS = 256  # every token is compared with all of them
MAX_BIASED_TOKENS = 1024
MAX_SALT = 256
MAX_STOP_WORDS = 64  # every token of the output is compared with all of them
MAX_STOP_WORD_BYTES = 1024
_require = partial(require, error=RequestError)


def check_words(name: str, words: Iterable[str]) -> tuple[str, ...]:
    """Return texts that end an output, or must not be in it, without the empty ones; raises RequestError that names the field."""
    kept = tuple(word for word in words if word)
    if len(kept) > MAX_STOP_WORDS:
        raise RequestError(f"{name} has {len(kept)} words: must be <= {MAX_STOP_WORDS}; send fewer")
    for word in kept:
        check_unicode(name, word)
    longest = max((len(word.encode()) for word in kept), default=0)
    if longest > MAX_STOP_WORD_BYTES:
        raise RequestError(f"{name}: one has {longest} bytes: must be <= {MAX_STOP_WORD_BYTES}; shorten it")
    return kept


def check_text(name: str, text: str, most: int) -> None:
    """Raise RequestError unless a client's name for something has 1 to `most` characters that UTF-8 can encode."""
    typed(name, text, str)
    if not 1 <= len(text) <= most:
        raise RequestError(f"{name} has {len(text)} characters: must be 1 to {most}; leave it out for none")
    check_unicode(name, text)


@dataclass(frozen=True)
class Session:
    """The conversation that a request continues, and how its extents are kept once the request has ended.

    Parameters
    ----------
    id : str
        1 to 256 characters. Requests with the same id and the same `cache_salt` are of one session.
    retention_priority : int
        0 to 100: extents of lower priority make room first. What requests without a session leave has 35.
    retention_seconds : float or None
        How long the priority lasts after the session's latest request, at most a week; 35 afterwards. None: as long as the
        session is not forgotten.

    Raises
    ------
    RequestError
        On a value that is out of range.
    """

    id: str
    retention_priority: int = SESSION_PRIORITY
    retention_seconds: float | None = SESSION_SECONDS

    def __post_init__(self) -> None:
        check_text("session_id", self.id, MAX_SESSION_ID)
        check_types(self)
        if not 0 <= self.retention_priority <= MAX_RETENTION_PRIORITY:
            raise RequestError(
                f"retention_priority = {self.retention_priority!r}: must be in [0, {MAX_RETENTION_PRIORITY}]; "
                f"{SESSION_PRIORITY} is a session's default, {DEFAULT_RETENTION_PRIORITY} that of requests without one"
            )
        if self.retention_seconds is not None and not 0 < self.retention_seconds <= MAX_RETENTION_SECONDS:
            raise RequestError(
                f"retention_seconds = {self.retention_seconds!r}: must be > 0 and <= {MAX_RETENTION_SECONDS:.0f} s, a week; "
                f"{SESSION_SECONDS:.0f} is the default"
            )


def read_session(session_id: str | None, priority: int | None, seconds: float | None) -> Session | None:
    """Make the session of a client's fields session_id, retention_priority and retention_seconds; raises RequestError."""
    if session_id is None:
        for name, value in (("retention_priority", priority), ("retention_seconds", seconds)):
            if value is not None:
                raise RequestError(
                    f"{name} = {value!r}: is for requests of a session; send session_id too, or leave it out"
                )
        return None
    own_priority = SESSION_PRIORITY if priority is None else priority
    return Session(session_id, own_priority, SESSION_SECONDS if seconds is None else seconds)


@dataclass(frozen=True)
class SamplingConfig:
    """Parameters of drawing the next token. Temperature 0 is greedy, and so is top_p 0; top_k 0, top_p 1 and min_p 0 leave the
    distribution whole.

    They apply in this order: bias, repetition penalty, presence and frequency penalty, guide, bad words and min_tokens,
    temperature, top-k, top-p, min-p, one draw from the request's own generator.

    Construction raises RequestError on a value of the wrong type or out of range.

    Attributes
    ----------
    repetition_penalty : float
        Divides positive and multiplies negative logits of the tokens of prompt and output.
    presence_penalty, frequency_penalty : float
        Subtracted from the logits of tokens that have occurred: once, and once for every occurrence. The prompt counts, but for
        its first `prompt_ignore_length` tokens.
    min_tokens : int
        Until so many tokens are generated, no end token is drawn. Stop words end the request all the same.
    bad_words : tuple of tuple of int
        Token sequences that the output never contains.
    logit_bias : tuple of (int, float)
        Numbers that are added to the logits of tokens.
    logprobs : int or None
        Return the log probability of every token, and of as many of the likeliest tokens. They are those of the model's own
        logits, before anything here changes them. None: return none.
    guide : Guide or None
        The text follows this guide. End tokens are drawn exactly when it is complete, also before `min_tokens` if no other token
        may follow then.
    prompt_logprobs : int or None
        The same of every token of the prompt but the first, which nothing precedes.
    return_context_logits : bool
        Return the model's logits at every token of the prompt.
    return_generation_logits : bool
        Return the model's logits from which each token is drawn, before anything here changes them.
    min_p : float
        Keep the tokens that have at least this share of the likeliest token's probability.
    forced_tokens : tuple of int
        The first tokens of the output, whatever else is asked for; what follows them is drawn. End tokens and stop words among
        them end the request as others do.
    return_selected_rows : RowReport or None
        Return with every token but the first which rows of the context its decode step selected.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int = 0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    guide: Guide | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    min_p: float = 0.0
    forced_tokens: tuple[int, ...] = ()
    return_selected_rows: RowReport | None = None

    def __post_init__(self) -> None:
        check_types(self)
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        _require(finite, "temperature", self.temperature, "finite and >= 0", "0 decodes greedily")
        _require(0 <= self.top_k <= MAX_COUNT, "top_k", self.top_k, f"in [0, {MAX_COUNT}]", "0 keeps all tokens")
        _require(0 <= self.top_p <= 1, "top_p", self.top_p, "in [0, 1]", "1 keeps all tokens")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]", "0 keeps all tokens")
        low, high = REPETITION_PENALTIES
        penalty = low <= self.repetition_penalty <= high
        _require(penalty, "repetition_penalty", self.repetition_penalty, f"in [{low}, {high}]", "1 is no penalty")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in [0, {MAX_SEED}]", "any such number will do")
        within = f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]"
        for name in ("presence_penalty", "frequency_penalty"):
            _require(abs(getattr(self, name)) <= MAX_PENALTY, name, getattr(self, name), within, "0 is no penalty")
        for name in ("prompt_ignore_length", "min_tokens"):
            value = getattr(self, name)
            _require(0 <= value <= MAX_COUNT, name, value, f"in [0, {MAX_COUNT}]", "0 is the default")
        _require(all(self.bad_words), "bad_words", (), "non-empty sequences", "leave empty bad words out")
        count = len(self.bad_words)
        _require(count <= MAX_BAD_WORDS, "bad_words", f"{count} words", f"<= {MAX_BAD_WORDS} words", "send fewer")
        count, limit = len(self.logit_bias), f"<= {MAX_BIASED_TOKENS} tokens"
        _require(count <= MAX_BIASED_TOKENS, "logit_bias", f"{count} tokens", limit, "send fewer")
        for token, bias in self.logit_bias:
            _require(abs(bias) <= MAX_PENALTY, f"logit_bias of token {token}", bias, within, "0 is no bias")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            fits = value is None or 0 <= value <= MAX_LOGPROBS
            _require(fits, name, value, f"in [0, {MAX_LOGPROBS}]", "0 is the token's own alone")
        free = self.guide is None or self.guide.type is GuideType.LARK or not self.forced_tokens
        forced = f"{len(self.forced_tokens)} tokens"
        _require(free, "forced_tokens", forced, "absent with a guide", "leave one of them out")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and none is drawn at random."""
        return self.temperature == 0 or self.top_p == 0

    @property
    def scores_tokens(self) -> bool:
        """Whether something is returned with each token."""
        return self.logprobs is not None or self.return_generation_logits

    @property
    def needs_logits(self) -> bool:
        """Whether something changes the logits, or they are asked for: then the largest is not enough."""
        changed = (self.presence_penalty, self.frequency_penalty, self.min_tokens, self.bad_words, self.logit_bias)
        drawn_from = self.guide is not None or bool(self.forced_tokens)
        return self.repetition_penalty != 1 or any(changed) or self.scores_tokens or drawn_from

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of all tokens of the prompt are asked for, or what follows from them."""
        return self.prompt_logprobs is not None or self.return_context_logits


@dataclass(frozen=True)
class Request:
    """One generation request, in token ids.

    `end_id` ends the request when drawn and is not part of the output; None: only max_tokens and stop words end it.
    `max_tokens` may be 0 if log probabilities or logits of the prompt are asked for: then nothing is generated.
    `max_tokens_by_default`: the client has not said it, so an engine whose memory holds less lowers it (Engine.fitted).
    `stop_words` are token sequences; output that ends with one stops there (the stop word stays in the output's token ids).
    `priority`, 0 to 255: of the requests that wait, those with the larger number start first, as in TensorRT-LLM
    (engine/schedule/scheduler.py). `timeout_seconds` counts from submission and is at most a week: when it has passed, a waiting
    request ends with an error, and a running request ends with the tokens it has and FinishReason.TIMEOUT. None: no limit.
    `waited_seconds` of it had passed before the submission, at a frontend.
    `cache_salt`: only requests of the same salt share what they have read (docs/conversations.md). `session`: the conversation
    that the request continues, whose rows are kept rather than others'. `speculate`: False has no drafts verified for it, in an
    engine that speculates; its tokens are the same (engine/speculation.py).
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    end_ids: tuple[int, ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    priority: int = DEFAULT_PRIORITY
    timeout_seconds: float | None = None
    waited_seconds: float = 0.0
    cache_salt: str | None = None
    session: Session | None = None
    max_tokens_by_default: bool = False
    speculate: bool = True

    def validate(self, config: EngineConfig) -> None:
        """Raise RequestError unless an engine of this configuration can serve the request.

        All frontends and the Python API call it, and so does the engine. Messages begin with the field's name, which is that of
        TensorRT-LLM's inputs where these have one; who has other names for his clients gives them by `errors.renamed`.
        """
        check_types(self, but=("prompt_ids",))  # a frontend or the API has made these itself; there may be a million
        n, vocabulary = len(self.prompt_ids), config.model.vocab_size
        _require(n >= 1, "input_ids", f"{n} tokens", "at least one token", "send a prompt")
        limit = f"<= max_input_len = {config.max_input_len} tokens"
        remedy = "shorten it or build with a larger max_input_len"
        _require(n <= config.max_input_len, "input_ids", f"{n} tokens", limit, remedy)
        limit, least = (">= 0", 0) if self.sampling.scores_prompt else (">= 1", 1)
        _require(self.max_tokens >= least, "max_tokens", self.max_tokens, limit, "ask for a token")
        limit = f"<= max_seq_len = {config.max_seq_len} together with the prompt of {n} tokens"
        left, forced = config.max_seq_len - n, len(self.sampling.forced_tokens)
        _require(forced <= left, "forced_tokens", f"{forced} tokens", limit, "send fewer")
        _require(self.max_tokens <= left, "max_tokens", self.max_tokens, limit, "ask for fewer tokens")
        limit = f"<= {self.max_tokens}, the most tokens to generate"
        _require(forced <= self.max_tokens, "forced_tokens", f"{forced} tokens", limit, "ask for more tokens")
        limit = f"in [0, {vocabulary})"
        for name, ids in (
            ("input_ids", self.prompt_ids),
            ("end_id", self.end_ids),
            *(("stop_words_list", w) for w in self.stop_words),
            *(("bad_words_list", w) for w in self.sampling.bad_words),
            ("logit_bias", tuple(token for token, _ in self.sampling.logit_bias)),
            ("forced_tokens", self.sampling.forced_tokens),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
                bad = next(token for token in ids if not 0 <= token < vocabulary)
                _require(False, name, bad, limit, "the vocabulary of the model has no such id")
        _require(all(self.stop_words), "stop_words_list", (), "non-empty sequences", "leave empty stop words out")
        guide = self.sampling.guide
        if guide is not None and not self.end_ids:
            name = "guided_decoding_guide" if guide.guide else "guided_decoding_guide_type"
            raise RequestError(
                f"{name}: needs a token that ends the output once it is complete; leave end_id and ignore_eos at "
                "their defaults"
            )
        if self.sampling.return_selected_rows is not None:
            self.sampling.return_selected_rows.fitted(config, n + self.max_tokens)
        limit = f"in [0, {MAX_PRIORITY}]"
        _require(0 <= self.priority <= MAX_PRIORITY, "priority", self.priority, limit, "larger numbers start first")
        seconds = self.timeout_seconds
        within = seconds is None or 0 < seconds <= MAX_TIMEOUT_SECONDS
        limit = f"> 0 and <= {MAX_TIMEOUT_SECONDS:.0f} s, a week"
        _require(within, "timeout", seconds, limit, "leave it out for no limit")
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt, MAX_SALT)

    @property
    def logit_fields(self) -> str:
        """Names of the fields by which the request asks for logits, for errors."""
        names = ("return_context_logits", "return_generation_logits")
        return ", ".join(name for name in names if getattr(self.sampling, name))

    def logits(self, vocabulary: int) -> int:
        """Count the logits, numbers of 4 bytes each, that the request asks for at most."""
        prompt = len(self.prompt_ids) if self.sampling.return_context_logits else 0
        return (prompt + (self.max_tokens if self.sampling.return_generation_logits else 0)) * vocabulary


class FinishReason(StrEnum):
    """Why a request ended."""

    END_ID = "end_id"
    STOP_WORD = "stop_word"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"  # the request's own time limit
    SHUTDOWN = "shutdown"  # the server was wanted to stop and waited as long as it may
    ERROR = "error"


@dataclass(frozen=True)
class LogProbs:
    """Natural logarithms of the probabilities that the model's logits give a token.

    `token` is that of the token that was drawn, or that the prompt has; `top` are the likeliest tokens, likeliest first, as
    (token id, log probability).
    """

    token: float
    top: tuple[tuple[int, float], ...] = ()


class StepOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Result of one engine step for one request: a token, prefill progress, or the end.

    `token_id` is None when the step gave no token (prefill progress; end by end_id, cancellation or error).
    The step's attention read `attended_tokens` of the request's `cached_tokens` per KV head, averaged over the layers; both
    are 0 for the first token, which prefill computes densely. `logprobs` come with a token, if the request asked for them.

    What a request asks of its prompt comes in pieces, with outputs that have no token: `prompt_logprobs` of consecutive tokens,
    beginning with the second, and `context_logits` of consecutive tokens, beginning with the first.

    Attributes
    ----------
    end_id : int or None
        The end token that ended the request. It is not part of the output, but `logprobs` are its own.
    context_logits, generation_logits : bytes
        Logits, float32 [tokens, vocabulary] in the byte order of the machine: at tokens of the prompt; from which the token
        was drawn.
    selected_rows : SelectedRows or None
        What the step read that drew the token, if the request asked for it; None with the first token, whose prompt is read
        densely.
    earlier : tuple of int
        With the last output of a request whose tokens are only wanted at its end: all before `token_id`.
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
    logprobs: LogProbs | None = None
    end_id: int | None = None  # with FinishReason.END_ID
    prompt_logprobs: tuple[LogProbs, ...] = ()
    context_logits: bytes = b""
    generation_logits: bytes = b""
    selected_rows: SelectedRows | None = None
    earlier: tuple[int, ...] = ()


@dataclass
class RequestStatistics:
    """Counts and times of one request, filled in while it runs.

    Times are in seconds of `time.perf_counter`; a time is 0 until its event has happened.
    """

    prompt_tokens: int
    submitted_at: float
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    generated_tokens: int = 0
    cached_token_steps: int = 0  # cached tokens, summed over decode steps
    attended_token_steps: float = 0.0  # cached tokens that were attended to, summed over decode steps
    extents: int = 0  # of the row pool, the most that the request has had; shared ones count too
    prompt_extents: int = 0  # of `extents`, those that hold the prompt
    reused_tokens: int = 0  # first tokens of the prompt that were not read, as an earlier request had left their rows
    reused_extents: int = 0  # of `prompt_extents`, those of which an earlier request had left at least the first rows
    shared_extents: int = 0  # of `reused_extents`, those that were not copied
    num_preemptions: int = 0  # how often it had to make room for others, and went on later
    drafted_tokens: int = 0  # that steps have verified
    accepted_tokens: int = 0  # of them

    def record_tokens(self, cached_tokens: int, attended_tokens: float, now: float, count: int = 1) -> None:
        """Count tokens that came now, drawn by as many steps, which attended to `attended_tokens` of `cached_tokens`.

        These are sums over the steps; 0 of 0: prefill.
        """
        self.last_token_at = now
        if not self.generated_tokens:
            self.first_token_at = self.last_token_at
        self.generated_tokens += count
        self.cached_token_steps += cached_tokens
        self.attended_token_steps += attended_tokens

    def record_draft(self, drafted: int, accepted: int) -> None:
        """Count the tokens of a draft that a step has verified."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    @property
    def queue_seconds(self) -> float:
        """Time from submission to the start of prefill."""
        return max(0.0, self.started_at - self.submitted_at)

    @property
    def ttft_seconds(self) -> float:
        """Time to first token, queueing included."""
        return max(0.0, self.first_token_at - self.submitted_at)

    @property
    def tpot_seconds(self) -> float:
        """Time per output token after the first; 0 with fewer than two tokens."""
        if self.generated_tokens < 2:
            return 0.0
        return (self.last_token_at - self.first_token_at) / (self.generated_tokens - 1)

    @property
    def attended_share(self) -> float:
        """Share of the cached tokens that decode steps attended to; 1 before the first decode step."""
        return self.attended_token_steps / self.cached_token_steps if self.cached_token_steps else 1.0


@dataclass(frozen=True)
class StepReport:
    """Work of one engine step, and how full the engine was after it.

    `prefill_tokens` counts the tokens that the step read of all prompts: tokens × layers read, divided by the number of layers.
    So a prompt that is read layer by layer counts from its first layer on, not when its tokens have passed the last. Remainders
    of the division go to later steps, so the counts of all steps add up to all that was read, prompts that ended half-way
    included.
    """

    number: int = 0  # number of the step, from 1; 0: there was no step
    seconds: float = 0.0
    decode_batch: int = 0  # tokens that requests got by decoding
    prefill_tokens: int = 0
    waiting: int = 0
    running: int = 0
    extents_used: int = 0  # by requests
    extents_kept: int = 0  # for later requests, by none that runs
    extents_free: int = 0
    refresh_seconds: float = 0.0  # time that the host spent on the indexes' upkeep after decoding
    drafted_tokens: int = 0  # that the step has verified (engine/speculation.py)
    accepted_tokens: int = 0  # of them


@dataclass(frozen=True)
class EndedSession:
    """What the end of a session has freed: extents that no other session and no request without a session had used."""

    freed_extents: int
    freed_tokens: int
