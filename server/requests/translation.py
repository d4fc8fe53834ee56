"""Translates tensors of the tensorrt_llm model to engine requests. Pure functions on NumPy arrays: no Triton here.

Names, types and defaults are those of TensorRT-LLM's Triton models, so that clients written for them work unchanged.
An input that kvseek does not support is accepted at its neutral value and refused at any other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kvseek.core.errors import RequestError
from kvseek.core.request import DEFAULT_PRIORITY, Request, SamplingParams

Tensors = Mapping[str, NDArray[Any]]

MAX_STOP_WORDS = 64  # most stop words as token ids; the text model takes as many as texts

# Inputs of TensorRT-LLM's models that kvseek does not support, and the values at which they have no effect.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "min_length": (0, 1),
    "len_penalty": (0.0, 1.0),
    "length_penalty": (0.0, 1.0),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "return_log_probs": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
}


def scalar(tensors: Tensors, name: str, default: Any = None) -> Any:
    """Return a tensor's one value as a Python object, `default` if the tensor is absent; raises RequestError on several."""
    if name not in tensors:
        return default
    if tensors[name].size != 1:
        raise RequestError(f"{name} has {tensors[name].size} values: must be 1; send one request per prompt")
    return tensors[name].reshape(-1)[0].item() if tensors[name].dtype != object else tensors[name].reshape(-1)[0]


def refuse_unsupported(tensors: Tensors) -> None:
    """Raise RequestError if an unsupported input has another value than its neutral values."""
    for name, neutral in NEUTRAL.items():
        value = scalar(tensors, name, neutral[0])
        if value not in neutral:
            wanted = " or ".join(repr(v) for v in neutral)
            raise RequestError(f"{name} = {value!r}: must be {wanted}; kvseek does not support it, leave it out")


@dataclass(frozen=True)
class Parameters:
    """Parameters of a request to a model of Triton: information about the request that is not in its tensors.

    Attributes
    ----------
    traceparent : str
        W3C trace context of the client, or empty.
    kvseek_call : str
        The gRPC door's name of the client's call, or empty. Clients cannot send it.
    kvseek_leave : bool
        Whether this request tells that the client of that call has left, so that its requests end. The tensors mean nothing.
    """

    traceparent: str = ""
    kvseek_call: str = ""
    kvseek_leave: bool = False


def read_parameters(parameters: str, model: str) -> Parameters:
    """Read the parameters of a request to `model` from their JSON object.

    Raises RequestError on an unknown parameter or a wrong type, so that nothing that a client asks for is ignored.
    """
    values = json.loads(parameters or "{}")
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Parameters)}
    for name in sorted(values):
        if name not in kinds:
            raise RequestError(f"{name}: {model} has no such input; check the spelling, or leave it out")
        if not isinstance(values[name], kinds[name]):
            raise RequestError(f"{name} = {values[name]!r}: must be a {kinds[name].__name__}; convert it")
    return Parameters(**values)


def sampling_params(tensors: Tensors, top_k: str = "runtime_top_k", top_p: str = "runtime_top_p") -> SamplingParams:
    """Read the sampling parameters; absent tensors mean the same as in TensorRT-LLM.

    Greedy unless a temperature, top_k or top_p is given; with one of them the absent temperature is 1.
    """
    given = [name for name in ("temperature", top_k, top_p) if name in tensors]
    default = 1.0 if given else 0.0
    seed = scalar(tensors, "seed", scalar(tensors, "random_seed", 0))
    return SamplingParams(
        temperature=float(scalar(tensors, "temperature", default)),
        top_k=scalar(tensors, top_k, 0),
        top_p=float(scalar(tensors, top_p, 1.0)),
        repetition_penalty=float(scalar(tensors, "repetition_penalty", 1.0)),
        seed=seed,
    )


def word_list(tensors: Tensors, name: str) -> tuple[tuple[int, ...], ...]:
    """Read token sequences in TensorRT-LLM's word-list format: int32 [1, 2, n] or [2, n].

    Row 0 has all tokens, one word after the other; row 1 the end of each word in row 0, padded with -1.
    """
    if name not in tensors or tensors[name].size == 0:
        return ()
    rows = tensors[name].reshape(-1, *tensors[name].shape[-2:])
    if rows.shape[:2] != (1, 2):
        raise RequestError(f"{name} has shape {list(tensors[name].shape)}: must be [1, 2, n]; row 0 tokens, row 1 ends")
    tokens, ends = rows[0].tolist()
    words, start = [], 0
    for end in ends:
        if end < 0:
            break
        if not start <= end <= len(tokens):
            raise RequestError(f"{name}: end {end} must be between {start} and {len(tokens)}; ends ascend, -1 pads")
        if end > start:
            words.append(tuple(tokens[start:end]))
        start = end
    if len(words) > MAX_STOP_WORDS:  # every token of the output is compared with all of them
        raise RequestError(f"{name} has {len(words)} words: must be <= {MAX_STOP_WORDS}; send fewer")
    return tuple(words)


def engine_request(tensors: Tensors, default_end_ids: tuple[int, ...]) -> Request:
    """Make the request that the tensors of tensorrt_llm ask for.

    Without `end_id` the model's own end ids end it; end_id -1 turns them off. Raises RequestError.
    """
    refuse_unsupported(tensors)
    if word_list(tensors, "bad_words_list"):
        raise RequestError("bad_words_list: must be empty; kvseek does not support it, leave it out")
    ids = tensors["input_ids"]
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise RequestError(f"input_ids has shape {list(ids.shape)}: must be [1, tokens]; send one request per prompt")
    prompt = ids.reshape(-1)
    length = scalar(tensors, "input_lengths", prompt.size)
    if not 0 <= length <= prompt.size:
        raise RequestError(f"input_lengths = {length}: must be in [0, {prompt.size}], the tokens in input_ids")
    return make_request(
        tensors,
        prompt[:length].tolist(),
        "request_output_len",
        sampling_params(tensors),
        end_ids(tensors, default_end_ids),
        word_list(tensors, "stop_words_list"),
    )


def end_ids(tensors: Tensors, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that end a request: `end_id`, none if that is -1, and `default` if it is absent."""
    end_id = scalar(tensors, "end_id")
    if end_id is None:
        return default
    return () if end_id == -1 else (end_id,)


def make_request(
    tensors: Tensors,
    prompt_ids: Sequence[int],
    max_tokens: str,
    sampling: SamplingParams,
    ends: tuple[int, ...],
    stop_words: tuple[tuple[int, ...], ...] = (),
) -> Request:
    """Make a request of the engine; `max_tokens` names the input that has this number. Raises RequestError."""
    if max_tokens not in tensors:
        raise RequestError(f"{max_tokens} is missing; say how many tokens to generate at most")
    seconds = scalar(tensors, "timeout")
    return Request(
        prompt_ids=tuple(prompt_ids),
        max_tokens=scalar(tensors, max_tokens),
        sampling=sampling,
        end_ids=ends,
        stop_words=stop_words,
        priority=scalar(tensors, "priority", DEFAULT_PRIORITY),
        timeout_seconds=None if seconds is None else float(seconds),
    )


def text(value: object, name: str) -> str:
    """Decode a string element; raises RequestError if it is not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")  # type: ignore[call-overload, no-any-return]
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name}: byte {error.start} ({error.object[error.start]:#04x}) is not UTF-8; send the text encoded as UTF-8"
        ) from None


def texts(tensors: Tensors, name: str) -> tuple[str, ...]:
    """Return the non-empty strings of a tensor."""
    values = tensors[name].reshape(-1).tolist() if name in tensors else []
    return tuple(decoded for value in values if (decoded := text(value, name)))
