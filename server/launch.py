"""Runs a tritonserver over an engine directory: `kvseek serve`, the demo and the tests."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from kvseek.engine.config import EngineConfig
from kvseek.engine.errors import KvseekError
from kvseek.engine.manifest import verify

from .errors import ServerError
from .ports import Ports
from .triton import TritonServer, find_server

READY_SECONDS = 180.0
SHUTDOWN_SECONDS = 20.0
LOG_LINES = 30
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHARED_MEMORY = Path("/dev/shm")
MODELS = ("tensorrt_llm", "tensorrt_llm_bls")
STANDARD_OUTPUT = Path("-")  # as a log: where a container's log belongs


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready, and where."""

    host: str
    ports: Ports
    process: subprocess.Popen[bytes]

    @property
    def grpc_url(self) -> str:
        """host:port for tritonclient.grpc."""
        return f"{self.host}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        """host:port for HTTP."""
        return f"{self.host}:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        """host:port of the Prometheus metrics."""
        return f"{self.host}:{self.ports.metrics}"


@contextmanager
def running_server(
    engine_dir: Path,
    host: str = "127.0.0.1",
    ports: Ports = Ports(0, 0, 0),  # noqa: B008  frozen
    threads: int | None = None,
    log: Path | None = None,
    verbose: bool = False,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[RunningServer]:
    """Start a server, wait until it is ready, and end it with the context.

    Parameters
    ----------
    threads : int, optional
        CPU threads of the engine; None leaves torch's choice.
    log : Path, optional
        File for the server's output, "-" for standard output; None keeps it for the error message of a failed start only.
    ready_seconds : float
        How long loading the engine may take.

    Raises
    ------
    EngineDirectoryError, ConfigError
        If the engine directory cannot be served.
    ServerError
        If there is no server, a port is busy, or the server ends or does not become ready in time.
    """
    if not ready_seconds > 0:
        raise ServerError(f"--ready_seconds = {ready_seconds}: must be > 0; {READY_SECONDS:.0f} is the default")
    verify(engine_dir)
    config = EngineConfig.load(engine_dir)
    ports = ports.resolve(host)
    with tempfile.TemporaryDirectory(prefix="kvseek-") as folder:
        scratch = Path(folder)
        server = find_server(scratch)
        repository = _write_repository(scratch / "models", engine_dir, config, threads)
        output = None if log == STANDARD_OUTPUT else log or scratch / "server.log"
        process = _start(server, repository, host, ports, output, verbose)
        try:
            running = RunningServer(host, ports, process)
            _wait_until_ready(running, output, ready_seconds)
            yield running
        finally:
            _stop(process)
            _free_shared_memory(repository)


def _write_repository(target: Path, engine_dir: Path, config: EngineConfig, threads: int | None) -> Path:
    """Copy the model repository and point it at the engine."""
    with as_file(files("kvseek.model_repository")) as source:
        for model in MODELS:
            shutil.copytree(source / model, target / model, ignore=shutil.ignore_patterns("__pycache__"))
    replacements = {
        "${engine_dir}": str(engine_dir.resolve()),
        "${threads}": str(threads or 0),
        "${max_batch_size}": str(config.max_batch_size),
    }
    for model in MODELS:
        path = target / model / "config.pbtxt"
        text = path.read_text(encoding="utf-8")
        for name, value in replacements.items():
            text = text.replace(name, value)
        path.write_text(text, encoding="utf-8")
    return target


def _start(
    server: TritonServer, repository: Path, host: str, ports: Ports, output: Path | None, verbose: bool
) -> subprocess.Popen[bytes]:
    command = [
        str(server.binary),
        f"--model-repository={repository}",
        f"--backend-directory={server.backends}",
        f"--http-address={host}",
        f"--grpc-address={host}",
        f"--metrics-address={host}",
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        "--exit-timeout-secs=10",
        f"--log-verbose={int(verbose)}",
        f"--backend-config=python,shm-region-prefix-name={_memory_prefix(repository)}",
    ]
    with contextlib.nullcontext() if output is None else output.open("wb") as file:  # None: this process's own
        return subprocess.Popen(
            command,
            env=server.environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
            start_new_session=True,  # Ctrl-C in a terminal ends the launcher, which ends the server in order
        )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(server: RunningServer, log: Path | None, seconds: float) -> None:
    import tritonclient.grpc as grpc

    deadline = time.monotonic() + seconds
    with grpc.InferenceServerClient(server.grpc_url) as client:
        while server.process.poll() is None:
            try:
                if client.is_server_ready() and all(client.is_model_ready(model) for model in MODELS):
                    return
            except grpc.InferenceServerException:
                pass  # not listening yet
            if time.monotonic() > deadline:
                raise ServerError(
                    f"tritonserver is not ready after {seconds:g} s, see --ready_seconds; its log {_ending(log)}"
                )
            time.sleep(0.1)
    raise ServerError(f"tritonserver ended with status {server.process.returncode}; its log {_ending(log)}")


def _model_processes(server: subprocess.Popen[bytes]) -> dict[str, Path]:
    """/proc folder of the process that runs each model: when one crashes, Triton goes on to call the model ready."""
    found: dict[str, Path] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if _status(folder)[1] == str(server.pid):
                command = (folder / "cmdline").read_text(errors="replace")
                found |= {model: folder for model in MODELS if f"/models/{model}/" in command}
    return found


def _ended(process: Path) -> bool:
    try:
        return _status(process)[0] in "ZX"  # proc_pid_stat(5): a zombie, or dead
    except OSError:
        return True


def _status(process: Path) -> list[str]:
    """State, parent and what follows them in /proc/PID/stat."""
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _memory_prefix(repository: Path) -> str:
    """Name of this server's shared memory; its scratch folder's name is unique."""
    return f"{repository.parent.name}-"


def _free_shared_memory(repository: Path) -> None:
    """Remove what a server that had to be killed left behind: it would take up memory until the machine restarts."""
    for region in SHARED_MEMORY.glob(f"{_memory_prefix(repository)}*"):
        region.unlink(missing_ok=True)


def _ending(log: Path | None) -> str:
    if log is None:
        return "is above"
    return "ends:\n" + "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):  # a model's process that the server gave up waiting for
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM that arrive from now on.

    A handler that raised would be late for a call that waits for a process and had just begun, and could leave
    Popen's lock taken.
    """
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of `kvseek serve`."""
    parser = argparse.ArgumentParser(prog="kvseek serve", description="Serve an engine directory with Triton.")
    parser.add_argument("--engine_dir", type=Path, required=True, help="what kvseek build wrote")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--http_port", type=int, default=8000, help="default: %(default)s; 0 picks a free port")
    parser.add_argument("--grpc_port", type=int, default=8001, help="default: %(default)s; 0 picks a free port")
    parser.add_argument("--metrics_port", type=int, default=8002, help="default: %(default)s; 0 picks a free port")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine (default: torch's choice)")
    parser.add_argument(
        "--log", type=Path, help="file for the server's log, - for standard output (default: none is kept)"
    )
    parser.add_argument(
        "--ready_seconds", type=float, default=READY_SECONDS, help="how long loading may take (default: %(default)g)"
    )
    parser.add_argument("--log_verbose", action="store_true", help="have Triton log every request")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """`kvseek serve`: run until SIGINT or SIGTERM, or until the server ends."""
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ports = Ports(arguments.http_port, arguments.grpc_port, arguments.metrics_port)
    options = {
        "threads": arguments.threads,
        "log": arguments.log,
        "verbose": arguments.log_verbose,
        "ready_seconds": arguments.ready_seconds,
    }
    reason = "its log says why" if arguments.log else "run with --log FILE to see why"
    try:
        with running_server(arguments.engine_dir, arguments.host, ports, **options) as server, _signals() as received:
            models = _model_processes(server.process)
            print(
                f"ready: gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}/metrics",
                flush=True,
            )
            while (status := server.process.poll()) is None:
                if received:
                    return 0
                for model, process in models.items():
                    if _ended(process):
                        raise ServerError(f"the process of model {model} ended; {reason}")
                time.sleep(0.1)
            raise ServerError(f"tritonserver ended with status {status}; {reason}")
    except KeyboardInterrupt:
        return 0
    except (KvseekError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
