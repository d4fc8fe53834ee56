"""Streams that tests read in the background: what has come, how it ended, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from tests.server.soak.calls import CallError, Piece, make_call
from tests.support.live_server import LiveServer
from tests.support.waiting import wait_for

TIMEOUT = 90.0


class Stream:
    """One request, read by a thread of its own from the start."""

    def __init__(self, server: LiveServer, route: str, model: str, fields: dict[str, Any]) -> None:
        self._call = make_call(route, server.urls, model, fields)
        self.pieces: list[Piece] = []
        self.error = ""
        self.status = 0
        self.began, self.ended_at = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self.pieces[-1].count if self.pieces else 0

    @property
    def reason(self) -> str:
        """Why the answer ended; empty if it has not, or ended with an error."""
        return self.pieces[-1].reason if self.pieces else ""

    @property
    def ids(self) -> list[int]:
        """Token ids so far."""
        return [token for piece in self.pieces for token in piece.ids]

    def begun(self) -> Stream:
        """Wait for the first token; raises AssertionError if the stream ends before it."""
        wait_for(lambda: self.pieces or self.ended_at, "the first token")
        assert self.count, self.error
        return self

    def leave(self) -> None:
        """Give the request up."""
        self._call.close()

    def join(self, seconds: float = TIMEOUT) -> Stream:
        """Wait for the end; raises AssertionError if it does not come."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"no end within {seconds:g} s, after {self.count} tokens"
        return self

    def _read(self) -> None:
        try:
            self._call.send()
            for piece in self._call.pieces():
                self.pieces.append(piece)
        except CallError as error:
            self.error, self.status = str(error), error.status
        except Exception as error:  # `leave` closes the connection under the reader
            self.error = f"{type(error).__name__}: {error}"
        self.ended_at = time.monotonic()


def tokens(server: LiveServer, route: str, prompt: Sequence[int], count: int, **fields: Any) -> Stream:
    """A stream of `count` tokens."""
    own = {"input_ids": list(prompt), "request_output_len": count, "end_id": -1, "exclude_input_in_output": True}
    return Stream(server, route, "tensorrt_llm", {**own, **fields})
