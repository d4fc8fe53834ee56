"""The forms that TensorRT-LLM's repository of Triton models has: the models of each, and how kvseek serves them.

The names of layouts are those of TensorRT-LLM's own folders, triton_backend/all_models/LAYOUT, and of the folders in
model_repository/. A request's inputs make a request of the engine in the same way at every port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, TimeoutExpiredError, renamed
from kvseek.core.request import Request
from kvseek.engine.tokenizer import Tokenizer

from .outputs import LlmApiRequest, ServedRequest, TextRequest, TokenRequest
from .translation import Inputs, as_text_model, engine_request, numbered, sequences, text_request

SEVERAL = ("stream", "streaming", "return_prefill_progress")  # inputs that ask for several responses to one prompt
MAX_ID_CHARACTERS = 256  # most characters of a client's id of its request
# Most logits of an answer in JSON, which takes 20 bytes and 0.4 µs for each.
MAX_JSON_LOGITS = 1 << 20


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
        Makes the sequences of one prompt from its inputs; raises RequestError on any input that cannot be served.
    """

    name: str
    prompt: str
    takes_text: bool
    batched: bool
    kind: type[TokenRequest]
    sequences: Callable[[Inputs, Tokenizer, EngineConfig], Sequence[ServedRequest]]


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


def _tokens(inputs: Inputs, _: Tokenizer, config: EngineConfig) -> list[TokenRequest]:
    request = engine_request(inputs, config.model.eos_token_ids)
    return [TokenRequest(numbered(request, number), inputs) for number in range(sequences(inputs))]


def _texts(
    inputs: Inputs, tokenizer: Tokenizer, config: EngineConfig, kind: type[TextRequest] = TextRequest
) -> list[TextRequest]:
    count = sequences(inputs)
    request, prompt, stop_words = text_request(inputs, tokenizer, config)
    return [kind(numbered(request, number), prompt, stop_words, inputs, tokenizer) for number in range(count)]


def _llmapi(inputs: Inputs, tokenizer: Tokenizer, config: EngineConfig) -> list[TextRequest]:
    return _texts(as_text_model(inputs), tokenizer, config, LlmApiRequest)


TOKEN_MODEL = ServedModel(
    "tensorrt_llm",
    prompt="input_ids",
    takes_text=False,
    batched=True,
    kind=TokenRequest,
    sequences=_tokens,
)
TEXT_MODEL = ServedModel(
    "tensorrt_llm_bls", prompt="text_input", takes_text=True, batched=True, kind=TextRequest, sequences=_texts
)
LLMAPI_MODEL = ServedModel(
    "tensorrt_llm", prompt="text_input", takes_text=True, batched=False, kind=LlmApiRequest, sequences=_llmapi
)
INFLIGHT_BATCHER_LLM = Layout(
    "inflight_batcher_llm",
    {model.name: model for model in (TOKEN_MODEL, TEXT_MODEL)},
    {"ensemble": TEXT_MODEL.name},
)
LLMAPI = Layout("llmapi", {LLMAPI_MODEL.name: LLMAPI_MODEL})
LAYOUTS = {layout.name: layout for layout in (INFLIGHT_BATCHER_LLM, LLMAPI)}


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


def after(request: Request, seconds: float) -> Request:
    """Note the `seconds` that a request has spent at a frontend; raises TimeoutExpiredError if its time limit has passed."""
    limit = request.timeout_seconds
    if limit is not None and 0 < limit <= seconds:  # of a limit that is not above 0 the engine says what is wrong
        raise TimeoutExpiredError(
            f"timeout = {limit:g} s: passed before the request was tokenised, after {seconds:.1f} s; "
            "send it again later, or with a longer timeout"
        )
    return replace(request, waited_seconds=seconds)
