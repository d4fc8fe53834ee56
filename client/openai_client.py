"""HTTP client of the OpenAI port, for `kvseek chat`; programs use OpenAI's own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import requests

from .chunk import Chunk
from .errors import ClientError, RefusedError, check_base_url
from .http_client import EVENT, HttpPort
from .text_models import REPLY_SECONDS, GenerateOptions

DONE = b"[DONE]"
GIVE_URL = "give the URL of its OpenAI port, with /v1, such as http://127.0.0.1:9000/v1"
Message = dict[str, str]  # "role" and "content"


class OpenAIClient(HttpPort):
    """Asks a server by OpenAI's API.

    Parameters and errors as GrpcClient, but that `url` is a base URL, such as http://127.0.0.1:9000/v1.
    """

    def __init__(self, url: str, timeout: float = REPLY_SECONDS, api_key: str = "") -> None:
        check_base_url(url)
        super().__init__(url.rstrip("/"), timeout, api_key, GIVE_URL)

    def model(self) -> str:
        """Ask for the name of the model that is served; raises ClientError."""
        with self._request("GET", "models") as response:
            try:
                return str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ClientError(f"{self.url} lists no model; {GIVE_URL}") from None

    def chat_stream(self, messages: Sequence[Message], options: GenerateOptions) -> Iterator[Chunk]:
        """Send a conversation and yield pieces of the answer; raises ClientError.

        The server tells the numbers of tokens with the last piece alone: until then a piece counts as one.
        """
        body = {"model": self.model(), "messages": list(messages), **chat_fields(options)}
        pieces, reason = 0, ""
        with self._request("POST", "chat/completions", body) as response:
            for event in self._events(response):
                if event["choices"]:
                    choice = event["choices"][0]
                    text, thinking = (choice["delta"].get(name) or "" for name in ("content", "reasoning"))
                    reason = choice["finish_reason"] or ""
                    if text or thinking:
                        pieces += 1
                        yield Chunk(text, thinking=thinking, num_output_tokens=pieces)
                elif counts := event.get("usage"):
                    prompt, output = counts["prompt_tokens"], counts["completion_tokens"]
                    yield Chunk("", reason, num_input_tokens=prompt, num_output_tokens=output)

    def end_session(self, session_id: str, cache_salt: str | None = None) -> int:
        """End a session and return the number of tokens whose rows that has freed; raises ClientError, also for unknown ids."""
        query = "" if cache_salt is None else f"?{urlencode({'cache_salt': cache_salt})}"
        with self._request("DELETE", f"sessions/{quote(session_id, safe='')}{query}") as response:
            return int(response.json()["freed_tokens"])

    def _events(self, response: requests.Response) -> Iterator[dict[str, Any]]:
        for line in self.lines(response):
            data = line.removeprefix(EVENT)
            if data == DONE:
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    raise ClientError(str(event["error"]["message"]))
                yield event
        raise ClientError(f"the server at {self.url} broke off its answer; see its log")

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        response = self.call(method, f"{self.url}/{path}", body, stream=body is not None)
        if response.status_code == 404 and path == "models":
            raise RefusedError(f"{self.url} offers no models by OpenAI's API ({_error(response)}); {GIVE_URL}")
        if not response.ok:
            raise RefusedError(_error(response))
        return response


def chat_fields(options: GenerateOptions) -> dict[str, Any]:
    """Return the fields of a streamed chat; as over gRPC, it is greedy unless temperature, top_k or top_p is given."""
    draws = (options.temperature, options.top_k, options.top_p) != (None, None, None)
    values = {
        "max_completion_tokens": options.max_tokens,
        "temperature": options.temperature if draws else 0.0,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "repetition_penalty": options.repetition_penalty,
        "seed": options.seed,
        "stop": list(options.stop_words) or None,
        "ignore_eos": True if options.end_id == -1 else None,
        "cache_salt": options.cache_salt,
        "session_id": options.session_id,
        "retention_priority": options.retention_priority,
        "retention_seconds": options.retention_seconds,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {name: value for name, value in values.items() if value is not None}


def _error(response: requests.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP status {response.status_code}: {response.text[:200]}"
