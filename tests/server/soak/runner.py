"""Runs the jobs of the soak test against a server, and judges how each ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.server.soak.calls import CallError, Piece, make_call
from tests.server.soak.jobs import Case, Fate, Job

REQUEST_SECONDS = 600.0  # from a request's first attempt to its end
AFTER_KILL_SECONDS = 5.0  # after the server was ready again, in which errors may still be of the kill
FULL = re.compile(r"max_queue_size")
# What a client hears when a process has died under its request, or is not there yet. One line a place where it is said.
ENDED = re.compile(
    r"the engine process ended while the request was with it"
    r"|the engine is not running"
    r"|Triton ended while the request was with it"
    r"|Triton does not run"
    r"|the server is starting|the server is shutting down"
    r"|no server answers|the connection broke|broke off its answer|the server has ended or is being restarted"
    r"|StatusCode.UNAVAILABLE"
)
TIMED_OUT = re.compile(r"timeout")
ROOT = Path(__file__).parents[3]
VICTIM = "tests.server.soak.victim"


@dataclass
class Kills:
    """When processes of the server were killed, each with when the server was ready again; 0 until it is.

    `failure` says why there was no kill, or no process in place of the killed one; from then on no error is excused by it.
    """

    times: list[list[float]] = field(default_factory=list)
    failure: str = ""

    def covers(self, began: float) -> bool:
        """Whether a request that began then and ends now may have met one."""
        return not self.failure and any(not ready or began < ready + AFTER_KILL_SECONDS for _, ready in self.times)


@dataclass
class Outcome:
    """How one job ended."""

    job: Job
    verdict: str  # a word for the table; "WRONG" if it is not what it should be
    detail: str = ""
    refusals: int = 0  # attempts that met a full queue
    interruptions: int = 0  # attempts that the kill ended
    seconds: float = 0.0


class WrongError(Exception):
    """What the server did is not what it should do."""


@dataclass
class Runner:
    """Sends jobs from threads; `kills` say what may have gone wrong for which reason."""

    urls: dict[str, str]
    kills: Kills = field(default_factory=Kills)
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, jobs: Sequence[Job], clients: int) -> list[Outcome]:
        """Run all jobs, `clients` at a time, and return their outcomes in order."""
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(self._run, jobs))

    def _run(self, job: Job) -> Outcome:
        outcome, began = Outcome(job, ""), time.monotonic()
        try:
            outcome.verdict = self._until_done(job, outcome, began)
        except (CallError, WrongError) as error:
            outcome.verdict, outcome.detail = "WRONG", f"{type(error).__name__}: {error}"
        except Exception as error:  # of this program: no other job may be lost for it
            outcome.verdict, outcome.detail = "WRONG", f"{type(error).__name__}: {error!r}"
        outcome.seconds = time.monotonic() - began
        with self.lock:
            self.done += 1
        return outcome

    def _until_done(self, job: Job, outcome: Outcome, began: float) -> str:
        """Repeat a job while the queue is full or the server is being restarted; returns the verdict."""
        pause, attempt_began = 0.05, began
        while True:
            try:
                return _ACTIONS[job.fate](job, self.urls)
            except CallError as error:
                if FULL.search(str(error)) and error.status in (0, 200, 429):
                    outcome.refusals += 1
                elif ENDED.search(str(error)) and self.kills.covers(attempt_began):
                    outcome.interruptions += 1
                else:
                    raise
            if time.monotonic() - began > REQUEST_SECONDS:
                raise WrongError(f"not served for {REQUEST_SECONDS:g} s")
            time.sleep(pause)
            pause, attempt_began = min(1.0, 1.5 * pause), time.monotonic()


def _read(job: Job, urls: dict[str, str]) -> str:
    pieces = _pieces(job, urls)
    case = _case(job)
    if pieces[-1].reason != "length":
        raise WrongError(f"finish_reason {pieces[-1].reason!r} instead of 'length'")
    _compare(case, pieces, case.max_tokens)
    return "served"


def _expire(job: Job, urls: dict[str, str]) -> str:
    """A time limit that may pass while the request waits (an error), while it runs (what it has), or not at all."""
    case = _case(job)
    try:
        pieces = _pieces(job, urls)
    except CallError as error:
        if TIMED_OUT.search(str(error)) and error.status in (0, 504):
            return "expired"
        raise
    if pieces[-1].reason not in ("timeout", "length"):
        raise WrongError(f"finish_reason {pieces[-1].reason!r} with a time limit")
    _compare(case, pieces, pieces[-1].count)
    return "expired" if pieces[-1].reason == "timeout" else "served"


def _cancel(job: Job, urls: dict[str, str]) -> str:
    call, pieces = make_call(job.route, urls, job.model, job.fields), list[Piece]()
    try:
        call.send()
        if not job.after:
            time.sleep(job.pause)
            return "cancelled"
        for piece in call.pieces():
            pieces.append(piece)
            if piece.count >= job.after:
                break
    finally:
        call.close()
    _compare(_case(job), pieces, pieces[-1].count)
    return "cancelled"


def _kill(job: Job, urls: dict[str, str]) -> str:
    """Have another process read the stream, and kill it after some tokens."""
    wanted = {"route": job.route, "urls": urls, "model": job.model, "fields": job.fields}
    pieces: list[Piece] = []
    command = [sys.executable, "-m", VICTIM, json.dumps(wanted)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stderr is not None
        watchdog = threading.Timer(REQUEST_SECONDS, client.kill)
        watchdog.start()
        for line in client.stdout:
            count, text, ids = json.loads(line)
            pieces.append(Piece(text, tuple(ids), count))
            if count >= job.after:
                break
        client.kill()
        watchdog.cancel()
        errors = client.stderr.read()
    if not pieces or pieces[-1].count < job.after:
        raise CallError(errors.strip().rpartition("\n")[2] or "the client got no token")
    _compare(_case(job), pieces, pieces[-1].count)
    return "client killed"


def _malformed(job: Job, urls: dict[str, str]) -> str:
    try:
        pieces = _pieces(job, urls)
    except CallError as error:
        if FULL.search(str(error)) or ENDED.search(str(error)):
            raise
        if not re.search(job.names, str(error)):
            raise WrongError(f"the refusal does not name {job.names}: {error}") from None
        if error.status not in (0, 400, 413):
            raise WrongError(f"HTTP status {error.status} for a malformed request: {error}") from None
        return "refused"
    raise WrongError(f"a malformed request ({job.names}) was served: {pieces[-1]}")


_ACTIONS = {
    Fate.READ: _read,
    Fate.EXPIRE: _expire,
    Fate.CANCEL: _cancel,
    Fate.KILL: _kill,
    Fate.MALFORMED: _malformed,
}


def _pieces(job: Job, urls: dict[str, str]) -> list[Piece]:
    call = make_call(job.route, urls, job.model, job.fields)
    try:
        call.send()
        pieces = list(call.pieces())
    finally:
        call.close()
    if not pieces:
        raise CallError("the connection broke: the answer has no piece")
    return pieces


def _case(job: Job) -> Case:
    assert job.case is not None
    return job.case


def _compare(case: Case, pieces: Sequence[Piece], count: int) -> None:
    """Raise WrongError unless `pieces` are the first `count` tokens that the request gets alone."""
    ids = tuple(token for piece in pieces for token in piece.ids)
    text = "".join(piece.text for piece in pieces)
    if pieces[-1].count != count or count > len(case.tokens):
        raise WrongError(f"{pieces[-1].count} tokens instead of {count} (case {case.number})")
    if case.model == "tensorrt_llm":
        if ids != case.tokens[:count]:
            at = next(i for i, (own, other) in enumerate(zip(ids, case.tokens, strict=False)) if own != other)
            raise WrongError(f"other tokens from number {at} of {count} (case {case.number})")
        return
    expected, whole = case.texts[count], count == len(case.tokens)
    # What ends early may flush bytes of an unfinished character.
    if text != expected and (whole or not pieces[-1].reason or not text.startswith(expected)):
        raise WrongError(f"another text after {count} tokens (case {case.number}): {text!r} instead of {expected!r}")
