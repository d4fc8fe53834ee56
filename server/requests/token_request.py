"""One sequence of the token model: makes a request of the engine from tensors, and token ids from outputs. No Triton here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvseek.core.request import Request, StepOutput

from .log_probs import RunningLogProbs
from .logits import RunningLogits
from .perf_metrics import PerfMetrics
from .translation import Inputs, engine_request, numbered, scalar, sequences

# Inputs of the token model, by the names of the engine's errors.
NAMES = {"max_tokens": "request_output_len", "top_k": "runtime_top_k", "top_p": "runtime_top_p"}


class TokenRequest:
    """See ServedRequest. A complete answer begins with its prompt unless `exclude_input_in_output`, as in TensorRT-LLM."""

    names: Mapping[str, str] = NAMES

    def __init__(self, request: Request, inputs: Inputs) -> None:
        self.request = request
        self.streaming = bool(scalar(inputs, "streaming", False))
        self.ended = False
        self._wants_progress = bool(scalar(inputs, "return_prefill_progress", False))
        self._log_probs, self._metrics = RunningLogProbs(request), PerfMetrics(inputs)
        self._logits = RunningLogits(request)
        excluded = self.streaming or scalar(inputs, "exclude_input_in_output", False)
        self._ids = [] if excluded else list(self.request.prompt_ids)

    def push(self, output: StepOutput) -> Iterator[dict[str, Any]]:
        """See ServedRequest."""
        self._log_probs.push(output)
        self._metrics.push(output)
        self._logits.push(output)
        if output.token_id is not None:
            self._ids.append(output.token_id)
        last = output.finish_reason is not None
        progress = output.token_id is None and not last
        if not (last or (self._wants_progress if progress else self.streaming)):
            return
        ids = [] if progress else self._ids
        yield {
            "output_ids": ids,
            "sequence_length": len(ids),
            "finish_reason": output.finish_reason or "",
            "cached_tokens": output.cached_tokens,
            "attended_tokens": output.attended_tokens,
            "prefill_progress": output.prefill_progress,
            **self._log_probs.take(),
            **self._metrics.outputs(),
            **({} if progress else self._logits.take()),
        }
        if self.streaming and not progress:
            self._ids = []


def token_requests(inputs: Inputs, default_end_ids: tuple[int, ...]) -> list[TokenRequest]:
    """Make the sequences that inputs ask for; raises RequestError on any input that cannot be served."""
    request = engine_request(inputs, default_end_ids)
    return [TokenRequest(numbered(request, number), inputs) for number in range(sequences(inputs))]
