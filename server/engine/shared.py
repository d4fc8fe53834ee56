"""Finds or starts the engine process of an engine directory where no `kvseek serve` looks after one.

Models in a tritonserver that was started by hand, and `kvseek openai`, share one engine process: all that have the same engine
directory, settings, GPUs and installation of kvseek, and run as the same user. Whoever comes first starts the process. The
process ends when the last of them has left. If it dies, whoever notices first starts the next one. If it hangs, each of them
finds that out by itself, as the supervisor of a `kvseek serve` does, and kills it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from kvseek.core.config import read_config
from kvseek.core.liveness import silent_process
from kvseek.core.manifest import read_manifest
from kvseek.server.errors import ServerError
from kvseek.server.processes import ASK_SECONDS, QUESTIONS, UMASK
from kvseek.server.requests.engine_client import EngineClient
from kvseek.server.settings import KEY_FLAGS, ServeSettings

FIRST_DELAY_SECONDS = 0.25  # between two starts of a process that ends again and again; doubles each time
LONGEST_DELAY_SECONDS = 30.0
POLL_SECONDS = 0.05
STEADY_SECONDS = 120.0  # a process that ran so long before it ended is started again without a long delay
NAME_CHARACTERS = 24
MAX_SOCKET_BYTES = 107  # of a path: unix(7)
logger = logging.getLogger(__name__)


class SharedEngine:
    """The engine process of an engine directory, for one of the programs that share it.

    Parameters
    ----------
    engine_dir : Path
        Must be an engine directory; otherwise EngineDirectoryError or ConfigError is raised.
    settings : ServeSettings
        Settings of the engine process.

    Raises
    ------
    ServerError
        If the folder of the sockets belongs to somebody else.
    """

    def __init__(self, engine_dir: Path, settings: ServeSettings) -> None:
        self._engine_dir, self._settings = engine_dir.resolve(), settings
        self.config = read_config(self._engine_dir)
        fingerprint = read_manifest(self._engine_dir).fingerprint  # a directory that was built anew is another engine
        of_frontends = {name: getattr(ServeSettings, name) for name in ("layout", *KEY_FLAGS)}  # their own
        own = replace(settings, **of_frontends).to_json()
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        # Programs of another kvseek have other messages: they get an engine process of their own.
        identity = (str(self._engine_dir), fingerprint, own, devices, sys.prefix, version("kvseek"))
        name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:NAME_CHARACTERS]
        self.socket = _own_folder() / f"{name}.sock"
        size = len(os.fsencode(self.socket))
        if size > MAX_SOCKET_BYTES:
            raise ServerError(
                f"{self.socket} has {size} bytes: must be <= {MAX_SOCKET_BYTES}, as a socket's path; set TMPDIR to a shorter one"
            )
        self._process: subprocess.Popen[bytes] | None = None
        self._alive = self.socket.with_suffix(".up")
        self._started_at, self._start_at, self._delay = 0.0, 0.0, FIRST_DELAY_SECONDS
        self.failure = ""  # how the last process that failed here has failed; empty if none has
        threading.Thread(target=self._look_after, name="look-after-engine", daemon=True).start()

    def start_if_absent(self) -> None:
        """Start the process unless it runs, or its next start has to wait; returns soon. Called again and again."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process = None
            if status:
                self._fail(f"the engine process ended with status {status}")
        if self._process is None and time.monotonic() >= self._start_at:
            try:
                self._start()
            except (OSError, ServerError) as error:
                self._fail(f"the engine process could not be started ({error})")

    def _start(self) -> None:
        command = [sys.executable, "-m", "kvseek.server.engine.process", "--shared"]
        command += ["--engine_dir", str(self._engine_dir), "--socket", str(self.socket)]
        command += ["--alive", str(self._alive), "--settings", self._settings.to_json()]
        _own_folder()  # somebody may have cleared the folder of temporary files
        with self.socket.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another program has started it: it runs, or is loading
                return
            # The process inherits the lock, of which the kernel lets go when the process ends, however it ends. It has a
            # session of its own, because it must outlive this program if others use it too.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(lock.fileno(),), start_new_session=True, umask=UMASK
            )
            self._started_at = time.monotonic()

    def _look_after(self) -> None:
        """Kill the process when it has not answered for `hang_seconds`, whoever has started it; in a thread of its own."""
        silent = [0] * QUESTIONS
        while True:
            silent = [*silent[1:], silent_process(self._alive, self._settings.hang_seconds / QUESTIONS)]
            if silent[0] and len(set(silent)) == 1:
                logger.error(
                    "the engine process %d has not answered for %g s and is killed",
                    silent[0],
                    self._settings.hang_seconds,
                )
                with contextlib.suppress(ProcessLookupError):
                    os.kill(silent[0], signal.SIGKILL)
            if not silent[-1]:
                time.sleep(ASK_SECONDS)

    def _fail(self, failure: str) -> None:
        """Note a failure; the next start waits, twice as long as the last time unless a process has run long in between."""
        now = time.monotonic()
        if now - self._started_at >= STEADY_SECONDS:
            self._delay = FIRST_DELAY_SECONDS
        self.failure, self._start_at = failure, now + self._delay
        logger.error("%s; it is started again in %g s", failure, self._delay)
        self._delay = min(LONGEST_DELAY_SECONDS, 2 * self._delay)

    def wait(self, client: EngineClient) -> None:
        """Wait until `client` is connected, however long loading takes; raises ServerError if the process cannot be started."""
        while not client.connected:
            if self.failure:
                raise ServerError(f"{self.failure} before it was ready: {self._engine_dir}; its log says why")
            time.sleep(POLL_SECONDS)


def _own_folder() -> Path:
    """Return the folder of this user's sockets, which nobody else can enter; raises ServerError if it is not such."""
    folder = Path(tempfile.gettempdir()) / f"kvseek-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ServerError(
            f"{folder}: must be a folder of this user that nobody else can enter; remove it, or set TMPDIR to another place"
        )
    return folder
