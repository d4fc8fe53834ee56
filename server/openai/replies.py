"""JSON of the answers of both endpoints, whole and in pieces, with log probabilities in the two forms that OpenAI has."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from kvseek.core.request import LogProbs
from kvseek.engine.tokenizer import Tokenizer

Json = dict[str, Any]
Piece = dict[str, Any]  # see Choice
LOWEST = -9999.0  # stands for the logarithm of 0, which JSON cannot write; OpenAI's number
# Token id, its log probabilities, length of the text before it. The first token of an echoed prompt has no log probabilities.
Tokens = Sequence[tuple[int, LogProbs | None, int]]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """Write the numbers of tokens; `cached_tokens` are those of the prompts that were not read."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Reply(ABC):
    """Writes one answer.

    Parameters
    ----------
    usage_in_stream : bool
        Whether a stream ends with the numbers of tokens; then all other events have `usage` null.
    """

    PREFIX: str  # of ids
    KIND: str  # `object` of a whole answer
    EVENT_KIND: str  # `object` of an event

    def __init__(
        self, model: str, fingerprint: str, tokenizer: Tokenizer, logprobs: bool, usage_in_stream: bool
    ) -> None:
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._whole: Json = {
            "id": self.id,
            "object": self.KIND,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._event: Json = self._whole | {"object": self.EVENT_KIND} | ({"usage": None} if usage_in_stream else {})

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], counts: Json) -> Json:
        """Write a complete answer, of one piece for each choice."""

    @abstractmethod
    def begin(self, choices: int) -> Iterator[Json]:
        """Write the events with which a stream begins."""

    @abstractmethod
    def pieces(self, index: int, piece: Piece) -> Iterator[Json]:
        """Write the events of a piece of a choice."""

    def end(self, counts: Json) -> Json:
        """Write the event with the numbers of tokens."""
        return self._event | {"choices": [], "usage": counts}


class ChatReply(Reply):
    """Answers of /v1/chat/completions; see Reply."""

    PREFIX, KIND, EVENT_KIND = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, pieces: Sequence[Piece], counts: Json) -> Json:
        """See Reply."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": piece["text"], "refusal": None},
                "logprobs": self._logprobs_of(piece),
                "finish_reason": piece["finish_reason"],
            }
            for index, piece in enumerate(pieces)
        ]
        return self._whole | {"choices": choices, "usage": counts}

    def begin(self, choices: int) -> Iterator[Json]:
        """See Reply."""
        for index in range(choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def pieces(self, index: int, piece: Piece) -> Iterator[Json]:
        """See Reply."""
        if piece["text"] or piece["tokens"]:
            yield self._chunk(index, {"content": piece["text"]}, self._logprobs_of(piece))
        if piece["finish_reason"] is not None:
            yield self._chunk(index, {}, None, piece["finish_reason"])

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return self._event | {
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        }

    def _logprobs_of(self, piece: Piece) -> Json | None:
        return chat_logprobs(piece["tokens"], self._tokenizer) if self._logprobs else None


class CompletionReply(Reply):
    """Answers of /v1/completions; see Reply."""

    PREFIX, KIND, EVENT_KIND = "cmpl", "text_completion", "text_completion"

    def whole(self, pieces: Sequence[Piece], counts: Json) -> Json:
        """See Reply."""
        return self._whole | {"choices": [self._choice(*each) for each in enumerate(pieces)], "usage": counts}

    def begin(self, choices: int) -> Iterator[Json]:
        """See Reply: the first event of a completion is its first piece."""
        return iter(())

    def pieces(self, index: int, piece: Piece) -> Iterator[Json]:
        """See Reply."""
        yield self._event | {"choices": [self._choice(index, piece)]}

    def _choice(self, index: int, piece: Piece) -> Json:
        logprobs = completion_logprobs(piece["tokens"], self._tokenizer) if self._logprobs else None
        return {"index": index, "text": piece["text"], "logprobs": logprobs, "finish_reason": piece["finish_reason"]}


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
