"""The body of POST /v1/chat/completions, and what it asks of the engine."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from kvseek.core.config import EngineConfig
from kvseek.engine.tokenizer import Tokenizer

from .errors import FieldError
from .fields import ABSENT, BodyFormat, decode, is_absent
from .parameters import NEUTRAL, WITHOUT_EFFECT, Parameters, check_logprobs, require
from .prompts import Prompt, chat_ids, message_texts, read_messages

MAX_DEFAULT_TOKENS = (
    4096  # of an answer without max_tokens: a request reserves memory for all tokens that it may generate
)


MAX_TEMPLATE_BYTES = 1 << 14  # of JSON, of the template's variables: a value takes up to 60 times as much memory
_variables = msgspec.json.Decoder(dict[str, Any])


class ChatBody(Parameters, kw_only=True):
    """Fields of a chat completion that have an effect."""

    prompt_field: ClassVar[str] = "messages"
    messages: msgspec.Raw = ABSENT
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT

    def prompts(self, tokenizer: Tokenizer, config: EngineConfig) -> list[Prompt]:
        """Tokenise the conversation: one prompt, which the answer never repeats."""
        template = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": bool(self.continue_final_message),
            "chat_template_kwargs": self._variables(),
        }
        messages = message_texts(read_messages(self.messages))
        return [Prompt(chat_ids(messages, tokenizer, config, template, bool(self.add_special_tokens)))]

    def _variables(self) -> dict[str, Any]:
        raw, name = self.chat_template_kwargs, "chat_template_kwargs"
        if is_absent(raw):
            return {}
        size = memoryview(raw).nbytes
        if size > MAX_TEMPLATE_BYTES:
            raise FieldError(name, f"{name} has {size} bytes of JSON: must be <= {MAX_TEMPLATE_BYTES}; send less")
        found: dict[str, Any] = decode(name, _variables, raw)
        return found

    @property
    def limit_field(self) -> str | None:
        """Name of the field that says how many tokens to generate at most; None: the client says nothing."""
        return next((name for name in ("max_completion_tokens", "max_tokens") if getattr(self, name) is not None), None)

    def limit(self, prompt_tokens: int, config: EngineConfig) -> int:
        """Return the most tokens to generate: what is left of max_seq_len, at most MAX_DEFAULT_TOKENS, unless the client says."""
        name = self.limit_field
        if name is None:
            return min(config.max_seq_len - prompt_tokens, MAX_DEFAULT_TOKENS)
        value, older = int(getattr(self, name)), self.max_tokens
        same = older in (None, value)
        require(same, name, value, f"max_tokens = {older}, its older name", "send one of them")
        return value

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
    "chat_template": (),
    "echo": (False,),
    "documents": ([],),
}
CHAT_FORMAT = BodyFormat(ChatBody, "messages", CHAT_NEUTRAL, (*WITHOUT_EFFECT, "parallel_tool_calls"))
