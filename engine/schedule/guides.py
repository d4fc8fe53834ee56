"""Compiles guides, and tells which tokens may come next: guided decoding, with the library llguidance.

A client chooses the guide, so its costs are limited. llguidance counts the work of compiling and of every mask, and ends a
guide that needs more with an error (`LIMITS`); these limits do not depend on how fast the machine is.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, SamplingError
from kvseek.core.guide import Guide, GuideType
from kvseek.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Of llguidance.LLParserLimits; what takes how long was measured on one core of an Intel Xeon.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,  # compiling: 0.5 s
    "max_grammar_size": 100_000,
    "step_lexer_fuel": 100_000,  # one mask: some 30 ms
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # memory of a request: 1 to 2 kB each
    "verbose_errors": False,
}
# JSON as it is usually written: spaces and new lines between its parts, but not without end, as some models would go on.
JSON_OPTIONS: dict[str, Any] = {
    "lenient": False,  # a keyword of the schema that is not supported is an error
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}",
}
MAX_REASON = 300  # characters of the library's message, in which parts of the guide may stand


class GuideMatcher:
    """The state of one request's guide: which tokens may come next, and whether the text may end.

    Parameters
    ----------
    matcher : LLMatcher
        The compiled guide, at its beginning.
    vocab_size : int
        Length of the logits.
    end_tokens : list of int
        Tokens that end a text for the library.

    Raises
    ------
    SamplingError
        By any method, if the guide needs more work than LIMITS allow, or no text follows it.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_tokens: list[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._end_tokens = [token for token in end_tokens if token < vocab_size]

    @property
    def complete(self) -> bool:
        """Whether the text so far follows the whole guide."""
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether the text is complete and no token may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> Tensor:
        """Find the tokens that may go on with the text; bool [vocabulary], a new tensor. End tokens of the model never do."""
        bits = self._matcher.compute_bitmask()
        self._check()
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size, bitorder="little")
        mask[self._end_tokens] = 0
        return torch.from_numpy(mask.view(np.bool_))

    def accept(self, token: int) -> None:
        """Add a token to the text."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SamplingError(refusal(self._matcher.get_error()))


class Guides:
    """Compiles guides for one engine. Thread-safe; nothing of the library is loaded before it is needed."""

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self._tokenizer, self._model = tokenizer, config.model
        self._lock = threading.Lock()
        self._loaded: LLTokenizer | None = None

    def matcher(self, guide: Guide) -> GuideMatcher:
        """Compile a guide, which may take a second; raises RequestError if it is none, or needs more work than LIMITS allow."""
        tokenizer = self.load_vocabulary()
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = _grammar(guide)
        except (ValueError, RecursionError) as error:
            raise RequestError(refusal(str(error))) from None
        matcher = LLMatcher(tokenizer, text, limits=LLParserLimits(**LIMITS), log_level=0)
        if matcher.is_error():
            raise RequestError(refusal(matcher.get_error()))
        made = GuideMatcher(matcher, self._model.vocab_size, tokenizer.eos_tokens)
        made.allowed()  # a guide that is too much for its first token is refused now
        return made

    def load_vocabulary(self) -> LLTokenizer:
        """Load the vocabulary of the model's tokenizer as the library needs it, once: takes a second, and other threads wait.

        Raises RequestError if the library is not installed, or cannot use the tokenizer.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                "guided_decoding_guide: guided decoding needs the library llguidance, which is not installed here; "
                "run: pip install 'kvseek[guided]' and start again, or leave the field out"
            ) from None
        if not self._tokenizer.file.is_file():
            raise RequestError(
                f"guided_decoding_guide: the engine has no {self._tokenizer.file.name}, which guided decoding needs; build it "
                "with a tokenizer of the tokenizers library, or leave the field out"
            )
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(self._tokenizer.file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        size = max(self._model.vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        # The library wants an end token, but whether a request may end is decided by its own ones: see Sampler.
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(self._model.eos_token_ids) or None)
        except ValueError as error:
            raise RequestError(
                f"guided_decoding_guide: the library llguidance cannot use the model's tokenizer ({error}); leave the field out"
            ) from None


def refusal(reason: str) -> str:
    """Make the message for a guide with which no text can be generated."""
    shown = " ".join(reason.split())
    shown = shown if len(shown) <= MAX_REASON else f"{shown[:MAX_REASON]}…"
    return f"guided_decoding_guide: cannot be followed: {shown}; correct or simplify it"


def _grammar(guide: Guide) -> str:
    """Write a guide as the library's own grammar; raises ValueError, RecursionError."""
    from llguidance import LLMatcher, grammar_from

    if guide.type is GuideType.REGEX:
        return LLMatcher.grammar_from_regex(guide.guide)
    if guide.type is GuideType.EBNF_GRAMMAR:
        return grammar_from("gbnf", guide.guide)
    return LLMatcher.grammar_from_json_schema(guide.guide or "{}", None, JSON_OPTIONS)  # type: ignore[arg-type]
