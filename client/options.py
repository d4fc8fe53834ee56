"""Options of one generation request to the text model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

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
        """Return the inputs of tensorrt_llm_bls by name (other models: text_models.py), without None and empty ones."""
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
