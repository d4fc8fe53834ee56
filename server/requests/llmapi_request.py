"""One request of the LLM API layout's model: its inputs become those of the text model, and its outputs have other names.

Names, defaults and the values that switch something off are those of TensorRT-LLM's model (triton_backend/all_models/llmapi,
and tensorrt_llm/sampling_params.py, which gives an absent input its meaning).
"""

from __future__ import annotations

from typing import Any

from kvseek.core.config import EngineConfig
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.engine.tokenizer import Tokenizer

from .text_request import NAMES as TEXT_NAMES
from .text_request import TextRequest, text_requests
from .translation import Inputs, refuse_unsupported, scalar

DEFAULT_MAX_TOKENS = 32
NAMES = {  # inputs that the text model has under another name
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
OWN_NAMES = TEXT_NAMES | {text_name: own for own, text_name in NAMES.items()}  # by the names of the engine's errors
NEUTRAL: dict[str, tuple[object, ...]] = {  # see refuse_unsupported
    "image_url": ("",),
    "sampling_param_best_of": (1, 0),
    "sampling_param_logits_post_processor_name": ("",),
    "lora_id": (),
    "lora_name": ("",),
    "lora_path": ("",),
    "lora_ckpt_source": ("",),
}
ASKED_FOR = {  # outputs that a response has only if this input is true
    "finish_reason": "return_finish_reason",
    "stop_reason": "return_stop_reason",
    "cached_tokens": "return_attended_tokens",
    "attended_tokens": "return_attended_tokens",
    "prefill_progress": "return_prefill_progress",
}
FINISH_REASONS: dict[str, str] = {FinishReason.END_ID: "stop", FinishReason.STOP_WORD: "stop"}  # others: kvseek's names
NONE = "None"  # what stands for a reason until there is one


class LlmApiRequest(TextRequest):
    """See ServedRequest. As TensorRT-LLM's, each response of a stream has the whole text so far, without the prompt."""

    names = OWN_NAMES
    repeats_text = True

    def __init__(
        self, request: Request, prompt: str, stop_words: tuple[str, ...], inputs: Inputs, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, prompt, stop_words, inputs, tokenizer)
        self._left_out = [name for name, flag in ASKED_FOR.items() if not scalar(inputs, flag, False)]

    def _chunk(self, text_output: str, reason: str, output: StepOutput) -> dict[str, Any]:
        chunk = super()._chunk(text_output, reason, output)
        chunk["finish_reason"] = FINISH_REASONS.get(reason, reason) or NONE
        chunk["stop_reason"] = self._output.stop_word or NONE
        chunk.pop("output_log_probs", None)
        if "cum_log_probs" in chunk:
            chunk["cumulative_logprob"] = chunk.pop("cum_log_probs")
        for name in ("kv_cache_reused_block", "kv_cache_missed_block"):  # TensorRT-LLM leaves the s out here
            if f"{name}s" in chunk:
                chunk[name] = chunk.pop(f"{name}s")
        for name in self._left_out:
            del chunk[name]
        return chunk


def llmapi_requests(inputs: Inputs, tokenizer: Tokenizer, config: EngineConfig) -> list[TextRequest]:
    """Make the one sequence that inputs ask for; raises RequestError on any input that cannot be served."""
    refuse_unsupported(inputs, NEUTRAL)
    return text_requests(as_text_model(inputs), tokenizer, config, LlmApiRequest)


def as_text_model(inputs: Inputs) -> Inputs:
    """Give the inputs the text model's names, and values that mean there what these mean here.

    Here a token is drawn at random if temperature, top_k, top_p or min_p is given, unless one of them leaves no choice:
    temperature 0, top_k 1 or top_p 0. In the text model top_p 0 is off, and a temperature alone does not suffice.
    """
    made = {NAMES.get(name, name): given for name, given in inputs.items()}
    made.setdefault("max_tokens", [DEFAULT_MAX_TOKENS])
    temperature, top_k, top_p = (scalar(made, name) for name in ("temperature", "top_k", "top_p"))
    if top_p == 0 and (top_k is None or top_k >= 0):
        made["top_k"] = [1]
    elif top_p is None and not top_k and (temperature, top_k) != (None, None):
        made["top_p"] = [1.0]
    return made
