"""The models that clients of Triton ask, in each of the repository layouts that TensorRT-LLM has: how inputs become requests, and
what the engine's outputs become.

At every port a request's inputs make a request of the engine in the same way (translation.py), and each model writes its
responses from what the accumulator has gathered, with TensorRT-LLM's names. No tensors here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, renamed
from kvseek.core.request import FinishReason, Request, RequestStatistics, StepOutput
from kvseek.engine.accumulator import Accumulator
from kvseek.engine.tokenizer import Tokenizer

from .translation import (
    LLMAPI_NAMES,
    TEXT_NAMES,
    TOKEN_NAMES,
    Inputs,
    as_text_model,
    engine_request,
    scalar,
    sequences_of,
    text_request,
)

SEVERAL = ("stream", "streaming", "return_prefill_progress")  # inputs that ask for several responses to one prompt
MAX_ID_CHARACTERS = 256  # most characters of a client's id of its request
# Most logits of an answer in JSON, which takes 20 bytes and 0.4 µs for each.
MAX_JSON_LOGITS = 1 << 20

NANOSECONDS = 1_000_000_000
Chunk = dict[str, Any]  # name of an output → its value: a str, a number, a list of token ids, or Logits
ASKED_FOR = {  # outputs that a response of the LLM API layout has only if this input is true
    "finish_reason": "return_finish_reason",
    "stop_reason": "return_stop_reason",
    "cached_tokens": "return_attended_tokens",
    "attended_tokens": "return_attended_tokens",
    "prefill_progress": "return_prefill_progress",
}
FINISH_REASONS: dict[str, str] = {FinishReason.END_ID: "stop", FinishReason.STOP_WORD: "stop"}  # others: kvseek's names
LOGITS = ("context_logits", "generation_logits")  # outputs
NONE = "None"  # what stands for a reason there until there is one


class ServedRequest(Protocol):
    """One request of a client.

    Attributes
    ----------
    request : Request
        The request for the engine.
    streaming : bool
        Whether the client wants responses while tokens are generated.
    ended : bool
        Whether the client has its last chunk. The engine goes on if a stop word came: the caller has to cancel the request then.
    names : mapping
        The client's names of fields, by those with which the engine's errors begin.
    held_bytes : int
        Bytes of the answer that are there before the engine puts out anything: of a prompt that it repeats.
    """

    names: Mapping[str, str]
    held_bytes: int
    request: Request
    streaming: bool
    ended: bool

    def push(self, outputs: Sequence[StepOutput]) -> Iterator[Chunk]:
        """Take outputs of the engine, none of them an error; yields the client's chunks for them, all tokens in one."""


@dataclass(frozen=True)
class Logits:
    """An output of float32 numbers, without the request's dimension."""

    data: bytes
    shape: tuple[int, ...]


def taken_logits(new: Accumulator, request: Request) -> Chunk:
    """Return the logits that are new, if the request asks for them.

    `context_logits` [prompt tokens, vocabulary] come with one response, the first after the prompt; `generation_logits`
    [1, tokens, vocabulary] with every response that has tokens, for the tokens since the response before.
    """
    outputs = {}
    if new.context_logits:  # a response comes after the whole prompt
        data, tokens = b"".join(new.context_logits), len(request.prompt_ids)
        outputs["context_logits"] = Logits(data, (tokens, len(data) // 4 // tokens))
        new.context_logits = []
    if new.generation_logits:
        data, tokens = b"".join(new.generation_logits), len(new.generation_logits)
        outputs["generation_logits"] = Logits(data, (1, tokens, len(data) // 4 // tokens))
        new.generation_logits = []
    return outputs


def perf_metrics(statistics: RequestStatistics | None) -> Chunk:
    """Return the metrics that are known so far; 0 stands for what has not happened yet, and for what kvseek does not do.

    Times are those of the engine process's steady clock, so only their differences mean something. Blocks of the KV cache
    are kvseek's extents, of 1,024 tokens in all layers.
    """
    known = statistics or RequestStatistics(0, 0.0)
    drafted, accepted = known.drafted_tokens, known.accepted_tokens
    own, missed = known.extents - known.shared_extents, known.prompt_extents - known.reused_extents
    seconds = {
        "arrival_time_ns": known.submitted_at,
        "first_scheduled_time_ns": known.started_at,
        "first_token_time_ns": known.first_token_at,
        "last_token_time_ns": known.last_token_at,
    }
    return {
        "kv_cache_alloc_new_blocks": own,
        "kv_cache_reused_blocks": known.reused_extents,
        "kv_cache_missed_blocks": missed,
        "kv_cache_alloc_total_blocks": own,
        "kv_cache_hit_rate": known.reused_extents / max(1, known.prompt_extents),
        **{name: round(value * NANOSECONDS) for name, value in seconds.items()},
        "acceptance_rate": accepted / max(1, drafted),
        "total_accepted_draft_tokens": accepted,
        "total_draft_tokens": drafted,
    }


class TokenRequest:
    """A request of the token model. A complete answer begins with its prompt unless `exclude_input_in_output`.

    Attributes
    ----------
    model : str
        The model's name.
    names : mapping
        The model's inputs by the names of the engine's errors.
    prompt_input, stream_input : str
        The inputs that have the prompt, and that ask for a stream.
    takes_text : bool
        Whether the prompt is text, which has to be tokenised, or token ids.
    batched : bool
        Whether the first dimension of clients' tensors is the batch, and responses have `batch_index` and `sequence_index`.
    """

    model = "tensorrt_llm"
    names: Mapping[str, str] = TOKEN_NAMES
    prompt_input, stream_input = "input_ids", "streaming"
    takes_text, batched = False, True
    held_bytes = 0

    @classmethod
    def make(cls, inputs: Inputs, tokenizer: Tokenizer, config: EngineConfig) -> list[Self]:
        """Make the sequences of one prompt from its inputs; raises RequestError on any input that cannot be served."""
        request = engine_request(inputs, config.model.eos_token_ids)
        return [cls(sequence, inputs) for sequence in sequences_of(inputs, request)]

    def __init__(
        self,
        request: Request,
        inputs: Inputs,
        tokenizer: Tokenizer | None = None,
        stop_words: tuple[str, ...] = (),
        prompt: str = "",
    ) -> None:
        self.request, self.ended = request, False
        self.streaming = bool(scalar(inputs, self.stream_input, False))
        self._echoes = not (self.streaming or scalar(inputs, "exclude_input_in_output", False))
        self._progress = bool(scalar(inputs, "return_prefill_progress", False))
        self._metrics = bool(scalar(inputs, "return_perf_metrics", False))
        self._new, self._sum = Accumulator(request, tokenizer, stop_words), 0.0
        if self._echoes:
            self._new.token_ids += request.prompt_ids
            self._new.text = prompt

    def push(self, outputs: Sequence[StepOutput]) -> Iterator[Chunk]:
        """See ServedRequest. A response with several tokens tells what the step of the last one attended to."""
        new, last = self._new, None
        for output in outputs:
            if new.push(output):
                last = output
            elif self._progress and new.finish_reason is None:
                yield self._chunk(output, "", progress=True)
        if last is None:
            return
        reason = new.finish_reason
        self.ended = reason is not None
        if self.streaming or reason is not None:
            yield self._chunk(last, reason or "", progress=False) | taken_logits(new, self.request)
            self._forget()

    def _chunk(self, output: StepOutput, reason: str, progress: bool) -> Chunk:
        """Write a response, with an empty answer if it tells of `progress` in reading the prompt."""
        return {
            **self._answer(progress),
            "finish_reason": reason,
            "cached_tokens": output.cached_tokens,
            "attended_tokens": output.attended_tokens,
            "prefill_progress": output.prefill_progress,
            **self._log_probs(),
            **(perf_metrics(self._new.statistics) if self._metrics else {}),
        }

    def _log_probs(self) -> Chunk:
        """Return the sum for all tokens so far and a number for each new one; nothing unless the request asks for them."""
        if self.request.sampling.logprobs is None:
            return {}
        new, self._new.logprobs = [each.token for each in self._new.logprobs], []
        self._sum += sum(new)
        return {"cum_log_probs": self._sum, "output_log_probs": new}

    def _answer(self, progress: bool) -> Chunk:
        ids = [] if progress else self._new.token_ids
        return {"output_ids": ids, "sequence_length": len(ids)}

    def _forget(self) -> None:
        """Leave out of the next response what this one had."""
        self._new.token_ids = []


class TextRequest(TokenRequest):
    """A request of the text model. A stop word is found in the text, whatever tokens it is spelt with, and is not part of it."""

    model = "tensorrt_llm_bls"
    names: Mapping[str, str] = TEXT_NAMES
    prompt_input, stream_input = "text_input", "stream"
    takes_text = True

    @classmethod
    def make(cls, inputs: Inputs, tokenizer: Tokenizer, config: EngineConfig) -> list[Self]:
        """See TokenRequest. Tokenises, which may take long."""
        request, prompt, stop_words = text_request(inputs, tokenizer, config)
        made = sequences_of(inputs, request)
        return [cls(sequence, inputs, tokenizer, stop_words, prompt) for sequence in made]

    def __init__(self, request: Request, inputs: Inputs, *more: Any) -> None:
        super().__init__(request, inputs, *more)
        self._counts = {
            name: bool(scalar(inputs, f"return_{name}", False)) for name in ("num_input_tokens", "num_output_tokens")
        }

    def _answer(self, progress: bool) -> Chunk:
        counts = {"num_input_tokens": len(self.request.prompt_ids), "num_output_tokens": self._new.count}
        wanted = {name: count for name, count in counts.items() if self._counts[name]}
        return {"text_output": "" if progress else self._new.text} | wanted

    def _forget(self) -> None:
        self._new.text, self._new.token_ids = "", []


class LlmApiRequest(TextRequest):
    """A request of the LLM API layout's model. As TensorRT-LLM's, each response of a stream has the whole text so far."""

    model = "tensorrt_llm"
    names = LLMAPI_NAMES
    batched = False

    @classmethod
    def make(cls, inputs: Inputs, tokenizer: Tokenizer, config: EngineConfig) -> list[Self]:
        """See TextRequest."""
        return super().make(as_text_model(inputs), tokenizer, config)

    def __init__(self, request: Request, inputs: Inputs, *more: Any) -> None:
        super().__init__(request, inputs, *more)
        self._left_out = [name for name, flag in ASKED_FOR.items() if not scalar(inputs, flag, False)]

    def _chunk(self, output: StepOutput, reason: str, progress: bool) -> Chunk:
        chunk = super()._chunk(output, reason, progress)
        chunk["finish_reason"] = FINISH_REASONS.get(reason, reason) or NONE
        chunk["stop_reason"] = self._new.stop_word or NONE
        chunk.pop("output_log_probs", None)
        if "cum_log_probs" in chunk:
            chunk["cumulative_logprob"] = chunk.pop("cum_log_probs")
        for name in ("kv_cache_reused_block", "kv_cache_missed_block"):  # TensorRT-LLM leaves the s out here
            if f"{name}s" in chunk:
                chunk[name] = chunk.pop(f"{name}s")
        for name in self._left_out:
            del chunk[name]
        return chunk

    def _forget(self) -> None:
        self._new.token_ids = []


@dataclass(frozen=True)
class RepositoryLayout:
    """The models of a repository, by name, and other names under which TensorRT-LLM's clients ask for them.

    `name` is that of TensorRT-LLM's own folder, triton_backend/all_models/LAYOUT, and of the folder in model_repository/.
    """

    name: str
    models: Mapping[str, type[TokenRequest]]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """All names under which clients may ask, and the models' own."""
        return {name: name for name in self.models} | dict(self.aliases)


INFLIGHT_BATCHER_LLM = RepositoryLayout(
    "inflight_batcher_llm",
    {kind.model: kind for kind in (TokenRequest, TextRequest)},
    {"ensemble": TextRequest.model},
)
LLMAPI = RepositoryLayout("llmapi", {LlmApiRequest.model: LlmApiRequest})
LAYOUTS = {layout.name: layout for layout in (INFLIGHT_BATCHER_LLM, LLMAPI)}


@dataclass(frozen=True)
class RequestFactory:
    """Makes the requests of one engine's clients, for the models of a layout."""

    layout: RepositoryLayout
    config: EngineConfig
    tokenizer: Tokenizer

    def make(self, model: str, prompts: Sequence[Inputs]) -> list[list[ServedRequest]]:
        """Make the requests that the inputs of each prompt ask `model` for: of each prompt, its sequences.

        Tokenises text, which may take long. Raises RequestError on any input that cannot be served.
        """
        kind = self.layout.models[model]
        try:
            made: list[list[ServedRequest]] = []
            for inputs in prompts:
                made.append([*kind.make(inputs, self.tokenizer, self.config)])
                made[-1][0].request.validate(self.config)  # the others differ by their seeds
        except RequestError as error:
            raise type(error)(renamed(str(error), kind.names)) from None
        return made

    def make_one(self, model: str, inputs: Inputs) -> ServedRequest:
        """Make the request of one prompt for one sequence; raises RequestError if more are asked for."""
        ((served, *others),) = self.make(model, [inputs])
        if others:
            raise RequestError(
                f"num_return_sequences = {1 + len(others)}: must be 1 over HTTP; use gRPC, or send several requests"
            )
        logits = served.request.logits(self.config.model.vocab_size)
        if logits > MAX_JSON_LOGITS:
            raise RequestError(
                f"{served.request.logit_fields}: {logits:,} logits are asked for: must be <= "
                f"{MAX_JSON_LOGITS:,} over HTTP; use gRPC, or ask for those of fewer tokens"
            )
        return served
