"""Log probabilities of one sequence, as TensorRT-LLM's models put them out."""

from __future__ import annotations

from typing import Any

from kvseek.core.request import Request, StepOutput


class RunningLogProbs:
    """Gathers log probabilities until a response takes them. Without `return_log_probs` it gives no outputs."""

    def __init__(self, request: Request) -> None:
        self._wanted = request.sampling.logprobs is not None
        self._sum = 0.0
        self._new: list[float] = []

    def push(self, output: StepOutput) -> None:
        """Take an output of the engine."""
        if output.token_id is not None and output.logprobs is not None:
            self._sum += output.logprobs.token
            self._new.append(output.logprobs.token)

    def take(self) -> dict[str, Any]:
        """Return a response's outputs: the sum for all tokens so far, and a number for each token since the response before."""
        if not self._wanted:
            return {}
        new, self._new = self._new, []
        return {"cum_log_probs": self._sum, "output_log_probs": new}
