"""The OpenAI door: one more port of the doors' process, which speaks the API of OpenAI (docs/openai.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvseek.core.config import EngineConfig
from kvseek.core.manifest import read_manifest
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.http_door.body import BodyReader
from kvseek.server.http_door.fields import MAX_FIELD_BYTES
from kvseek.server.http_door.generate_json import JSON_BYTES_PER_BYTE, JSON_BYTES_PER_ID
from kvseek.server.http_door.listener import HEADER_SECONDS
from kvseek.server.requests.generations import Generations
from kvseek.server.requests.keys import keys_of
from kvseek.server.requests.text_request import max_text_bytes
from kvseek.server.settings import ServeSettings

from .answer import Service
from .app import make_app
from .listener import Listener

FINGERPRINT_CHARACTERS = 16


class OpenAIDoor:
    """All parts of the door, put together.

    Parameters
    ----------
    obstacles, metrics, open_models
        See make_app.
    max_connections : int
        See Listener.
    """

    def __init__(
        self,
        engine_dir: Path,
        config: EngineConfig,
        tokenizer: Tokenizer,
        settings: ServeSettings,
        generations: Generations,
        bodies: BodyReader,
        obstacles: Callable[[], list[str]],
        metrics: Callable[[], Awaitable[bytes]],
        max_connections: int,
        header_seconds: float = HEADER_SECONDS,
        open_models: bool = False,
    ) -> None:
        manifest = read_manifest(engine_dir)
        name = settings.served_model_name or manifest.source_model
        fingerprint = f"fp_{manifest.fingerprint[:FINGERPRINT_CHARACTERS]}"
        self._service = Service(generations, bodies, tokenizer, config, name, fingerprint)
        self._listener = Listener(max_connections, header_seconds)
        keys = keys_of(settings)
        self._app = make_app(self._service, keys, obstacles, metrics, lambda: self._listener.is_full, open_models)

    async def start(self, host: str, port: int, held: bool = False) -> int:
        """Listen, and load the tokenizer; returns the port. Raises ServerError. `held`: see Listener."""
        port = await self._listener.start(self._app, host, port, "--openai_port", held)
        limit = await asyncio.to_thread(body_limit, self._service.config, self._service.tokenizer)
        self._service.bodies.make_room_for(limit)
        self._service.body_limit = limit
        return port

    def stop_accepting(self) -> None:
        """Take no requests any more."""
        self._listener.stop_accepting()

    async def close(self) -> None:
        """End the requests that are still open."""
        await self._listener.close()


def body_limit(config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Return the most bytes of a body: a prompt of max_input_len tokens, escaped or as ids, and the other fields."""
    text = max_text_bytes(config, tokenizer) * JSON_BYTES_PER_BYTE
    return max(text, config.max_input_len * JSON_BYTES_PER_ID) + MAX_FIELD_BYTES
