"""A client's request at a door: its inputs make a request for the engine, whose outputs make the client's chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, TimeoutExpiredError, renamed
from kvseek.core.request import Request, StepOutput
from kvseek.engine.tokenizer import Tokenizer

from .layouts import Layout
from .translation import Inputs

SEVERAL = ("stream", "streaming", "return_prefill_progress")  # inputs that ask for several responses to one prompt
MAX_ID_CHARACTERS = 256  # most characters of a client's id of its request
# Most logits of an answer in JSON, which takes 20 bytes and 0.1 µs of the doors' loop for each.
MAX_JSON_LOGITS = 1 << 20
Chunk = dict[str, Any]  # name of an output → its value: a str, a number, a list of token ids, or an array of logits


class ServedRequest(Protocol):
    """One request at a door.

    Attributes
    ----------
    request : Request
        The request for the engine.
    streaming : bool
        Whether the client wants a response for every token.
    ended : bool
        Whether the client has its last chunk although the engine goes on, because a stop word came; the caller has to cancel
        the request then.
    names : mapping
        The client's names of fields, by those with which the engine's errors begin.
    """

    names: Mapping[str, str]
    request: Request
    streaming: bool
    ended: bool

    def push(self, output: StepOutput) -> Iterator[Chunk]:
        """Take one output of the engine, which must be no error; yields the client's chunks for it."""


def after(request: Request, seconds: float) -> Request:
    """Note the `seconds` that a request has spent at a door; raises TimeoutExpiredError if its time limit has passed."""
    limit = request.timeout_seconds
    if limit is not None and 0 < limit <= seconds:  # of a limit that is not above 0 the engine says what is wrong
        raise TimeoutExpiredError(
            f"timeout = {limit:g} s: passed before the request was tokenised, after {seconds:.1f} s; "
            "send it again later, or with a longer timeout"
        )
    return replace(request, waited_seconds=seconds)


@dataclass(frozen=True)
class RequestFactory:
    """Makes the requests of one engine's clients, for the models of a layout."""

    layout: Layout
    config: EngineConfig
    tokenizer: Tokenizer

    def make(self, model: str, prompts: Sequence[Inputs]) -> list[list[ServedRequest]]:
        """Make the requests that the inputs of each prompt ask `model` for: of each prompt, its sequences.

        Tokenises text, which may take long. Raises RequestError on any input that cannot be served.
        """
        served = self.layout.models[model]
        try:
            made: list[list[ServedRequest]] = []
            for inputs in prompts:
                made.append([*served.sequences(inputs, self.tokenizer, self.config)])
                made[-1][0].request.validate(self.config)  # the others differ by their seeds
        except RequestError as error:
            raise type(error)(renamed(str(error), served.kind.names)) from None
        return made

    def make_one(self, model: str, inputs: Inputs) -> ServedRequest:
        """Make the request of one prompt for one sequence; raises RequestError if more are asked for."""
        made = self.make(model, [inputs])
        if len(made) != 1 or len(made[0]) != 1:
            count = len(made) * len(made[0])
            raise RequestError(
                f"num_return_sequences = {count}: must be 1 over HTTP; use gRPC, or send several requests"
            )
        served = made[0][0]
        logits = served.request.logits(self.config.model.vocab_size)
        if logits > MAX_JSON_LOGITS:
            raise RequestError(
                f"{served.request.logit_fields}: {logits:,} logits are asked for: must be <= "
                f"{MAX_JSON_LOGITS:,} over HTTP; use gRPC, or ask for those of fewer tokens"
            )
        return served
