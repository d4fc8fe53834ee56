"""One request to a server by each of the ways that clients have: sent, read piece by piece, and given up at any time.

`kvseek.client` covers a part of this; the calls of this file can also be cancelled while nothing has come, and send what
the clients do not offer: token ids, priorities, time limits, and fields that no server should take.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

SILENCE_SECONDS = 400.0  # without a piece of an answer: it is lost; priority 0 may wait 255 s for others (scheduler.py)
ROUTES = ("grpc", "http_stream", "http_generate")
# /v1/completions: text, without malformed fields and short time limits, which have other names there
OPENAI_ROUTE = "openai"
CLIENT_ROUTES = ("kvseek_grpc", "kvseek_http", "kvseek_http_stream")  # kvseek.client: text, and only to the end

STREAM = {"tensorrt_llm_bls": "stream", "tensorrt_llm": "streaming"}  # by model: the input that asks for a stream


@dataclass(frozen=True)
class Piece:
    """One response: new text or new token ids, how many tokens there are by now, and why the answer ended if it has."""

    text: str = ""
    ids: tuple[int, ...] = ()
    count: int = 0
    reason: str = ""


class CallError(Exception):
    """The server's answer is an error, or there is none. `status` is HTTP's, 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Call(Protocol):
    """A request on its way. `send` returns at once, `pieces` waits, `close` gives the request up and is always called."""

    def send(self) -> None: ...

    def pieces(self) -> Iterator[Piece]: ...

    def close(self) -> None: ...


def make_call(route: str, urls: dict[str, str], model: str, fields: dict[str, Any]) -> Call:
    """A call by one of ROUTES, OPENAI_ROUTE or CLIENT_ROUTES; `urls` has host:port of "grpc", "http" and "openai"."""
    if route in CLIENT_ROUTES:
        return ClientCall(route, urls, fields)
    if route == "grpc":
        return GrpcCall(urls["grpc"], model, fields)
    if route == OPENAI_ROUTE:
        return OpenAICall(urls["openai"], fields)
    streams = route == "http_stream"
    path = f"/v2/models/{model}/{'generate_stream' if streams else 'generate'}"
    return HttpCall(urls["http"], path, {**fields, STREAM[model]: streams}, streams)


class HttpCall:
    """generate or generate_stream on a connection of its own."""

    def __init__(self, url: str, path: str, fields: dict[str, Any], streams: bool) -> None:
        self._path, self._body = path, json.dumps(fields)
        self._streams, self._count = streams, 0
        self._connection = http.client.HTTPConnection(url, timeout=SILENCE_SECONDS)

    def send(self) -> None:
        """Send the request; raises CallError."""
        try:
            self._connection.request("POST", self._path, self._body, {"Content-Type": "application/json"})
        except OSError as error:
            raise CallError(f"no server answers: {error}") from None

    def pieces(self) -> Iterator[Piece]:
        """The answer; raises CallError."""
        try:
            response = self._connection.getresponse()
            if response.status != 200:
                raise CallError(_error(response.read()), response.status)
            lines, piece = iter(response.readline, b"") if self._streams else [b"data: " + response.read()], Piece()
            for line in lines:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    piece = self._piece(json.loads(line.removeprefix(b"data: ")))
                    yield piece
            if not piece.reason:  # http.client does not tell the end of a stream from a broken one
                raise CallError("the connection broke: the last piece has no finish_reason")
        except TimeoutError:
            raise CallError(f"silent for {SILENCE_SECONDS:g} s") from None
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise CallError(f"the connection broke: {type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Close the connection as a client does that is gone: at once."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):  # a thread that reads would keep the connection open
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _piece(self, body: dict[str, Any]) -> Piece:
        if "error" in body:
            raise CallError(str(body["error"]), 200)
        if "output_ids" in body:
            ids = body["output_ids"] if isinstance(body["output_ids"], list) else [body["output_ids"]]
            self._count += len(ids)
            return Piece("", tuple(ids), self._count, body.get("finish_reason", ""))
        return Piece(body["text_output"], (), body["num_output_tokens"], body.get("finish_reason", ""))


class OpenAICall(HttpCall):
    """A stream of /v1/completions for the fields of the text model."""

    def __init__(self, url: str, fields: dict[str, Any]) -> None:
        own = {"model": "model", "prompt": fields["text_input"], "stream": True, "temperature": 0, "logprobs": 0}
        own |= {"ignore_eos": fields["end_id"] == -1}
        same = ("max_tokens", "temperature", "top_k", "top_p", "seed", "priority", "timeout")
        super().__init__(url, "/v1/completions", own | {name: fields[name] for name in same if name in fields}, True)

    def _piece(self, body: dict[str, Any]) -> Piece:
        if "error" in body:
            raise CallError(str(body["error"]["message"]), 200)
        (choice,) = body["choices"]
        self._count += len(choice["logprobs"]["tokens"])
        return Piece(choice["text"], (), self._count, choice["finish_reason"] or "")


class GrpcCall:
    """A stream of tritonclient's on a channel of its own: a client that leaves takes its connection with it."""

    def __init__(self, url: str, model: str, fields: dict[str, Any]) -> None:
        import tritonclient.grpc as grpc
        from tests.support.grpc_inputs import inputs_of

        self._url, self._model, self._count = url, model, 0
        self._inputs = inputs_of({**fields, STREAM[model]: True})
        self._responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        # A channel of its own even if another one to this address is open: gRPC shares connections otherwise.
        arguments = [("grpc.use_local_subchannel_pool", 1)]
        self._client = grpc.InferenceServerClient(url, channel_args=arguments)

    def send(self) -> None:
        """Send the request; raises CallError."""
        import tritonclient.grpc as grpc

        self._client.start_stream(lambda result, error: self._responses.put((result, error)))
        try:
            self._client.async_stream_infer(self._model, self._inputs, enable_empty_final_response=True)
        except grpc.InferenceServerException:
            return  # the stream has broken already: `pieces` says why

    def pieces(self) -> Iterator[Piece]:
        """The answer; raises CallError."""
        while True:
            try:
                result, error = self._responses.get(timeout=SILENCE_SECONDS)
            except queue.Empty:
                raise CallError(f"silent for {SILENCE_SECONDS:g} s") from None
            if error is not None:
                raise CallError(f"{error.status() or ''} {error.message()}".strip())
            response = result.get_response()
            if response.outputs:
                yield self._piece(result)
            if response.parameters["triton_final_response"].bool_param:
                return

    def close(self) -> None:
        """Cancel what runs and close the channel."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def _piece(self, result: Any) -> Piece:
        reason = result.as_numpy("finish_reason").reshape(-1)[0].decode()
        ids = result.as_numpy("output_ids")
        if ids is not None:
            self._count += ids.size
            return Piece("", tuple(ids.reshape(-1).tolist()), self._count, reason)
        count = int(result.as_numpy("num_output_tokens").reshape(-1)[0])
        return Piece(result.as_numpy("text_output").reshape(-1)[0].decode(), (), count, reason)


class ClientCall:
    """kvseek.client's own clients."""

    def __init__(self, route: str, urls: dict[str, str], fields: dict[str, Any]) -> None:
        from kvseek.client.grpc_client import GrpcClient
        from kvseek.client.http_client import HttpClient
        from kvseek.client.text_models import GenerateOptions

        names = ("max_tokens", "temperature", "top_k", "seed", "end_id")
        options = GenerateOptions(**{name: fields[name] for name in names if name in fields})
        if route == "kvseek_grpc":
            self._chunks = GrpcClient(urls["grpc"], SILENCE_SECONDS).generate_stream(fields["text_input"], options)
        else:
            client = HttpClient(urls["http"], SILENCE_SECONDS)
            stream = client.generate_stream if route == "kvseek_http_stream" else None
            prompt = fields["text_input"]
            self._chunks = stream(prompt, options) if stream else _one(client, prompt, options)

    def send(self) -> None:
        """Nothing: these clients send when they are read."""

    def pieces(self) -> Iterator[Piece]:
        """The answer; raises CallError."""
        from kvseek.client.errors import ClientError

        try:
            for chunk in self._chunks:
                yield Piece(chunk.text, (), chunk.num_output_tokens, chunk.finish_reason)
        except ClientError as error:
            raise CallError(str(error)) from None

    def close(self) -> None:
        """Nothing: reading to the end closes them."""


def _one(client: Any, prompt: str, options: Any) -> Iterator[Any]:
    yield client.generate(prompt, options)


def _error(body: bytes) -> str:
    try:
        error = json.loads(body.removeprefix(b"data: "))["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
