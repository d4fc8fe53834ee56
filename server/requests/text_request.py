"""One request of the text model: makes a request of the engine from text, and text from its tokens. No Triton here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError
from kvseek.core.request import FinishReason, Request, StepOutput, check_words
from kvseek.engine.text_output import TextOutput
from kvseek.engine.tokenizer import Tokenizer

from .log_probs import RunningLogProbs
from .logits import RunningLogits
from .perf_metrics import PerfMetrics
from .translation import (
    Inputs,
    end_ids,
    make_request,
    numbered,
    refuse_unsupported,
    sampling_params,
    scalar,
    sequences,
    text,
    texts,
)

# Inputs of the text model, by the names of the engine's errors. A bias is out of range by its weight.
NAMES = {
    "input_ids": "text_input",
    "messages": "text_input",
    "bad_words_list": "bad_words",
    "logit_bias": "embedding_bias_weights",
}
CHARACTERS_PER_TOKEN = 8  # more than most texts have


class PromptTooLongError(RequestError):
    """A prompt has more tokens than max_input_len."""


def max_text_bytes(config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Return the bytes of UTF-8 beyond which a text certainly has more tokens than max_input_len."""
    return config.max_input_len * tokenizer.longest_token_bytes


class TextRequest:
    """See ServedRequest. A stop word is found in the text, whatever tokens it is spelt with, and is not part of the output."""

    names: Mapping[str, str] = NAMES
    repeats_text = False  # whether each response of a stream has the text of those before it too

    def __init__(
        self, request: Request, prompt: str, stop_words: tuple[str, ...], inputs: Inputs, tokenizer: Tokenizer
    ) -> None:
        self.request = request
        self.streaming = bool(scalar(inputs, "stream", False))
        self.ended = False
        self._wants = {
            name: bool(scalar(inputs, name, False))
            for name in ("return_prefill_progress", "return_num_input_tokens", "return_num_output_tokens")
        }
        echo = not self.streaming and not scalar(inputs, "exclude_input_in_output", False)
        self._text = prompt if echo else ""
        self._output = TextOutput(tokenizer, request.prompt_ids, stop_words)
        self._log_probs, self._metrics = RunningLogProbs(request), PerfMetrics(inputs)
        self._logits = RunningLogits(request)

    def push(self, output: StepOutput) -> Iterator[dict[str, Any]]:
        """See ServedRequest."""
        self._logits.push(output)
        if output.token_id is None and output.finish_reason is None:
            if self._wants["return_prefill_progress"]:
                yield self._chunk("", "", output)
            return
        if self.ended:
            return  # tokens drawn before the cancellation arrived
        self._log_probs.push(output)
        self._metrics.push(output)
        self._text += self._output.push(output)
        reason = self._output.finish_reason
        self.ended = reason is FinishReason.STOP_WORD
        if self.streaming or reason is not None:
            yield self._chunk(self._text, reason or "", output) | self._logits.take()
            if not self.repeats_text:
                self._text = ""

    def _chunk(self, text_output: str, reason: str, output: StepOutput) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "text_output": text_output,
            "finish_reason": reason,
            "cached_tokens": output.cached_tokens,
            "attended_tokens": output.attended_tokens,
            "prefill_progress": output.prefill_progress,
            **self._log_probs.take(),
            **self._metrics.outputs(),
        }
        if self._wants["return_num_input_tokens"]:
            chunk["num_input_tokens"] = len(self.request.prompt_ids)
        if self._wants["return_num_output_tokens"]:
            chunk["num_output_tokens"] = len(self._output.token_ids)
        return chunk


def text_requests(
    inputs: Inputs, tokenizer: Tokenizer, config: EngineConfig, kind: type[TextRequest] = TextRequest
) -> list[TextRequest]:
    """Make the sequences that inputs ask for; raises RequestError on any input that cannot be served."""
    refuse_unsupported(inputs)
    bad_words = tuple(
        spelling
        for word in check_words("bad_words", texts(inputs, "bad_words"))
        for spelling in tokenizer.spellings(word)
    )
    sampling = sampling_params(inputs, "top_k", "top_p", bad_words, _logit_bias(inputs, tokenizer))
    count = sequences(inputs)
    stop_words = check_words("stop_words", texts(inputs, "stop_words"))  # refused before the prompt is tokenised
    prompt = _prompt(inputs, max_text_bytes(config, tokenizer))
    use_template = bool(scalar(inputs, "apply_chat_template", False))
    if use_template:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    prompt_ids = encode_prompt(tokenizer, prompt, not use_template, config.max_input_len)
    ends = end_ids(inputs, config.model.eos_token_ids)
    request = make_request(inputs, prompt_ids, "max_tokens", sampling, ends)
    return [kind(numbered(request, number), prompt, stop_words, inputs, tokenizer) for number in range(count)]


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


def encode_prompt(
    tokenizer: Tokenizer, prompt: str, add_special_tokens: bool, max_tokens: int, name: str = "text_input"
) -> list[int]:
    """Tokenise a prompt, the value of input `name`; raises RequestError, PromptTooLongError for too many tokens.

    A prompt with far too many tokens is refused by its beginning, as tokenising all of it could take a minute.
    """
    size = CHARACTERS_PER_TOKEN * max_tokens
    while size < len(prompt):
        tokens = len(tokenizer.encode(prompt[:size], add_special_tokens))
        if tokens > max_tokens + max_tokens // 8 + 8:  # the cut may split one token into several
            raise PromptTooLongError(
                f"{name} has {tokens:,} tokens in its first {size:,} of {len(prompt):,} characters: "
                f"must be <= max_input_len = {max_tokens} in all; shorten it or build with a larger max_input_len"
            )
        size *= 2
    return tokenizer.encode(prompt, add_special_tokens)
