"""From the engine's outputs to what clients of Triton's models get: texts or token ids, log probabilities, logits, metrics.

Each model writes its responses from what the accumulator has gathered, with TensorRT-LLM's names. No tensors here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.core.statistics import RequestStatistics
from kvseek.engine.accumulator import Accumulator
from kvseek.engine.tokenizer import Tokenizer

from .translation import LLMAPI_NAMES, TEXT_NAMES, TOKEN_NAMES, Inputs, scalar

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
    are kvseek's extents, of 1,024 tokens in all layers; no tokens are drafted.
    """
    known = statistics or RequestStatistics(0, 0.0)
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
        "acceptance_rate": 0.0,
        "total_accepted_draft_tokens": 0,
        "total_draft_tokens": 0,
    }


class TokenRequest:
    """A request of the token model. A complete answer begins with its prompt unless `exclude_input_in_output`."""

    names: Mapping[str, str] = TOKEN_NAMES
    stream_field = "streaming"

    def __init__(
        self, request: Request, inputs: Inputs, tokenizer: Tokenizer | None = None, stop_words: tuple[str, ...] = ()
    ) -> None:
        self.request, self.ended = request, False
        self.streaming = bool(scalar(inputs, self.stream_field, False))
        self._echoes = not (self.streaming or scalar(inputs, "exclude_input_in_output", False))
        self._progress = bool(scalar(inputs, "return_prefill_progress", False))
        self._metrics = bool(scalar(inputs, "return_perf_metrics", False))
        self._new, self._sum = Accumulator(request, tokenizer, stop_words), 0.0
        if self._echoes:
            self._new.token_ids += request.prompt_ids

    def push(self, output: StepOutput) -> Iterator[Chunk]:
        """See ServedRequest."""
        told = self._new.push(output)
        reason = self._new.finish_reason
        if not told:
            if self._progress and reason is None:
                yield self._chunk(output, "", progress=True)
            return
        self.ended = reason is FinishReason.STOP_WORD and output.finish_reason is None
        if self.streaming or reason is not None:
            yield self._chunk(output, reason or "", progress=False) | taken_logits(self._new, self.request)
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

    names: Mapping[str, str] = TEXT_NAMES
    stream_field = "stream"

    def __init__(
        self, request: Request, prompt: str, stop_words: tuple[str, ...], inputs: Inputs, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, inputs, tokenizer, stop_words)
        if self._echoes:
            self._new.text = prompt
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

    names = LLMAPI_NAMES

    def __init__(
        self, request: Request, prompt: str, stop_words: tuple[str, ...], inputs: Inputs, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, prompt, stop_words, inputs, tokenizer)
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
