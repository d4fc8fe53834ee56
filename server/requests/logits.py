"""Logits of one sequence, as TensorRT-LLM's models put them out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvseek.core.request import Request, StepOutput


class RunningLogits:
    """Gathers logits until a response takes them. What a request does not ask for makes no outputs."""

    def __init__(self, request: Request) -> None:
        self._prompt_tokens = len(request.prompt_ids)
        self._context: list[bytes] = []
        self._generation: list[bytes] = []

    def push(self, output: StepOutput) -> None:
        """Take an output of the engine."""
        if output.context_logits:
            self._context.append(output.context_logits)
        if output.generation_logits:
            self._generation.append(output.generation_logits)

    def take(self) -> dict[str, Any]:
        """Return a response's outputs, float32 arrays without the request's dimension.

        `context_logits` [prompt tokens, vocabulary] come with one response, the first after the prompt; `generation_logits`
        [1, tokens, vocabulary] with every response that has tokens, for the tokens since the response before.
        """
        outputs = {}
        if self._context:  # a response comes after the whole prompt
            outputs["context_logits"] = _rows(self._context, self._prompt_tokens)
            self._context = []
        if self._generation:
            outputs["generation_logits"] = _rows(self._generation, len(self._generation))[None]
            self._generation = []
        return outputs


def _rows(parts: list[bytes], rows: int) -> NDArray[np.float32]:
    return np.frombuffer(b"".join(parts), np.float32).reshape(rows, -1)
