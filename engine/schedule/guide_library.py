"""llguidance: the vocabulary that it needs, and its compiling of guides. Imports no PyTorch, for guide_trial.py's process.

A client chooses the guide, so its costs are limited. llguidance counts most of the work of compiling and all of a mask, and
ends a guide that needs more with an error (`LIMITS`); these limits do not depend on how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvseek.core.errors import RequestError
from kvseek.core.guide import Guide, GuideType

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


def load_vocabulary(tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Load the vocabulary of a tokenizer.json as the library needs it: takes a second, in which other threads wait.

    Raises RequestError if the library is not installed, or cannot use the tokenizer.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise RequestError(
            "guided_decoding_guide: guided decoding needs the library llguidance, which is not installed here; "
            "run: pip install 'kvseek[guided]' and start again, or leave the field out"
        ) from None
    if not tokenizer_file.is_file():
        raise RequestError(
            f"guided_decoding_guide: the engine has no {tokenizer_file.name}, which guided decoding needs; build it "
            "with a tokenizer of the tokenizers library, or leave the field out"
        )
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    # The library wants an end token, but whether a request may end is decided by its own ones: see Sampler.
    try:
        return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(eos_token_ids) or None)
    except ValueError as error:
        raise RequestError(
            f"guided_decoding_guide: the library llguidance cannot use the model's tokenizer ({error}); leave the field out"
        ) from None


def compile_guide(vocabulary: LLTokenizer, guide: Guide) -> LLMatcher:
    """Compile a guide and compute its first mask; raises RequestError if it is none, or needs more work than LIMITS allow."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        text = _grammar(guide)
    except (ValueError, RecursionError) as error:
        raise RequestError(refusal(str(error))) from None
    matcher = LLMatcher(vocabulary, text, limits=LLParserLimits(**LIMITS), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # a guide that is too much for its first token is refused now
    if matcher.is_error():
        raise RequestError(refusal(matcher.get_error()))
    return matcher


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
