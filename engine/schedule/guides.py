"""Guided decoding: compiles guides, and tells which tokens may come next."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvseek.core.config import EngineConfig
from kvseek.core.errors import SamplingError
from kvseek.core.guide import Guide
from kvseek.engine.schedule.guide_compiler import GuideTrial
from kvseek.engine.tokenizer import Tokenizer

from .guide_compiler import compile_guide, load_vocabulary, refusal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_GUIDES = 16


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

    def allowed(self) -> npt.NDArray[np.uint32]:
        """Find the tokens that may go on with the text, as new bits [vocabulary / 32, rounded up]. The model's ends never do."""
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        bits = np.zeros(-(-self._vocab_size // 32), np.uint32)
        bits[: found.size] = found[: bits.size]
        for token in self._end_tokens:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
        return bits

    def accept(self, token: int) -> None:
        """Add a token to the text."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SamplingError(refusal(self._matcher.get_error()))


class Guides:
    """Compiles guides for one engine. Thread-safe; what guides need is loaded for the first one.

    The latest are kept, as an agent sends the same tools with every turn.
    """

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self._vocab_size = config.model.vocab_size
        self._source = tokenizer.file, config.model.vocab_size, config.model.eos_token_ids
        self._trial = GuideTrial(*self._source)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()  # at their beginnings

    def matcher(self, guide: Guide) -> GuideMatcher:
        """Compile a guide, which may take seconds.

        Raises RequestError if it is none, or needs too much work, and as `load_vocabulary`; UnavailableError without a trial.
        """
        vocabulary = self.load_vocabulary()
        with self._lock:
            compiled = self._compiled.pop(guide, None)
        if compiled is None:
            self._trial.check(guide)
            compiled = compile_guide(vocabulary, guide)
        with self._lock:
            self._compiled[guide] = compiled
            if len(self._compiled) > KEPT_GUIDES:
                self._compiled.popitem(last=False)
            return GuideMatcher(compiled.deep_copy(), self._vocab_size, vocabulary.eos_tokens)

    def load_vocabulary(self) -> LLTokenizer:
        """Load the vocabulary, once; takes and raises as guide_compiler.load_vocabulary."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = load_vocabulary(*self._source)
            return self._vocabulary
