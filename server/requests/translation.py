"""Translates inputs of TensorRT-LLM's Triton models to requests of the engine. Pure functions on lists: no tensors here.

Names, types and defaults are those of TensorRT-LLM's Triton models, so that clients written for them work unchanged.
An input that kvseek does not support is accepted at its neutral value and refused at any other.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from kvseek.core.config import EngineConfig
from kvseek.core.errors import SHOWN_CHARACTERS, RequestError
from kvseek.core.guide import KINDS, Guide, GuideType
from kvseek.core.request import (
    DEFAULT_PRIORITY,
    MAX_SEED,
    MAX_STOP_WORDS,
    Request,
    SamplingConfig,
    Session,
    check_words,
    read_session,
)
from kvseek.engine.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]  # tokenises a text
Inputs = Mapping[str, list[Any]]  # values of each input of one prompt, in order, whatever its shape

MAX_SEQUENCES = 8  # most sequences of a prompt: num_return_sequences
CHARACTERS_PER_TOKEN = 8  # more than most texts have
DEFAULT_MAX_TOKENS = 32  # of the LLM API layout's model

# Inputs of each model, by the names of the engine's errors. A bias is out of range by its weight.
TOKEN_NAMES = {"max_tokens": "request_output_len", "top_k": "runtime_top_k", "top_p": "runtime_top_p"}
TEXT_NAMES = {
    "input_ids": "text_input",
    "messages": "text_input",
    "bad_words_list": "bad_words",
    "logit_bias": "embedding_bias_weights",
}
LLMAPI_INPUTS = {  # inputs of the LLM API layout's model that the text model has under another name
    "streaming": "stream",
    "sampling_param_temperature": "temperature",
    "sampling_param_top_k": "top_k",
    "sampling_param_top_p": "top_p",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "sampling_param_presence_penalty": "presence_penalty",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_stop": "stop_words",
    "sampling_param_seed": "seed",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
    "sampling_param_return_perf_metrics": "return_perf_metrics",
    "return_cumulative_logprob": "return_log_probs",
}
LLMAPI_NAMES = TEXT_NAMES | {text_name: own for own, text_name in LLMAPI_INPUTS.items()}

# Inputs of TensorRT-LLM's models that kvseek does not support, and the values at which they have no effect.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "beam_width": (1,),
    "len_penalty": (0.0, 1.0),
    "length_penalty": (0.0, 1.0),
}
LLMAPI_NEUTRAL: dict[str, tuple[object, ...]] = {
    "image_url": ("",),
    "sampling_param_best_of": (1, 0),
    "sampling_param_logits_post_processor_name": ("",),
    "lora_id": (),
    "lora_name": ("",),
    "lora_path": ("",),
    "lora_ckpt_source": ("",),
}


class PromptTooLongError(RequestError):
    """A prompt has more tokens than max_input_len."""


def scalar(inputs: Inputs, name: str, default: Any = None) -> Any:
    """Return an input's one value, `default` if it is absent; raises RequestError on several."""
    given = inputs.get(name)
    if given is None:
        return default
    if len(given) != 1:
        raise RequestError(f"{name} has {len(given)} values: must be 1 for each prompt; send one")
    return given[0]


def refuse_unsupported(inputs: Inputs, neutral_values: Mapping[str, tuple[object, ...]] = NEUTRAL) -> None:
    """Raise RequestError if an unsupported input is given with another value than its neutral values."""
    for name, neutral in neutral_values.items():
        for value in inputs.get(name, ()):
            plain = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if plain not in neutral:
                shown = repr(plain)[:SHOWN_CHARACTERS]
                wanted = " or ".join(repr(v) for v in neutral) or "absent"
                raise RequestError(f"{name} = {shown}: must be {wanted}; kvseek does not support it, leave it out")


@dataclass(frozen=True)
class Parameters:
    """Parameters of a request to a model of Triton: information about the request that is not in its tensors.

    Attributes
    ----------
    traceparent : str
        W3C trace context of the client, or empty.
    Streaming : bool
        What NVIDIA's clients send beside the input `streaming`, which decides.
    authorization : str
        `Bearer KEY`, where clients reach the model without kvseek's gRPC port in between, or empty.
    kvseek_call : str
        The gRPC port's name of the client's call, or empty. Clients cannot send it.
    kvseek_owner : str
        Whose requests may stop this one: a name of the client's API key, or else of its connection. Clients cannot send it.
    kvseek_secret : str
        Hexadecimal digits of the secret of the request's Tenant, or empty. Clients cannot send it.
    kvseek_leave : bool
        Whether this request tells that the client of that call has left, so that its requests end. The tensors mean nothing.
    """

    traceparent: str = ""
    Streaming: bool = False
    authorization: str = ""
    kvseek_call: str = ""
    kvseek_owner: str = ""
    kvseek_secret: str = ""
    kvseek_leave: bool = False


def read_parameters(parameters: str, model: str) -> Parameters:
    """Read the parameters of a request to `model` from their JSON object.

    Raises RequestError on an unknown parameter or a wrong type, so that nothing that a client asks for is ignored.
    """
    values = json.loads(parameters or "{}")
    if "Authorization" in values:  # HTTP's header as its client has written it, if Triton forwards it
        values["authorization"] = values.pop("Authorization")
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Parameters)}
    for name in sorted(values):
        if name not in kinds:
            raise RequestError(f"{name}: {model} has no such input; check the spelling, or leave it out")
        if not isinstance(values[name], kinds[name]):
            raise RequestError(f"{name} = {values[name]!r}: must be a {kinds[name].__name__}; convert it")
    return Parameters(**values)


def sampling_params(
    inputs: Inputs,
    top_k: str = "runtime_top_k",
    top_p: str = "runtime_top_p",
    bad_words: tuple[tuple[int, ...], ...] = (),
    logit_bias: tuple[tuple[int, float], ...] = (),
) -> SamplingConfig:
    """Read the sampling parameters; absent inputs, and numbers that turn something off, mean the same as in TensorRT-LLM.

    There top_k 0 and top_p 0, the defaults, are off. With both off, and min_p, the likeliest token is drawn, whatever the
    temperature is. `top_k` and `top_p` name the inputs that have these numbers.
    """
    k, p, min_p = (scalar(inputs, name, 0) for name in (top_k, top_p, "min_p"))
    greedy = k == 1 or (k == 0 and p == 0 and min_p == 0)
    shortest = max(scalar(inputs, "min_tokens", 0), scalar(inputs, "min_length", 0))
    params = SamplingConfig(
        temperature=scalar(inputs, "temperature", 1.0),
        top_k=k,
        top_p=1.0 if p == 0 else p,
        repetition_penalty=scalar(inputs, "repetition_penalty", 1.0),
        seed=scalar(inputs, "seed", scalar(inputs, "random_seed", 0)),
        presence_penalty=scalar(inputs, "presence_penalty", 0.0),
        frequency_penalty=scalar(inputs, "frequency_penalty", 0.0),
        prompt_ignore_length=max(0, scalar(inputs, "prompt_ignore_length", 0)),
        min_tokens=max(0, shortest),
        bad_words=bad_words,
        logit_bias=logit_bias,
        logprobs=0 if scalar(inputs, "return_log_probs", False) else None,
        guide=_guide(inputs),
        return_context_logits=bool(scalar(inputs, "return_context_logits", False)),
        return_generation_logits=bool(scalar(inputs, "return_generation_logits", False)),
        min_p=min_p,
        forced_tokens=tuple(token for token in inputs.get("forced_tokens", ()) if token != -1),  # -1 pads
    )
    return dataclasses.replace(params, temperature=0.0, top_k=0) if greedy else params


def _guide(inputs: Inputs) -> Guide | None:
    """Read what the output has to follow, if anything; empty texts are the same as absent ones."""
    kind, guide = (
        text(scalar(inputs, name, ""), name) for name in ("guided_decoding_guide_type", "guided_decoding_guide")
    )
    if guide and not kind:
        raise RequestError(f"guided_decoding_guide_type is missing: must be one of {KINDS}; say what the guide is")
    if kind == GuideType.LARK:
        raise RequestError(f"guided_decoding_guide_type = {kind}: must be one of {KINDS}; correct it")
    return Guide(cast("GuideType", kind), guide) if kind else None  # Guide makes it one, or refuses it


def sequences_of(inputs: Inputs, request: Request) -> list[Request]:
    """Make the requests of all sequences of a prompt; raises RequestError."""
    count: int = scalar(inputs, "num_return_sequences", 1)
    if not 1 <= count <= MAX_SEQUENCES:
        raise RequestError(f"num_return_sequences = {count}: must be in [1, {MAX_SEQUENCES}]; send several requests")
    return with_own_seeds(request, count)


def with_own_seeds(request: Request, count: int) -> list[Request]:
    """Make `count` requests of one, each with a seed of its own: with one seed all of their answers would be equal."""
    seeds = ((request.sampling.seed + number) & MAX_SEED for number in range(count))
    drawn = (dataclasses.replace(request.sampling, seed=seed) for seed in seeds)
    return [dataclasses.replace(request, sampling=sampling) for sampling in drawn]


def word_list(inputs: Inputs, name: str) -> tuple[tuple[int, ...], ...]:
    """Read token sequences in TensorRT-LLM's word-list format, [2, n] numbers.

    The first half has all tokens, one word after the other; the second the end of each word in the first, padded with -1.
    """
    given = inputs.get(name, [])
    tokens, ends = given[: len(given) // 2], given[len(given) // 2 :]
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


def engine_request(inputs: Inputs, default_end_ids: tuple[int, ...]) -> Request:
    """Make the request that the inputs of tensorrt_llm ask for.

    Without `end_id` the model's own end ids end it; end_id -1 turns them off. Raises RequestError.
    """
    refuse_unsupported(inputs)
    prompt = inputs["input_ids"]
    length = scalar(inputs, "input_lengths", len(prompt))
    if not 0 <= length <= len(prompt):
        raise RequestError(f"input_lengths = {length}: must be in [0, {len(prompt)}], the tokens in input_ids")
    return make_request(
        inputs,
        prompt[:length],
        "request_output_len",
        sampling_params(inputs, bad_words=word_list(inputs, "bad_words_list")),
        end_ids(inputs, default_end_ids),
        word_list(inputs, "stop_words_list"),
    )


def end_ids(inputs: Inputs, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that end a request: `end_id`, none if that is -1, and `default` if it is absent."""
    end_id = scalar(inputs, "end_id")
    if end_id is None:
        return default
    return () if end_id == -1 else (end_id,)


def make_request(
    inputs: Inputs,
    prompt_ids: Sequence[int],
    max_tokens: str,
    sampling: SamplingConfig,
    ends: tuple[int, ...],
    stop_words: tuple[tuple[int, ...], ...] = (),
) -> Request:
    """Make a request of the engine; `max_tokens` names the input that has this number. Raises RequestError."""
    if max_tokens not in inputs:
        raise RequestError(f"{max_tokens} is missing; say how many tokens to generate at most")
    return Request(
        prompt_ids=tuple(prompt_ids),
        max_tokens=scalar(inputs, max_tokens),
        sampling=sampling,
        end_ids=ends,
        stop_words=stop_words,
        priority=scalar(inputs, "priority", DEFAULT_PRIORITY),
        timeout_seconds=scalar(inputs, "timeout"),
        cache_salt=_name(inputs, "cache_salt"),
        session=_session(inputs),
        speculate=bool(scalar(inputs, "speculate", True)),
    )


def _session(inputs: Inputs) -> Session | None:
    priority, seconds = (scalar(inputs, name) for name in ("retention_priority", "retention_seconds"))
    return read_session(_name(inputs, "session_id"), priority, seconds)


def _name(inputs: Inputs, name: str) -> str | None:
    """Read a client's name for something; None if it is absent, or empty as in a batch whose other prompts have one."""
    return text(scalar(inputs, name, ""), name) or None


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


def texts(inputs: Inputs, name: str) -> tuple[str, ...]:
    """Return the non-empty strings of an input."""
    return tuple(decoded for value in inputs.get(name, ()) if (decoded := text(value, name)))


def text_request(inputs: Inputs, tokenizer: Tokenizer, config: EngineConfig) -> tuple[Request, str, tuple[str, ...]]:
    """Make the request that the inputs of the text model ask for.

    Tokenises, which may take long. Returns the request, the prompt's text and the words that end the answer; raises RequestError.
    """
    refuse_unsupported(inputs)
    bad_words = tuple(
        spelling
        for word in check_words("bad_words", texts(inputs, "bad_words"))
        for spelling in tokenizer.spellings(word)
    )
    sampling = sampling_params(inputs, "top_k", "top_p", bad_words, _logit_bias(inputs, tokenizer))
    stop_words = check_words("stop_words", texts(inputs, "stop_words"))  # refused before the prompt is tokenised
    prompt = _prompt(inputs, max_text_bytes(config, tokenizer))
    use_template = bool(scalar(inputs, "apply_chat_template", False))
    if use_template:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    encode = partial(tokenizer.encode, add_special_tokens=not use_template)
    prompt_ids = encode_prompt(encode, prompt, config.max_input_len)
    ends = end_ids(inputs, config.model.eos_token_ids)
    return make_request(inputs, prompt_ids, "max_tokens", sampling, ends), prompt, stop_words


def max_text_bytes(config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Return the bytes of UTF-8 beyond which a text certainly has more tokens than max_input_len."""
    return config.max_input_len * tokenizer.longest_token_bytes


def _logit_bias(inputs: Inputs, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Read biases: each token of a word, however the word is spelt, gets the word's weight; several weights add up.

    Empty words, which fill up the rows of a batch, count for nothing.
    """
    check_words("embedding_bias_words", texts(inputs, "embedding_bias_words"))
    words, weights = (inputs.get(f"embedding_bias_{name}", []) for name in ("words", "weights"))
    if len(words) != len(weights):
        raise RequestError(
            f"embedding_bias_weights has {len(weights)} numbers: must be {len(words)}, one for each of embedding_bias_words; "
            "send as many"
        )
    biases: Counter[int] = Counter()
    for value, weight in zip(words, weights, strict=True):
        word = text(value, "embedding_bias_words")  # empty: rows of a batch are as long as the longest
        spelt = {token for spelling in tokenizer.spellings(word) for token in spelling} if word else set()
        # A space inside of the word belongs to every text, and is not meant.
        for token in spelt:
            if word.isspace() or not tokenizer.token_bytes(token).isspace():
                biases[token] += weight
    return tuple(biases.items())


def _prompt(inputs: Inputs, limit: int) -> str:
    """Read the text of a request; raises by its bytes, as tokenising a text that cannot fit would take minutes and gigabytes."""
    value = scalar(inputs, "text_input")
    size = len(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
    if size > limit:
        raise RequestError(
            f"text_input has {size:,} bytes: must be <= {limit:,}, max_input_len tokens of the tokenizer's longest; shorten it"
        )
    prompt = text(value, "text_input")
    if not prompt:
        raise RequestError("text_input is empty: must be at least one character; send a prompt")
    return prompt


def encode_prompt(encode: Encode, prompt: str, max_tokens: int, name: str = "text_input") -> list[int]:
    """Tokenise a prompt, the value of input `name`; raises RequestError, PromptTooLongError for too many tokens.

    A prompt with far too many tokens is refused by its beginning, as tokenising all of it could take a minute.
    """
    size = CHARACTERS_PER_TOKEN * max_tokens
    while size < len(prompt):
        tokens = len(encode(prompt[:size]))
        if tokens > max_tokens + max_tokens // 8 + 8:  # the cut may split one token into several
            raise PromptTooLongError(
                f"{name} has {tokens:,} tokens in its first {size:,} of {len(prompt):,} characters: "
                f"must be <= max_input_len = {max_tokens} in all; shorten it or build with a larger max_input_len"
            )
        size *= 2
    return encode(prompt)


def as_text_model(inputs: Inputs) -> Inputs:
    """Give inputs of the LLM API layout's model the text model's names, and values that mean there what these mean here.

    Names, defaults and the values that switch something off are those of TensorRT-LLM's model (triton_backend/all_models/llmapi,
    and tensorrt_llm/sampling_params.py, which gives an absent input its meaning).

    Here a token is drawn at random if temperature, top_k, top_p or min_p is given, unless one of them leaves no choice:
    temperature 0, top_k 1 or top_p 0. In the text model top_p 0 is off, and a temperature alone does not suffice.
    """
    refuse_unsupported(inputs, LLMAPI_NEUTRAL)
    made = {LLMAPI_INPUTS.get(name, name): given for name, given in inputs.items()}
    made.setdefault("max_tokens", [DEFAULT_MAX_TOKENS])
    temperature, top_k, top_p = (scalar(made, name) for name in ("temperature", "top_k", "top_p"))
    if top_p == 0 and (top_k is None or top_k >= 0):
        made["top_k"] = [1]
    elif top_p is None and not top_k and (temperature, top_k) != (None, None):
        made["top_p"] = [1.0]
    return made
