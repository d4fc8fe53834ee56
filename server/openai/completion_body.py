"""The body of POST /v1/completions, and what it asks of the engine."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from kvseek.core.config import EngineConfig
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.http.json_fields import first_character

from .errors import FieldError
from .fields import ABSENT, BodyFormat, decode, is_absent
from .parameters import MAX_CHOICES, NEUTRAL, WITHOUT_EFFECT, Parameters, check_logprobs, require
from .prompts import Prompt, check_length, count_strings, text_ids

DEFAULT_TOKENS = 16  # OpenAI's
MAX_PROMPTS = MAX_CHOICES  # in one request
MAX_IDS = 1 << 21  # token ids of all prompts: an id takes up to 16 times as much memory as its JSON
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[int])
_many_ids = msgspec.json.Decoder(list[list[int]])


class CompletionBody(Parameters, kw_only=True):
    """Fields of a completion that have an effect."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: msgspec.Raw = ABSENT
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    def prompts(self, tokenizer: Tokenizer, config: EngineConfig) -> list[Prompt]:
        """Return every prompt; texts are tokenised, and token ids decoded for an echo."""
        found = read_prompts(self.prompt)
        count = len(found)
        require(0 < count <= MAX_PROMPTS, "prompt", f"{count} prompts", f"1 to {MAX_PROMPTS} prompts", "send as many")
        vocabulary = config.model.vocab_size
        prompts = []
        for prompt in found:
            if isinstance(prompt, str):
                ids = text_ids(prompt, self.add_special_tokens is not False, tokenizer, config)
                prompts.append(Prompt(ids, prompt if self.echo else None))
                continue
            check_length("prompt", prompt, config.max_input_len)
            bad = next((token for token in prompt if not 0 <= token < vocabulary), None)
            require(bad is None, "prompt", bad, f"token ids in [0, {vocabulary})", "the model has no such token")
            prompts.append(Prompt(prompt, tokenizer.decode_complete(prompt)[0] if self.echo else None))
        return prompts

    @property
    def limit_field(self) -> str | None:
        """See ChatBody."""
        return None if self.max_tokens is None else "max_tokens"

    def limit(self, prompt_tokens: int, config: EngineConfig) -> int:
        """Return the most tokens to generate."""
        left = config.max_seq_len - prompt_tokens
        return min(DEFAULT_TOKENS, left) if self.max_tokens is None else self.max_tokens

    def top(self) -> int | None:
        """Return how many likeliest tokens to tell besides every token's own log probability; None: tell none."""
        same = self.best_of is None or self.best_of == self.choices
        require(same, "best_of", self.best_of, f"n = {self.choices}", "kvseek returns all answers that it makes")
        return None if self.logprobs is None else check_logprobs("logprobs", self.logprobs)


def read_prompts(raw: msgspec.Raw) -> list[str] | list[list[int]]:
    """Decode the prompts: a text, texts, token ids, or lists of token ids."""
    if is_absent(raw):
        raise FieldError("prompt", "prompt is missing: must be a text or token ids; add it")
    if first_character(raw) != "[":
        return [str(decode("prompt", _text, raw))]
    if re.match(rb'\[\s*"', memoryview(raw)):
        few = count_strings(raw, MAX_PROMPTS) <= MAX_PROMPTS
        require(few, "prompt", "more", f"<= {MAX_PROMPTS} texts", "send fewer")
        texts: list[str] = decode("prompt", _texts, raw)
        return texts
    lists = bytes(raw).count(b"[") - 1
    # Before they are built, as an empty list takes 20 times as much memory as its JSON.
    require(lists <= MAX_PROMPTS, "prompt", f"{lists} lists", f"<= {MAX_PROMPTS} lists of token ids", "send fewer")
    ids_at_most = bytes(raw).count(b",") + 1
    require(ids_at_most <= MAX_IDS, "prompt", f"{ids_at_most} token ids", f"<= {MAX_IDS}", "send several requests")
    if lists == 0:
        ids: list[int] = decode("prompt", _ids, raw)
        return [ids]
    many: list[list[int]] = decode("prompt", _many_ids, raw)
    return many


COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "suffix": ("",),
    "prompt_embeds": (),
}
COMPLETION_FORMAT = BodyFormat(CompletionBody, "prompt", COMPLETION_NEUTRAL, WITHOUT_EFFECT)
