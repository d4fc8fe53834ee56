"""The choices of an answer: the request of the engine for each, the pieces that its outputs make, and the JSON of these, whole
and as events, with log probabilities in the two forms that OpenAI has.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvseek.core.config import EngineConfig
from kvseek.core.errors import CodedError, ErrorCode, RequestError, renamed
from kvseek.core.request import DEFAULT_PRIORITY, FinishReason, LogProbs, Request, StepOutput
from kvseek.core.selected_rows import SelectedRows
from kvseek.engine.accumulator import Accumulator
from kvseek.engine.tokenizer import TextStream, Tokenizer
from kvseek.server.requests.keys import Tenant
from kvseek.server.requests.translation import with_own_seeds

from .bodies import MAX_CHOICES, TOO_LONG, Body, read_guide
from .fields import FieldError, require

# OpenAI knows two reasons for which a complete text ends. A time limit cuts a text off, as max_tokens does.
REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORD: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "length",
}
MAX_PROMPT_LOGPROBS = 1 << 18  # that one request may ask for: a prompt of 128K tokens with its likeliest ones
NOT_READ = (
    "timeout: passed before the prompt was read and its log probabilities were computed; send it with a longer timeout"
)
Json = dict[str, Any]
Piece = dict[str, Any]  # see Choice
NO_FIELDS: Json = {}
CHAT = ("chatcmpl", "chat.completion", "chat.completion.chunk")  # beginning of ids, `object` of answers and of events
COMPLETION = ("cmpl", "text_completion", "text_completion")
OFFSET_BYTES = 40  # a number in a list
LOWEST = -9999.0  # stands for the logarithm of 0, which JSON cannot write; OpenAI's number
# Token id, its log probabilities, length of the text before it. The first token of an echoed prompt has no log probabilities.
Tokens = Sequence[tuple[int, LogProbs | None, int]]
BROKEN_OFF = "the server is shutting down and has ended the request before its end; send it again in some seconds"


@dataclass(frozen=True)
class Echo:
    """The prompt at the beginning of an answer.

    Attributes
    ----------
    offsets : sequence of int
        Length of the text before each token; empty if no log probabilities are asked for.
    """

    text: str
    offsets: Sequence[int] = ()

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return sys.getsizeof(self.text) + OFFSET_BYTES * len(self.offsets)


class Choice:
    """See ServedRequest. Its chunks are pieces of the answer, as dicts:

    - `text`: new text;
    - `tokens`: (token id, its LogProbs, length of the text before it) of new tokens, if log probabilities are asked for. The
      first token of an echoed prompt has None for LogProbs. After an echo the end token counts too: lm_eval needs an entry for
      each token that it asked for;
    - `rows`: what each new token's step read (SelectedRows or None), if selected rows are asked for;
    - `prompt`: before the first of these, what positions stand for: the prompt's text, and its length before each token;
    - `count`: tokens generated so far;
    - `reused`: tokens of the prompt that were not read, because an earlier prompt began alike;
    - `finish_reason`: "stop" or "length" with the last piece, else None.

    If the client does not want a stream, there is one piece, at the end.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        streaming: bool,
        echo: Echo | None = None,
        names: Mapping[str, str] | None = None,
        prompt: Echo | None = None,
        held_bytes: int = 0,
    ) -> None:
        self.held_bytes = held_bytes
        self.request, self.streaming, self.ended, self.names = request, streaming, False, names or {}
        self._new = Accumulator(request, tokenizer, stop)
        self._new.text = "" if echo is None else echo.text
        wanted = request.sampling.logprobs is not None
        self._offsets = tokenizer.stream(prompt_ids=request.prompt_ids) if wanted else None
        self._echoes, self._due = echo is not None, echo  # what is due has not been given yet
        self._length = len(self._new.text)  # characters so far, those held back included
        self._tokens: list[tuple[int, LogProbs | None, int]] = []
        self._prompt = prompt

    def push(self, outputs: Sequence[StepOutput]) -> Iterator[dict[str, Any]]:
        """Take outputs of the engine, whose tokens make one piece; raises CodedError if the server ended the request."""
        new, taken, broken = self._new, False, False
        for output in outputs:
            if not new.push(output):
                continue
            taken = True
            broken = output.finish_reason is not None and output.finish_reason not in REASONS
            if self._offsets is not None and not broken:
                self._take_logprobs(output, self._offsets)
        if not taken:
            return
        reason = None if broken else new.finish_reason
        self.ended = reason is not None
        text = new.text
        if (self.streaming and (text or self._tokens or new.selected_rows)) or reason is not None:
            yield {
                "text": text,
                "tokens": self._tokens,
                "rows": new.selected_rows,
                "prompt": self._prompt,
                "count": new.count,
                "reused": 0 if new.statistics is None else new.statistics.reused_tokens,
                "finish_reason": None if reason is None else REASONS[reason],
            }
            new.text, self._tokens, new.selected_rows, self._prompt = "", [], [], None
        if broken:
            raise CodedError(ErrorCode.UNAVAILABLE, BROKEN_OFF)

    def _take_logprobs(self, output: StepOutput, text: TextStream) -> None:
        """Take the log probabilities of an output's token, and before the first one those of the prompt."""
        due, self._due = self._due, None
        if due is not None:
            known = self._new.prompt_logprobs
            if len(known) < len(due.offsets) - 1:
                raise CodedError(ErrorCode.TIMEOUT, NOT_READ)
            self._tokens += zip(self.request.prompt_ids, (None, *known), due.offsets, strict=True)
        if output.token_id is not None and output.logprobs is not None:
            self._tokens.append((output.token_id, output.logprobs, self._length))
            self._length += len(text.push(output.token_id))
        elif self._echoes and output.end_id is not None and output.logprobs is not None:
            self._tokens.append((output.end_id, output.logprobs, self._length))


def make_choices(body: Body, tenant: Tenant, tokenizer: Tokenizer, config: EngineConfig) -> tuple[list[Choice], int]:
    """Make the choices that a body asks for, those of the first prompt first, and count the tokens of all prompts.

    Tokenises, which may take long. Raises RequestError on any body that cannot be served.
    """
    body.check()
    stop, guide, top = body.stop_words(), read_guide(body.response_format), body.top()
    sampling = replace(body.sampling(tokenizer, top), guide=guide)
    session = body.session
    ends, streaming = body.end_ids(config), bool(body.stream)
    prompts = body.prompts(tokenizer, config)
    tokens, count = sum(len(prompt.ids) for prompt in prompts), len(prompts) * body.choices
    require(
        count <= MAX_CHOICES,
        "n",
        f"{count} choices",
        f"<= {MAX_CHOICES} for all prompts together",
        "send fewer prompts in a request",
    )
    if prompts[0].echo is not None and top is not None:
        _check_prompt_logprobs((1 + top) * body.choices * tokens)
    choices = []
    for ids, text in prompts:
        max_tokens = _limit(body, len(ids), config, 1 if text is None else 0)
        scored = None if text is None else _scored(top, max_tokens, config)
        request = Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=replace(sampling, prompt_ignore_length=len(ids), prompt_logprobs=scored),
            end_ids=ends,
            priority=DEFAULT_PRIORITY if body.priority is None else body.priority,
            timeout_seconds=body.timeout,
            cache_salt=tenant.salt(body.cache_salt),
            session=session,
            max_tokens_by_default=body.limit_field is None,
        )
        names = {"input_ids": body.prompt_field, "max_tokens": body.limit_field or "max_tokens, by default,"}
        try:
            request.validate(config)
        except RequestError as error:
            raise RequestError(renamed(str(error), names)) from None
        echo = None if text is None else Echo(text, () if top is None else tokenizer.offsets(ids))
        read = None if sampling.return_selected_rows is None else Echo(tokenizer.decode(ids), tokenizer.offsets(ids))
        held = sum(each.bytes for each in (echo, read) if each is not None) // body.choices  # which share them
        for own in with_own_seeds(request, body.choices):
            choices.append(Choice(own, tokenizer, stop, streaming, echo, names, read, held))
    return choices, tokens


def _scored(top: int | None, max_tokens: int, config: EngineConfig) -> int | None:
    """Return how many likeliest tokens the engine has to tell for each token of an echoed prompt; None: no log probabilities."""
    if top is None and max_tokens > 0:
        return None
    limit = "false, or without logprobs and with max_tokens >= 1, in an engine of TensorRT plans"
    require(config.runtime == "torch", "echo", True, limit, "plans do not compute the logits of a prompt")
    return top or 0


def _check_prompt_logprobs(count: int) -> None:
    limit = f"<= {MAX_PROMPT_LOGPROBS:,}, for all prompts and choices together, if echo is true"
    few = count <= MAX_PROMPT_LOGPROBS
    require(
        few, "logprobs", f"{count:,} log probabilities", limit, "ask for fewer likeliest tokens, or send fewer prompts"
    )


def _limit(body: Body, prompt_tokens: int, config: EngineConfig, least: int) -> int:
    """Return the most tokens to generate; raises FieldError if prompt and answer do not fit together."""
    limit, left, name = body.limit(prompt_tokens, config), config.max_seq_len - prompt_tokens, body.limit_field
    if left < least:
        whole = f"{body.prompt_field} has {prompt_tokens} tokens: must be <= {config.max_seq_len - least}"
        raise FieldError(
            body.prompt_field, f"{whole}, to leave room for an answer in max_seq_len; shorten it", TOO_LONG
        )
    if name is not None and limit > left:
        whole = f"{name} = {limit}: must be <= {left}, as the prompt has {prompt_tokens} tokens of max_seq_len"
        raise FieldError(name, f"{whole} = {config.max_seq_len}; ask for fewer, or shorten the prompt", TOO_LONG)
    require(limit >= least, name or "max_tokens", limit, f">= {least}", "ask for a token")
    return limit


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """Write the numbers of tokens; `cached_tokens` are those of the prompts that were not read."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Reply:
    """Writes one answer of /v1/chat/completions, or of /v1/completions.

    Parameters
    ----------
    usage_in_stream : bool
        Whether a stream ends with the numbers of tokens; then all other events have `usage` null.
    """

    def __init__(
        self, chat: bool, model: str, fingerprint: str, tokenizer: Tokenizer, logprobs: bool, usage_in_stream: bool
    ) -> None:
        prefix, kind, event_kind = CHAT if chat else COMPLETION
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._chat, self._tokenizer, self._logprobs = chat, tokenizer, logprobs
        self._whole: Json = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        event = self._whole | {"object": event_kind}
        # What all events begin with: to write it for each would take longer than the rest.
        self._start, self._start_of_others = (
            msgspec.json.encode(fields)[:-1] + b',"choices":'
            for fields in (event, event | {"usage": None} if usage_in_stream else event)
        )

    def whole(self, pieces: Sequence[Piece], counts: Json) -> bytes:
        """Write a complete answer, of one piece for each choice."""
        choices = []
        for index, piece in enumerate(pieces):
            message = {"role": "assistant", "content": piece["text"], "refusal": None}
            own = {"message": message} if self._chat else {"text": piece["text"]}
            choices.append(self._choice(index, own, piece, piece["finish_reason"]))
        return msgspec.json.encode(self._whole | {"choices": choices, "usage": counts})

    def begin(self, choices: int) -> list[bytes]:
        """Write the events with which a stream begins; that of a completion begins with its first piece."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._event(index, delta) for index in range(choices if self._chat else 0)]

    def pieces(self, index: int, piece: Piece) -> list[bytes]:
        """Write the events of a piece of a choice."""
        text, reason = piece["text"], piece["finish_reason"]
        if not self._chat:
            return [self._event(index, {"text": text}, piece, reason)]
        told = text or piece["tokens"] or row_fields(piece)
        events = [self._event(index, {"delta": {"content": text}}, piece)] if told else []
        return events if reason is None else [*events, self._event(index, {"delta": {}}, None, reason)]

    def end(self, counts: Json) -> bytes:
        """Write the event with the numbers of tokens."""
        return b'%b[],"usage":%b}' % (self._start, msgspec.json.encode(counts))

    def _event(self, index: int, own: Json, piece: Piece | None = None, reason: str | None = None) -> bytes:
        return b"%b[%b]}" % (self._start_of_others, msgspec.json.encode(self._choice(index, own, piece, reason)))

    def _choice(self, index: int, own: Json, piece: Piece | None, reason: str | None) -> Json:
        """Write a choice with its `own` field, and what there is of a piece besides its text."""
        write, logprobs = chat_logprobs if self._chat else completion_logprobs, None
        if self._logprobs and piece is not None:
            logprobs = write(piece["tokens"], self._tokenizer)
        rows = NO_FIELDS if piece is None else row_fields(piece)
        return {"index": index, **own, "logprobs": logprobs, "finish_reason": reason, **rows}


def row_fields(piece: Piece) -> Json:
    """Write what the steps of a piece's tokens selected, and with the first of them the text that positions stand for."""
    rows: Sequence[SelectedRows | None] = piece["rows"]
    if not rows and piece["prompt"] is None:
        return NO_FIELDS
    fields: Json = {"selected_rows": [None if each is None else _row_report(each) for each in rows]}
    if piece["prompt"] is not None:
        fields["prompt"] = {"text": piece["prompt"].text, "offsets": piece["prompt"].offsets}
    return fields


def _row_report(rows: SelectedRows) -> Json:
    blocks, counts = rows.lists()
    return {
        "cached_tokens": rows.cached_tokens,
        "attended_tokens": rows.attended_tokens,
        "region": [rows.start, rows.stop],
        "block": rows.block,
        "layers": rows.layers,
        "kv_heads": rows.kv_heads,
        "blocks": blocks,
        "counts": counts,
    }


def chat_logprobs(tokens: Tokens, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the log probabilities of a chat's tokens."""
    content = []
    for token, logprobs, _ in tokens:
        assert logprobs is not None, "a chat has no echo"
        top = [_chat_token(each, value, tokenizer) for each, value in logprobs.top]
        content.append(_chat_token(token, logprobs.token, tokenizer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Tokens, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the log probabilities of a completion's tokens. The token itself is always among the likeliest, as with OpenAI."""
    return {
        "tokens": [token_text(token, tokenizer) for token, _, _ in tokens],
        "token_logprobs": [None if logprobs is None else max(logprobs.token, LOWEST) for _, logprobs, _ in tokens],
        "top_logprobs": [
            None if logprobs is None else _likeliest(token, logprobs, tokenizer) for token, logprobs, _ in tokens
        ],
        "text_offset": [offset for _, _, offset in tokens],
    }


def _likeliest(token: int, logprobs: LogProbs, tokenizer: Tokenizer) -> dict[str, float]:
    likeliest: dict[str, float] = {}
    for each, value in (*logprobs.top, (token, logprobs.token)):
        likeliest.setdefault(token_text(each, tokenizer), max(value, LOWEST))
    return likeliest


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token. Where it has none, or bytes that are no UTF-8 alone, these are spelt out."""
    data = tokenizer.token_bytes(token)
    if not data:
        return f"token_id:{token}"
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_token(token: int, value: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": token_text(token, tokenizer), "logprob": max(value, LOWEST), "bytes": list(data)}
