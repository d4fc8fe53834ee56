"""Fuzzes one door of a real `kvseek serve`: whatever comes in, the server neither crashes nor hangs nor blames itself.

    python -m tests.server.fuzz.main --door http --seconds 600 --seed 1

Threads send mutated inputs, each from a random generator of its own. Between them, a request that is all right must get the
answer that it got before. Exit status 0 if no fault was found; else the inputs that led to it are in --folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from tests.server.fuzz.engine_socket import SocketFuzzer
from tests.server.fuzz.grpc_door import GrpcFuzzer
from tests.server.fuzz.http_door import HttpFuzzer, OpenAIFuzzer, RawFuzzer
from tests.server.fuzz.mutations import FaultError, Fuzzer
from tests.server.soak.calls import CallError, make_call
from tests.server.soak.engine import build_soak_engine
from tests.support.live_server import LiveServer, live_server

DOORS = ("grpc", "http", "openai", "raw", "engine-socket")
THREADS = 4
PROBE_EVERY = 25  # inputs of a thread
KEPT = 20  # latest inputs of each thread, for the reproduction
PROBE = {"text_input": "the harbour master wrote", "max_tokens": 6, "end_id": -1, "return_num_output_tokens": True}
QUIET_SECONDS = 30.0


def make_fuzzer(door: str, server: LiveServer) -> Callable[[], Fuzzer]:
    """What makes a fuzzer for one thread."""
    urls = (server.http_url, server.grpc_url, server.metrics_url, server.openai_url)
    makers: dict[str, Callable[[], Fuzzer]] = {
        "grpc": lambda: GrpcFuzzer(server.grpc_url),
        "http": lambda: HttpFuzzer(server.http_url),
        "openai": lambda: OpenAIFuzzer(server.openai_url),
        "raw": lambda: RawFuzzer(urls),
        "engine-socket": lambda: SocketFuzzer(server.engine_socket),
    }
    return makers[door]


class Campaign:
    """Some threads that fuzz one door until the time is over or one has found a fault."""

    def __init__(self, server: LiveServer, door: str, seconds: float, seed: int, inputs: int | None = None) -> None:
        self._server, self._door, self._seed = server, door, seed
        self._deadline, self._inputs = time.monotonic() + seconds, inputs
        self._make, self._before = make_fuzzer(door, server), server.process_ids()
        self._tracebacks, self._internal = server.tracebacks(), self._faults()
        self._expected = self._probe("grpc")
        self._kept = [deque[bytes](maxlen=KEPT) for _ in range(THREADS)]
        self._lock = threading.Lock()
        self.kinds: Counter[str] = Counter()
        self.fault = ""

    def run(self) -> str:
        """Fuzz; returns the fault, empty if there is none."""
        threads = [threading.Thread(target=self._fuzz, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.fault:
            self._guarded(self._after)
        return self.fault

    def save(self, folder: Path) -> None:
        """Write the latest inputs of each thread; the last is the one that was on its way."""
        for number, inputs in enumerate(self._kept):
            for at, data in enumerate(inputs):
                (folder / f"fuzz-{self._door}-{self._seed}-{number}-{at:02}.bin").write_bytes(data)

    def _fuzz(self, number: int) -> None:
        random, fuzzer, count = Random(f"{self._seed} {self._door} {number}"), self._make(), 0
        while time.monotonic() < self._deadline and not self.fault and (self._inputs is None or count < self._inputs):
            try:
                kind = fuzzer.shoot(random)
            except Exception as error:
                kind = "FAULT"
                self._report(f"thread {number}, input {count}: {type(error).__name__}: {error}")
            with self._lock:
                self.kinds[kind] += 1
                self._kept[number].append(fuzzer.last)
            count += 1
            if count % PROBE_EVERY == 0:
                self._guarded(self._check)

    def _guarded(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Exception as error:
            self._report(f"{type(error).__name__}: {error}")

    def _report(self, fault: str) -> None:
        with self._lock:
            self.fault = self.fault or fault

    def _check(self) -> None:
        """The same processes run, and a good request gets its answer by both doors."""
        now = self._server.process_ids()
        if now != self._before:
            raise FaultError(f"processes have ended: {self._before} before, {now} now")
        for route in ("grpc", "http_stream", "openai"):
            answer = self._probe(route)
            if answer != self._expected:
                raise FaultError(f"a good request gets {answer!r} by {route} instead of {self._expected!r}")

    def _faults(self) -> float:
        """Requests that ended as the server's own fault, so far."""
        return self._server.metric("kvseek:requests_total", 'outcome="internal"')

    def _probe(self, route: str) -> str:
        call = make_call(route, self._server.urls, "tensorrt_llm_bls", PROBE)
        try:
            call.send()
            return "".join(piece.text for piece in call.pieces())
        except CallError as error:
            raise FaultError(f"a good request fails by {route}: {error}") from None
        finally:
            call.close()

    def _after(self) -> None:
        """Nothing runs on, nothing was the server's own fault, and its log has no traceback."""
        self._check()
        deadline = time.monotonic() + QUIET_SECONDS
        while self._server.metric("kvseek:num_requests_running") or self._server.metric("kvseek:num_requests_waiting"):
            if time.monotonic() > deadline:
                raise FaultError(f"requests still run or wait {QUIET_SECONDS:g} s after their clients have left")
            time.sleep(0.1)
        internal = self._faults() - self._internal
        if internal:
            raise FaultError(f"{internal:g} requests ended as faults of the server")
        tracebacks = self._server.tracebacks() - self._tracebacks
        if tracebacks:
            raise FaultError(f"the server's log has tracebacks: {dict(tracebacks)}")


def fuzz(server: LiveServer, door: str, seconds: float, seed: int, folder: Path, inputs: int | None = None) -> str:
    """Fuzz one door of a server and print counts by kind of answer; returns the fault, empty if there is none."""
    before = server.footprints()
    campaign = Campaign(server, door, seconds, seed, inputs)
    fault = campaign.run()
    after = server.footprints()
    print(f"{door}: {sum(campaign.kinds.values())} inputs; resident memory in MB:")
    for name in before.keys() & after.keys():
        print(f"    {name:18} {before[name].resident / 1e6:6.1f} → {after[name].resident / 1e6:6.1f}")
    for kind, count in campaign.kinds.most_common():
        print(f"{count:8} {kind}")
    if fault:
        campaign.save(folder)
        print(f"FAULT: {fault}\nthe latest inputs are in {folder}")
    return fault


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description="Fuzz a door of a real server.")
    parser.add_argument("--door", choices=DOORS, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine_dir", type=Path, help="default: a tiny random one is built")
    parser.add_argument("--folder", type=Path, default=Path("."), help="for inputs that led to a fault, and the log")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvseek-fuzz-") as temporary:
        engine = arguments.engine_dir or build_soak_engine(Path(temporary), "full")
        log = arguments.folder / f"fuzz-{arguments.door}.log"
        log.unlink(missing_ok=True)
        with live_server(engine, log) as server:
            fault = fuzz(server, arguments.door, arguments.seconds, arguments.seed, arguments.folder)
    return int(bool(fault))


if __name__ == "__main__":
    sys.exit(main())
