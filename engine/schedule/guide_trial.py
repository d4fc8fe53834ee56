"""Tries guides in a process of its own before the engine compiles them.

llguidance's limits leave out some of its work: it takes `{"type": "integer", "multipleOf": 2147483648}` for minutes, and
ends its process on some schemas. Here such a guide costs a process that nobody else needs.
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

from kvseek.core.errors import RequestError, UnavailableError
from kvseek.core.guide import Guide, GuideType

from .guide_library import compile_guide, load_vocabulary, refusal

TRIAL_SECONDS = 5.0  # of processor time: ten times what LIMITS allow on a fast core
TRIAL_BYTES = 2 << 30  # of address space, beside what the process has with the vocabulary
NICE = 10  # the engine's threads go first
logger = logging.getLogger(__name__)


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
