"""Log probabilities in the two forms of OpenAI's answers: of chats and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvseek.core.request import LogProbs
from kvseek.engine.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for the logarithm of 0, which JSON cannot write; OpenAI's number
# Token id, its log probabilities, length of the text before it. The first token of an echoed prompt has no log probabilities.
Tokens = Sequence[tuple[int, LogProbs | None, int]]


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
