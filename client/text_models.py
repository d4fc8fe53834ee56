"""The text models that kvseek's clients ask: one in each layout of the server's model repository."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from .chunk import Chunk

NONE = "None"  # the LLM API layout's finish reason until the end


@dataclass(frozen=True)
class TextModel:
    """What a model calls its inputs, and the form of its answers.

    Attributes
    ----------
    names : mapping
        The model's names of the fields of GenerateOptions, where they differ.
    flags : mapping
        Inputs that every request has, so that the answer has what kvseek's clients show.
    batched : bool
        Whether the first dimension of tensors is the batch.
    repeats_text : bool
        Whether each response of a stream has the whole text so far.
    """

    name: str
    names: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    batched: bool = True
    repeats_text: bool = False

    def inputs(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's inputs by the model's names."""
        return {self.names.get(name, name): value for name, value in fields.items()} | dict(self.flags)

    def is_among(self, inputs: Collection[str]) -> bool:
        """Whether a model of this name with these inputs is the text model of its layout."""
        return {"text_input", self.names.get("max_tokens", "max_tokens")} <= set(inputs)

    def pieces(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks of a stream with nothing but new text; closes `chunks` at the end."""
        received = 0
        with closing(chunks):  # type: ignore[type-var]
            for chunk in chunks:
                if not self.repeats_text:
                    yield chunk
                    continue
                reason = "" if chunk.finish_reason == NONE else chunk.finish_reason
                yield replace(chunk, text=chunk.text[received:], finish_reason=reason)
                received = max(received, len(chunk.text))


BLS = TextModel("tensorrt_llm_bls")
LLMAPI = TextModel(
    "tensorrt_llm",
    {
        "stream": "streaming",
        "max_tokens": "sampling_param_max_tokens",
        "temperature": "sampling_param_temperature",
        "top_k": "sampling_param_top_k",
        "top_p": "sampling_param_top_p",
        "seed": "sampling_param_seed",
        "stop_words": "sampling_param_stop",
        "exclude_input_in_output": "sampling_param_exclude_input_from_output",
    },
    {"return_finish_reason": True, "return_attended_tokens": True},
    batched=False,
    repeats_text=True,
)
TEXT_MODELS = {"inflight_batcher_llm": BLS, "llmapi": LLMAPI}
