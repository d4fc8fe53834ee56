"""llguidance: the vocabulary that it needs, and its compiling of guides. Imports no PyTorch.

A client chooses the guide, so its costs are limited. llguidance counts most of the work of compiling and all of a mask, and
ends a guide that needs more with an error (`LIMITS`); these limits do not depend on how fast the machine is.

Its limits leave out some of its work: it takes `{"type": "integer", "multipleOf": 2147483648}` for minutes, and ends its
process on some schemas. So a process of its own, this module, tries each guide before the engine compiles it: there such a guide
costs a process that nobody else needs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvseek.core.errors import RequestError, UnavailableError, shortened
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

TRIAL_SECONDS = 5.0  # of processor time: ten times what LIMITS allow on a fast core
TRIAL_BYTES = 2 << 30  # of address space, beside what the process has with the vocabulary
NICE = 10  # the engine's threads go first
logger = logging.getLogger(__name__)


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
    shown = shortened(shown, MAX_REASON)
    return f"guided_decoding_guide: cannot be followed: {shown}; correct or simplify it"


def _grammar(guide: Guide) -> str:
    """Write a guide as the library's own grammar; raises ValueError, RecursionError."""
    from llguidance import LLMatcher, grammar_from

    if guide.type is GuideType.REGEX:
        return LLMatcher.grammar_from_regex(guide.guide)
    if guide.type is GuideType.LARK:
        return guide.guide
    if guide.type is GuideType.EBNF_GRAMMAR:
        return grammar_from("gbnf", guide.guide)
    return LLMatcher.grammar_from_json_schema(guide.guide or "{}", None, JSON_OPTIONS)  # type: ignore[arg-type]


class GuideTrial:
    """The process, seen from the engine's. Thread-safe; one guide is tried at a time.

    It is started by the first guide and again after a guide has ended it, and ends with the engine's process.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._arguments = json.dumps([str(tokenizer_file), vocab_size, list(eos_token_ids)])
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, guide: Guide) -> None:
        """Try a guide.

        Raises RequestError if it cannot be compiled, or takes more than TRIAL_SECONDS or TRIAL_BYTES, and UnavailableError if
        there can be no such process.
        """
        with self._lock:
            process = self._running()
            answer = _ask(process, json.dumps([guide.type, guide.guide]).encode() + b"\n")
            if not answer:
                self._end()
        if not answer:
            logger.warning("a guide has ended the process that tries guides, with status %d", process.returncode)
            limits = f"{TRIAL_SECONDS:g} s of processor time or {TRIAL_BYTES >> 30} GiB of memory"
            raise RequestError(refusal(f"compiling it takes more than {limits}"))
        error = json.loads(answer)
        if error:
            raise RequestError(error)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:  # ended by something else
            self._end()
        if self._process is None:
            command = [sys.executable, "-m", __name__, self._arguments]
            process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._end_process = weakref.finalize(self, _end, process, os.getpid())
            if not _ask(process, b""):
                self._end()
                raise UnavailableError(
                    f"guided_decoding_guide: the process that tries guides has ended with status {process.returncode}; "
                    "the server's log says why"
                )
        return self._process

    def _end(self) -> None:
        self._end_process()
        self._process = None


def _ask(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Send a line and return the answer; empty if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
    return process.stdout.readline()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process, if it has not ended, and close the pipes to it. Does nothing in a fork of its owner, whose it still is."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def main() -> None:
    """Answer each guide on standard input with its error, or an empty text, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, whose end closes the input
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer_file, vocab_size, eos_token_ids = json.loads(sys.argv[1])
    vocabulary = load_vocabulary(Path(tokenizer_file), vocab_size, eos_token_ids)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + TRIAL_BYTES, resource.RLIM_INFINITY))
    _answer("ready")
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        # SIGPROF ends the process, wherever it is, after so much processor time.
        signal.setitimer(signal.ITIMER_PROF, TRIAL_SECONDS)
        error = _error_of(vocabulary, Guide(GuideType(kind), text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(error)


def _error_of(vocabulary: object, guide: Guide) -> str:
    try:
        compile_guide(vocabulary, guide)  # type: ignore[arg-type]
    except RequestError as error:
        return str(error)
    return ""


def _answer(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
