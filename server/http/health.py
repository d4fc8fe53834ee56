"""Finds out whether the server is ready, by asking the engine's loop and Triton once a second in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection

import grpc
import grpc.aio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from tritonclient.grpc import service_pb2

from kvseek.core.errors import KvseekError, UnavailableError, shortened
from kvseek.server.requests.engine_client import RETRY_SECONDS, UNSOUND_REQUESTS, EngineClient, Pong
from kvseek.server.triton.relay import TritonRelay

from .errors import HttpError

MODEL_VERSION = "1"
ASK_SECONDS = 1.0  # time between two questions
ANSWER_SECONDS = 10.0  # an older answer counts for nothing
SETTLE_SECONDS = 5 * RETRY_SECONDS  # in which Triton's models have found a new engine process, too
logger = logging.getLogger(__name__)


class Answers:
    """The last good answer of one process to a question that is asked again and again."""

    def __init__(self, name: str, ask: Callable[[], Awaitable[bool]]) -> None:
        self._name, self._ask = name, ask
        self._at = -ANSWER_SECONDS  # time.monotonic of the last good answer

    @property
    def fresh(self) -> bool:
        """Whether there was a good answer lately."""
        return time.monotonic() - self._at < ANSWER_SECONDS

    async def keep_asking(self) -> None:
        """Ask for ever."""
        while True:
            try:
                if await self._ask():
                    self._at = time.monotonic()
                else:
                    self._at = -ANSWER_SECONDS
            except Exception:  # if it ended this loop, the server would never be ready again
                logger.exception("%s could not be asked whether it is ready", self._name)
            await asyncio.sleep(ASK_SECONDS)


class ServerState:
    """State of the server, as the health endpoints report it.

    Parameters
    ----------
    triton : TritonRelay or None
        The tritonserver that belongs to the server; None if there is none.
    models : collection of str
        Names under which clients may ask for models.
    """

    def __init__(self, client: EngineClient, triton: TritonRelay | None, models: Collection[str] = ()) -> None:
        self._stopping = False
        self._client, self._triton, self._models = client, triton, models
        self._pong: Pong | None = None
        self._engine = Answers("the engine", self._ask_engine)
        self._triton_at = -ANSWER_SECONDS  # time.monotonic of its last answer, also that it is not ready
        self._triton_ready = Answers("Triton", self._ask_triton)
        asked = (self._engine,) if triton is None else (self._engine, self._triton_ready)
        self._tasks = [asyncio.create_task(each.keep_asking()) for each in asked]

    def stop_accepting(self) -> None:
        """Report the server as not ready from now on."""
        self._stopping = True

    async def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def obstacles(self) -> list[str]:
        """List the reasons why the server is not ready; empty if it is ready."""
        found = []
        if self._stopping or (self._pong is not None and self._pong.draining):
            found.append("the server is shutting down")
        if not self._client.connected:
            found.append("the engine process does not run, or is loading the engine")
        elif not self._engine.fresh:
            found.append(f"the engine has not answered for {ANSWER_SECONDS:g} s")
        elif self._pong is not None and self._pong.unsound >= UNSOUND_REQUESTS:
            found.append(
                f"the last {self._pong.unsound} requests ended because their logits were not finite; restart the server if that "
                "goes on"
            )
        elif self._triton is not None and self._client.connected_seconds < SETTLE_SECONDS:
            found.append("Triton's models may still be looking for the engine process")
        if self._triton is not None and not (self._triton.connected and self._triton_ready.fresh):
            found.append("Triton does not answer on its gRPC port, or is not ready")
        return found

    @property
    def engine_answers(self) -> bool:
        """Whether the engine's loop has answered lately."""
        return self._client.connected and self._engine.fresh

    @property
    def triton_answers(self) -> bool:
        """Whether Triton has answered lately, be it that it is not ready."""
        return time.monotonic() - self._triton_at < ANSWER_SECONDS

    def routes(self) -> list[BaseRoute]:
        """Make the routes of the health endpoints."""
        model = "/v2/models/{model}"
        return [
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route(f"{model}/ready", self.ready),
            Route(f"{model}/versions/{{version}}/ready", self.ready),
        ]

    async def live(self, _: Request) -> Response:
        """Answer 200 while this process runs."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """Answer 200, or 503 with the reasons. The models are ready when the server is."""
        model, version = request.path_params.get("model"), request.path_params.get("version", MODEL_VERSION)
        if model is not None and (model not in self._models or version != MODEL_VERSION):
            raise HttpError(404, f"model {shortened(model)} version {shortened(version)} is not found")
        if obstacles := self.obstacles():
            raise UnavailableError("not ready: " + "; ".join(obstacles))
        return Response()

    async def _ask_engine(self) -> bool:
        with contextlib.suppress(KvseekError):
            self._pong = await self._client.ping()
            return True
        self._pong = None
        return False

    async def _ask_triton(self) -> bool:
        if self._triton is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await self._triton.ask("ServerReady", service_pb2.ServerReadyRequest())
                self._triton_at = time.monotonic()
                return bool(answer.ready)
        return False
