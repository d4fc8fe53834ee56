"""HTTP client of Triton's generate endpoints: plain JSON and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import requests

from .chunk import Chunk
from .errors import ClientError, RefusedError, check_address, no_answer, no_reply
from .text_models import BLS, REPLY_SECONDS, GenerateOptions, TextModel, bearer

CONNECT_SECONDS = 10.0
EVENT = b"data: "
NO_KEEP_ALIVE = {
    "Connection": "close"
}  # Triton counts a kept connection as open after a reply, and waits for it at exit
NAMES = {field.name for field in fields(Chunk)} - {"text"}


class HttpPort:
    """Calls of a server over HTTP; what stops one is told apart.

    Attributes
    ----------
    url : str
        As messages name the server.
    timeout : float
        Seconds, > 0, that may pass until the first byte of a reply and between two of them.
    """

    def __init__(self, url: str, timeout: float, api_key: str, remedy: str) -> None:
        self.url, self.timeout, self._remedy = url, timeout, remedy
        self._headers = NO_KEEP_ALIVE | bearer(api_key)

    def call(
        self, method: str, address: str, body: Mapping[str, Any] | None = None, *, stream: bool
    ) -> requests.Response:
        """Ask and return the response, whatever its status; raises ClientError, ending in `remedy` if nothing answers."""
        wait = (CONNECT_SECONDS, self.timeout)
        try:
            return requests.request(method, address, json=body, headers=self._headers, stream=stream, timeout=wait)
        except requests.ReadTimeout:
            raise no_reply(self.url, self.timeout) from None
        except (requests.RequestException, ValueError) as error:  # ValueError: a key that no header can hold
            raise no_answer(self.url, error, self._remedy) from None

    def lines(self, response: requests.Response) -> Iterator[bytes]:
        """Yield the lines of a streamed response; raises ClientError if it breaks off."""
        try:
            yield from response.iter_lines()
        except requests.RequestException as error:
            if "timed out" in str(error):  # requests has no class of its own for silence in the middle of a body
                raise no_reply(self.url, self.timeout) from None
            raise ClientError(f"the server at {self.url} broke off its answer ({error}); see its log") from None


class HttpClient(HttpPort):
    """Asks a kvseek server over HTTP; parameters and errors as GrpcClient, with the host:port of the HTTP service."""

    def __init__(self, url: str, timeout: float = REPLY_SECONDS, model: TextModel = BLS, api_key: str = "") -> None:
        check_address(url)
        super().__init__(url, timeout, api_key, "give the --url of its HTTP port, or --protocol grpc with gRPC's")
        self._model = model

    def generate(self, text_input: str, options: GenerateOptions) -> Chunk:
        """Send a prompt and return the whole answer; raises ClientError."""
        with self._post("generate", options.fields(text_input, stream=False), stream=False) as response:
            return _chunk(response.json())

    def generate_stream(self, text_input: str, options: GenerateOptions) -> Iterator[Chunk]:
        """Send a prompt and yield chunks until the answer ends; raises ClientError."""
        return self._model.pieces(self._stream(options.fields(text_input, stream=True)))

    def inputs(self, model: str) -> set[str]:
        """Ask for the names of a model's inputs; empty if the server has no such model, or does not say. Raises ClientError."""
        with self.call("GET", f"http://{self.url}/v2/models/{model}", stream=False) as response:
            try:
                return {one["name"] for one in response.json()["inputs"]}
            except (ValueError, LookupError, TypeError):
                return set()

    def _stream(self, fields: Mapping[str, Any]) -> Iterator[Chunk]:
        with self._post("generate_stream", fields, stream=True) as response:
            for line in self.lines(response):
                if line.startswith(EVENT):
                    yield _chunk(json.loads(line[len(EVENT) :]))

    def _post(self, endpoint: str, fields: Mapping[str, Any], stream: bool) -> requests.Response:
        address = f"http://{self.url}/v2/models/{self._model.name}/{endpoint}"
        response = self.call("POST", address, self._model.inputs(fields), stream=stream)
        if not response.ok:
            raise RefusedError(self._error(response))
        return response

    def _error(self, response: requests.Response) -> str:
        try:
            error = json.loads(response.content.removeprefix(EVENT))["error"]  # generate_stream sends it as an event
        except (ValueError, KeyError, TypeError):
            return f"HTTP status {response.status_code}: {response.text[:200]}"
        if isinstance(error, dict):  # as OpenAI's API has it
            ports = f"give the --url of the HTTP port, or --openai_url http://{self.url}/v1"
            return f"{self.url} is an OpenAI port ({error.get('message')}); {ports}"
        return str(error)


def _chunk(body: dict[str, Any]) -> Chunk:
    if "error" in body:
        raise ClientError(str(body["error"]))
    return Chunk(text=body["text_output"], **{name: body[name] for name in NAMES & set(body)})
