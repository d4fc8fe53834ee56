"""Log probabilities in the two forms of OpenAI's answers: of chats and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvseek.core.request import LogProbs
from kvseek.engine.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for the logarithm of 0, which JSON cannot write; OpenAI's number
Tokens = Sequence[tuple[int, LogProbs, int]]  # token id, its log probabilities, length of the text before it


def chat_logprobs(tokens: Tokens, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the log probabilities of a chat's tokens."""
    content = []
    for token, logprobs, _ in tokens:
        top = [_chat_token(each, value, tokenizer) for each, value in logprobs.top]
        content.append(_chat_token(token, logprobs.token, tokenizer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Tokens, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the log probabilities of a completion's tokens. The token itself is always among the likeliest, as with OpenAI."""
    top = []
    for token, logprobs, _ in tokens:
        likeliest: dict[str, float] = {}
        for each, value in (*logprobs.top, (token, logprobs.token)):
            likeliest.setdefault(token_text(each, tokenizer), max(value, LOWEST))
        top.append(likeliest)
    return {
        "tokens": [token_text(token, tokenizer) for token, _, _ in tokens],
        "token_logprobs": [max(logprobs.token, LOWEST) for _, logprobs, _ in tokens],
        "top_logprobs": top,
        "text_offset": [offset for _, _, offset in tokens],
    }


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
