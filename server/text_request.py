"""One request of the text model: its tensors to those of tensorrt_llm, tokens back to text. No Triton here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvseek.engine.errors import RequestError
from kvseek.engine.request import FinishReason
from kvseek.engine.tokenizer import Tokenizer

from .translation import Tensors, refuse_unsupported, sampling_params, scalar, text, texts

Chunk = dict[str, Any]
# Inputs that go to tensorrt_llm as they are, with the name and type they have there.
PASSED_ON = {
    "max_tokens": ("request_output_len", np.int32),
    "end_id": ("end_id", np.int32),
    "top_k": ("runtime_top_k", np.int32),
    "top_p": ("runtime_top_p", np.float32),
    "temperature": ("temperature", np.float32),
    "repetition_penalty": ("repetition_penalty", np.float32),
    "random_seed": ("random_seed", np.uint64),
    "seed": ("seed", np.uint64),
}


class TextRequest:
    """Turns one text request into token tensors, and token responses into text chunks.

    A stop word is found in the text, whatever tokens it is spelt with, and is not part of the output.

    Raises
    ------
    RequestError
        From the constructor, on any input that cannot be served.
    """

    def __init__(self, tensors: Tensors, tokenizer: Tokenizer) -> None:
        refuse_unsupported(tensors)
        if texts(tensors, "bad_words"):
            raise RequestError("bad_words: must be empty; kvseek does not support it, leave it out")
        sampling_params(tensors, "top_k", "top_p")  # errors name the inputs as the client knows them
        self._tensors = tensors
        prompt = text(scalar(tensors, "text_input"), "text_input")
        if not prompt:
            raise RequestError("text_input is empty: must be at least one character; send a prompt")
        use_template = bool(scalar(tensors, "apply_chat_template", False))
        if use_template:
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        self._prompt_ids = tokenizer.encode(prompt, add_special_tokens=not use_template)
        self._streaming = bool(scalar(tensors, "stream", False))
        self._wants_progress = bool(scalar(tensors, "return_prefill_progress", False))
        echo = not self._streaming and not scalar(tensors, "exclude_input_in_output", False)
        self._text = prompt if echo else ""
        self._words = tokenizer.stream(texts(tensors, "stop_words"))
        self._output_tokens = 0
        self.ended = False

    def token_tensors(self) -> dict[str, NDArray[Any]]:
        """Inputs of tensorrt_llm, each [1, ...].

        It always streams and reports prefill progress: only so can a stop word or a client that left end it early.
        """
        inputs = {
            "input_ids": np.array([self._prompt_ids], dtype=np.int32).reshape(1, -1),
            "input_lengths": np.array([[len(self._prompt_ids)]], dtype=np.int32),
            "streaming": np.array([[True]]),
            "return_prefill_progress": np.array([[True]]),
        }
        for name, (inner, dtype) in PASSED_ON.items():
            if name in self._tensors:
                inputs[inner] = np.array([[scalar(self._tensors, name)]], dtype=dtype)
        return inputs

    def push(self, outputs: Tensors) -> Iterator[Chunk]:
        """Add one response of tensorrt_llm; yields the chunks to send now, and sets `ended` when a stop word came."""
        ids = outputs["output_ids"].reshape(-1).tolist()
        reason = text(scalar(outputs, "finish_reason"), "finish_reason")
        if not ids and not reason:
            if self._wants_progress:
                yield self._chunk("", "", outputs)
            return
        new = ""
        for token in ids:
            self._output_tokens += 1
            new += self._words.push(token)
        if reason:
            new += self._words.finish()
        if self._words.stopped:
            reason, self.ended = FinishReason.STOP_WORD.value, True
        self._text += new
        if self._streaming or reason:
            yield self._chunk(self._text, reason, outputs)
            self._text = ""

    def _chunk(self, output: str, reason: str, outputs: Tensors) -> Chunk:
        chunk: Chunk = {"text_output": output, "finish_reason": reason}
        for name in ("cached_tokens", "attended_tokens", "prefill_progress"):
            chunk[name] = scalar(outputs, name)
        if scalar(self._tensors, "return_num_input_tokens", False):
            chunk["num_input_tokens"] = len(self._prompt_ids)
        if scalar(self._tensors, "return_num_output_tokens", False):
            chunk["num_output_tokens"] = self._output_tokens
        return chunk
