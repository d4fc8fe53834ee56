"""Logits of one sequence, as TensorRT-LLM's models put them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvseek.core.request import Request, StepOutput


@dataclass(frozen=True)
class Logits:
    """An output of float32 numbers, without the request's dimension."""

    data: bytes
    shape: tuple[int, ...]


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
        """Return a response's outputs.

        `context_logits` [prompt tokens, vocabulary] come with one response, the first after the prompt; `generation_logits`
        [1, tokens, vocabulary] with every response that has tokens, for the tokens since the response before.
        """
        outputs = {}
        if self._context:  # a response comes after the whole prompt
            data = b"".join(self._context)
            outputs["context_logits"] = Logits(data, (self._prompt_tokens, len(data) // 4 // self._prompt_tokens))
            self._context = []
        if self._generation:
            data, tokens = b"".join(self._generation), len(self._generation)
            outputs["generation_logits"] = Logits(data, (1, tokens, len(data) // 4 // tokens))
            self._generation = []
        return outputs
