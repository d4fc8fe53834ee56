"""The forms that TensorRT-LLM's repository of Triton models has: the models of each, and how kvseek serves them.

The names of layouts are those of TensorRT-LLM's own folders, triton_backend/all_models/LAYOUT, and of the folders in
model_repository/. A request's inputs make a request of the engine in the same way at every port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvseek.core.config import EngineConfig
from kvseek.engine.tokenizer import Tokenizer

from .llmapi_request import LlmApiRequest, llmapi_requests
from .text_request import TextRequest, text_requests
from .token_request import TokenRequest, token_requests
from .translation import Inputs


@dataclass(frozen=True)
class ServedModel:
    """A model that clients of Triton ask.

    Attributes
    ----------
    prompt : str
        The input that has the prompt.
    takes_text : bool
        Whether the prompt is text, which has to be tokenised, or token ids.
    batched : bool
        Whether the first dimension of clients' tensors is the batch, and responses have `batch_index` and `sequence_index`.
    kind : type
        Class of its requests, whose `names` are the inputs by the names of the engine's errors.
    sequences : callable
        Makes the sequences of one prompt from tensors, [1, ...] each; raises RequestError on any input that cannot be served.
    """

    name: str
    prompt: str
    takes_text: bool
    batched: bool
    kind: type[TextRequest | TokenRequest]
    sequences: Callable[[Inputs, Tokenizer, EngineConfig], Sequence[TextRequest | TokenRequest]]


@dataclass(frozen=True)
class Layout:
    """One form of the repository: the models, by name, and other names under which TensorRT-LLM's clients ask for them."""

    name: str
    models: Mapping[str, ServedModel]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """All names under which clients may ask, and the models' own."""
        return {name: name for name in self.models} | dict(self.aliases)


TOKEN_MODEL = ServedModel(
    "tensorrt_llm",
    prompt="input_ids",
    takes_text=False,
    batched=True,
    kind=TokenRequest,
    sequences=lambda inputs, _, config: token_requests(inputs, config.model.eos_token_ids),
)
TEXT_MODEL = ServedModel(
    "tensorrt_llm_bls", prompt="text_input", takes_text=True, batched=True, kind=TextRequest, sequences=text_requests
)
LLMAPI_MODEL = ServedModel(
    "tensorrt_llm", prompt="text_input", takes_text=True, batched=False, kind=LlmApiRequest, sequences=llmapi_requests
)
INFLIGHT_BATCHER_LLM = Layout(
    "inflight_batcher_llm",
    {model.name: model for model in (TOKEN_MODEL, TEXT_MODEL)},
    {"ensemble": TEXT_MODEL.name},
)
LLMAPI = Layout("llmapi", {LLMAPI_MODEL.name: LLMAPI_MODEL})
LAYOUTS = {layout.name: layout for layout in (INFLIGHT_BATCHER_LLM, LLMAPI)}
