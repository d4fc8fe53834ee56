"""The body of POST /v1/chat/completions, and what it asks of the engine."""

from __future__ import annotations

from typing import Any

import msgspec

from kvseek.core.config import EngineConfig
from kvseek.engine.tokenizer import Tokenizer

from .fields import ABSENT, BodyFormat
from .parameters import NEUTRAL, WITHOUT_EFFECT, Parameters, check_logprobs, require
from .prompts import Prompt, chat_ids, message_texts, read_messages

MAX_DEFAULT_TOKENS = (
    4096  # of an answer without max_tokens: a request reserves memory for all tokens that it may generate
)


class ChatBody(Parameters, kw_only=True):
    """Fields of a chat completion that have an effect."""

    messages: msgspec.Raw = ABSENT
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def prompts(self, tokenizer: Tokenizer, config: EngineConfig) -> list[Prompt]:
        """Tokenise the conversation: one prompt, which the answer never repeats."""
        return [Prompt(chat_ids(message_texts(read_messages(self.messages)), tokenizer, config))]

    def limit(self, prompt_tokens: int, config: EngineConfig) -> int:
        """Return the most tokens to generate: what is left of max_seq_len, at most MAX_DEFAULT_TOKENS, unless the client says."""
        names = [name for name in ("max_completion_tokens", "max_tokens") if getattr(self, name) is not None]
        if not names:
            return min(config.max_seq_len - prompt_tokens, MAX_DEFAULT_TOKENS)
        values = [int(getattr(self, name)) for name in names]
        same = len(set(values)) == 1
        require(same, names[0], values[0], f"max_tokens = {values[-1]}, its older name", "send one of them")
        return values[0]

    def top(self) -> int | None:
        """Return how many likeliest tokens to tell besides every token's own log probability; None: tell none."""
        if not self.logprobs:
            none = self.top_logprobs in (None, 0)
            require(none, "top_logprobs", self.top_logprobs, "absent unless logprobs is true", "set logprobs to true")
            return None
        return check_logprobs("top_logprobs", self.top_logprobs or 0)


CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools, auto is none
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "documents": ([],),
}
CHAT_FORMAT = BodyFormat(ChatBody, "messages", CHAT_NEUTRAL, (*WITHOUT_EFFECT, "parallel_tool_calls"))
