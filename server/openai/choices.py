"""The choices of an answer: the request of the engine for each, the pieces that its outputs make, and the JSON of these, whole
and as events, with log probabilities in the two forms that OpenAI has.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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

from .answers import AnswerForm, AnswerForms
from .bodies import FORMAT, MAX_CHOICES, Body, ChatBody
from .fields import TOO_LONG, FieldError, is_absent, openai_error, require
from .tool_formats import ARGUMENTS, CALL, CONTENT, REASONING, Part

# OpenAI knows two reasons for which a complete text ends. A time limit cuts a text off, as max_tokens does.
REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORD: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "length",
}
TOOL_CALLS = "tool_calls"  # the reason of an answer that is complete and calls
MAX_PROMPT_LOGPROBS = 1 << 18  # that one request may ask for: a prompt of 128K tokens with its likeliest ones
NOT_READ = (
    "timeout: passed before the prompt was read and its log probabilities were computed; send it with a longer timeout"
)
Json = dict[str, Any]
Piece = dict[str, Any]  # see Choice
NO_FIELDS: Json = {}
PLAIN = AnswerForm()
DONE = b"[DONE]"
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

    - `text`: new text, and `parts`, what it consists of (AnswerReader);
    - `tokens`: (token id, its LogProbs, length of the text before it) of new tokens, if log probabilities are asked for. The
      first token of an echoed prompt has None for LogProbs. After an echo the end token counts too: lm_eval needs an entry for
      each token that it asked for;
    - `rows`: what each new token's step read (SelectedRows or None), if selected rows are asked for;
    - `prompt`: before the first of these, what positions stand for: the prompt's text, and its length before each token;
    - `token_ids`: new tokens, if they are asked for, and `prompt_ids` with the first piece;
    - `count`: tokens generated so far, and `reasoning`, those of them that are thinking; None: the model does not think;
    - `reused`: tokens of the prompt that were not read, because an earlier prompt began alike;
    - `finish_reason`: "stop", "tool_calls" or "length" with the last piece, else None; `timed_out`: whether the time limit cut
      it off; `stop`: the stop text that ended it.

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
        form: AnswerForm = PLAIN,
        returns_ids: bool = False,
    ) -> None:
        self.held_bytes, self.form = held_bytes, form
        self._reader, self._returned = form.reader(), 0 if returns_ids else None  # tokens that a piece has given
        self.request, self.streaming, self.ended, self.names = request, streaming, False, names or {}
        self._new = Accumulator(request, tokenizer, stop, form.marks)
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
        if self.streaming or reason is not None:
            yield from self._piece(reason)
        if broken:
            raise CodedError(ErrorCode.UNAVAILABLE, BROKEN_OFF)

    def _piece(self, reason: FinishReason | None) -> Iterator[Piece]:
        """Make a piece of what is new, if anything is."""
        new = self._new
        text, new.text = new.text, ""
        parts = self._parts(text, reason)
        if parts or self._tokens or new.selected_rows or self._returned is not None or reason is not None:
            yield {
                "text": text,
                "parts": parts,
                "tokens": self._tokens,
                "rows": new.selected_rows,
                "prompt": self._prompt,
                **self._new_ids(),
                "count": new.count,
                "reasoning": self._reasoning(reason),
                "reused": 0 if new.statistics is None else new.statistics.reused_tokens,
                "finish_reason": None if reason is None else self._reason(reason),
                "timed_out": reason is FinishReason.TIMEOUT,
                "stop": new.stop_word,
            }
            self._tokens, new.selected_rows, self._prompt = [], [], None

    def _parts(self, text: str, reason: FinishReason | None) -> list[Part]:
        if self._reader is None:
            return [(CONTENT, text)] if text else []
        parts = self._reader.push(text)
        return parts if reason is None else parts + self._reader.finish()

    def _reason(self, reason: FinishReason) -> str:
        found, reader = REASONS[reason], self._reader
        if found != "stop" or reader is None or not reader.calls:
            return found
        # A stop text may end an answer within a call, whose arguments nobody can read.
        return found if reason is FinishReason.STOP_WORD and not reader.whole else TOOL_CALLS

    def _reasoning(self, reason: FinishReason | None) -> int | None:
        """Count the tokens of thinking, once the answer has ended."""
        thinking = self.form.thinking
        return None if thinking is None or reason is None else thinking.count(self._new.token_ids)

    def _new_ids(self) -> Json:
        """Return the tokens that no piece has given, and with the first ones those of the prompt."""
        if self._returned is None:
            return NO_FIELDS
        first, self._returned = self._returned, len(self._new.token_ids)
        new: Json = {"token_ids": self._new.token_ids[first:]}
        return new if first else new | {"prompt_ids": self.request.prompt_ids}

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


def make_choices(
    body: Body, tenant: Tenant, tokenizer: Tokenizer, config: EngineConfig, forms: AnswerForms
) -> tuple[list[Choice], int]:
    """Make the choices that a body asks for, those of the first prompt first, and count the tokens of all prompts.

    Tokenises, which may take long. Raises RequestError on any body that cannot be served.
    """
    body.check()
    stop, top = body.stop_words(), body.top()
    sampling = body.sampling(tokenizer, top)
    session = body.session
    ends, streaming = body.end_ids(config), bool(body.stream)
    salt = tenant.salt(body.cache_salt)
    conversation = partial(tokenizer.encode_conversation, salt=salt, max_tokens=config.max_input_len)
    prompts = body.prompts(tokenizer, config, forms, conversation)
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
    for ids, text, form, guide in prompts:
        max_tokens = _limit(body, len(ids), config, 1 if text is None else 0)
        scored = None if text is None else _scored(top, max_tokens, config)
        request = Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=replace(sampling, guide=guide, prompt_ignore_length=len(ids), prompt_logprobs=scored),
            end_ids=ends,
            priority=DEFAULT_PRIORITY if body.priority is None else body.priority,
            timeout_seconds=body.timeout,
            cache_salt=salt,
            session=session,
            max_tokens_by_default=body.limit_field is None,
            speculate=body.speculate is not False,
        )
        names = {"input_ids": body.prompt_field, "max_tokens": body.limit_field or "max_tokens, by default,"}
        names |= _guide_names(body, form)
        try:
            request.validate(config)
        except RequestError as error:
            raise RequestError(renamed(str(error), names)) from None
        echo = None if text is None else Echo(text, () if top is None else tokenizer.offsets(ids))
        read = None if sampling.return_selected_rows is None else Echo(tokenizer.decode(ids), tokenizer.offsets(ids))
        held = sum(each.bytes for each in (echo, read) if each is not None) // body.choices  # which share them
        for own in with_own_seeds(request, body.choices):
            returns_ids = bool(body.return_token_ids)
            choices.append(Choice(own, tokenizer, stop, streaming, echo, names, read, held, form, returns_ids))
    return choices, tokens


def _guide_names(body: Body, form: AnswerForm) -> dict[str, str]:
    """Name the field that asks for the guide, for the errors of what cannot be compiled."""
    field = FORMAT
    if form.tools is not None:
        field = "tools"
    elif is_absent(body.response_format) and isinstance(body, ChatBody):
        field = "reasoning_effort" if body.thinking_token_budget is None else "thinking_token_budget"
    return {"guided_decoding_guide": field, "guided_decoding_guide_type": field}


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


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning: int | None = None) -> Json:
    """Write the numbers of tokens; `cached_tokens` are those of the prompts that were not read, `reasoning` those of thinking."""
    own = NO_FIELDS if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return own | {
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
    form : AnswerForm
        Of all choices, in a chat.
    """

    frame, held_bytes = b"data: %b\n\n", 0

    def __init__(
        self,
        chat: bool,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        logprobs: bool,
        usage_in_stream: bool,
        form: AnswerForm = PLAIN,
    ) -> None:
        prefix, kind, event_kind = CHAT if chat else COMPLETION
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._chat, self._tokenizer, self._logprobs, self._usage = chat, tokenizer, logprobs, usage_in_stream
        self._form, self._calls = form, Counter[int]()  # that have begun, of each choice
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
            own = {"message": self._message(piece["parts"])} if self._chat else {"text": piece["text"]}
            choices.append(self._choice(index, own, piece, piece["finish_reason"]))
        prompt = self._prompt_ids(pieces[0]) if self._chat else NO_FIELDS
        return msgspec.json.encode(self._whole | prompt | {"choices": choices, "usage": counts})

    def _message(self, parts: Sequence[Part]) -> Json:
        texts, calls = {CONTENT: "", REASONING: ""}, list[Json]()
        for kind, text in parts:
            if kind == CALL:
                function = {"name": text, "arguments": ""}
                calls.append({"id": self._form.call_id(), "type": "function", "function": function})
            elif kind == ARGUMENTS:
                calls[-1]["function"]["arguments"] += text
            else:
                texts[kind] += text
        content, thoughts = texts[CONTENT], texts[REASONING]
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if thoughts:
            message |= {"content": content or None, "reasoning_content": thoughts, "reasoning": thoughts}
        return message | {"content": content or None, "tool_calls": calls} if calls else message

    @staticmethod
    def _prompt_ids(piece: Piece) -> Json:
        return {"prompt_token_ids": piece["prompt_ids"]} if "prompt_ids" in piece else NO_FIELDS

    def begin(self, choices: int) -> list[bytes]:
        """Write the events with which a stream begins; that of a completion begins with its first piece."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._event(index, delta) for index in range(choices if self._chat else 0)]

    def pieces(self, index: int, piece: Piece) -> list[bytes]:
        """Write the events of a piece of a choice."""
        text, reason = piece["text"], piece["finish_reason"]
        if not self._chat:
            return [self._event(index, {"text": text}, piece, reason)]
        deltas = [self._delta(index, *part) for part in piece["parts"]]
        if not deltas and (piece["tokens"] or row_fields(piece) or "token_ids" in piece):
            deltas = [{"content": ""}]
        # What a piece has besides its text goes with its first event.
        events = [
            self._event(index, {"delta": delta}, piece if place == 0 else None) for place, delta in enumerate(deltas)
        ]
        return events if reason is None else [*events, self._event(index, {"delta": {}}, None, reason)]

    def _delta(self, index: int, kind: str, text: str) -> Json:
        """Write a part of a stream: a call begins with its id and name, and empty arguments."""
        if kind == CONTENT:
            return {"content": text}
        if kind == REASONING:
            return {"reasoning_content": text, "reasoning": text}
        if kind == CALL:
            self._calls[index] += 1
            function = {"name": text, "arguments": ""}
            own: Json = {"id": self._form.call_id(), "type": "function", "function": function}
        else:
            own = {"function": {"arguments": text}}
        return {"tool_calls": [{"index": self._calls[index] - 1, **own}]}

    def end(self, counts: Json) -> list[bytes]:
        """Write the events with which a stream ends."""
        return [*([b'%b[],"usage":%b}' % (self._start, msgspec.json.encode(counts))] if self._usage else []), DONE]

    @staticmethod
    def failed(error: Exception) -> tuple[int, bytes]:
        """Write the last event of a stream that fails, and the status that a whole answer would have."""
        return openai_error(error)

    def release(self) -> None:
        """Do nothing, as nothing of the answer is counted."""

    def _event(self, index: int, own: Json, piece: Piece | None = None, reason: str | None = None) -> bytes:
        choice = msgspec.json.encode(self._choice(index, own, piece, reason))
        if self._chat and piece is not None and "prompt_ids" in piece:
            return b"%b[%b],%b" % (self._start_of_others, choice, msgspec.json.encode(self._prompt_ids(piece))[1:])
        return b"%b[%b]}" % (self._start_of_others, choice)

    def _choice(self, index: int, own: Json, piece: Piece | None, reason: str | None) -> Json:
        """Write a choice with its `own` field, and what there is of a piece besides its text."""
        write, logprobs = chat_logprobs if self._chat else completion_logprobs, None
        if self._logprobs and piece is not None:
            logprobs = write(piece["tokens"], self._tokenizer)
        rows = NO_FIELDS if piece is None else row_fields(piece)
        ids: Json = {}
        if piece is not None and "token_ids" in piece:
            ids = {"token_ids": piece["token_ids"]} | (NO_FIELDS if self._chat else self._prompt_ids(piece))
        return {"index": index, **own, "logprobs": logprobs, "finish_reason": reason, **rows, **ids}


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
