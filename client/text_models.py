"""The text models that kvseek's clients ask, one in each layout of the model repository, and the options of a request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .chunk import Chunk

REPLY_SECONDS = 600.0  # longest silence of a server: it may have to read a prompt of a million tokens


def bearer(api_key: str) -> dict[str, str]:
    """Return the header, of HTTP or gRPC, that has an API key; none for an empty one."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


@dataclass(frozen=True)
class GenerateOptions:
    """Fields of a request besides its text; None leaves the server's default (greedy decoding, the model's end ids)."""

    max_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    end_id: int | None = None
    stop_words: tuple[str, ...] = ()
    apply_chat_template: bool = False
    return_prefill_progress: bool = False
    cache_salt: str | None = None
    session_id: str | None = None
    retention_priority: int | None = None
    retention_seconds: float | None = None

    def fields(self, text_input: str, stream: bool) -> dict[str, Any]:
        """Return the inputs of tensorrt_llm_bls by name (other models: TextModel.names), without None and empty ones."""
        # TensorRT-LLM's models draw the likeliest token, whatever the temperature is, unless top_k or top_p says otherwise.
        only_temperature = bool(self.temperature) and not self.top_k and not self.top_p
        values = {
            "text_input": text_input,
            **asdict(self),
            "top_p": 1.0 if only_temperature else self.top_p,
            "stop_words": list(self.stop_words) or None,
            "exclude_input_in_output": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
            "stream": stream,
        }
        return {name: value for name, value in values.items() if value is not None}


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
