"""Pieces of text as they arrive at a client, and the figures of a whole answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chunk:
    """One streamed response: new text of the answer, and of the thinking before it; `finish_reason` is empty until the last."""

    text: str
    finish_reason: str = ""
    thinking: str = ""
    prefill_progress: float = 1.0
    cached_tokens: int = 0
    attended_tokens: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0


@dataclass
class AnswerFigures:
    """Latencies as the client sees them, and the share of the cache that was attended to. Feed it every chunk.

    Times are seconds of `time.perf_counter`.
    """

    started_at: float = field(default_factory=time.perf_counter)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: list[int] = field(default_factory=list)
    attended_tokens: list[float] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, chunk: Chunk) -> None:
        """Count a chunk that has just arrived."""
        self.finish_reason = chunk.finish_reason
        self.prompt_tokens = chunk.num_input_tokens or self.prompt_tokens
        if chunk.num_output_tokens > self.output_tokens:
            self.last_token_at = time.perf_counter()
            self.first_token_at = self.first_token_at or self.last_token_at
            self.output_tokens = chunk.num_output_tokens
        if chunk.cached_tokens:
            self.cached_tokens.append(chunk.cached_tokens)
            self.attended_tokens.append(chunk.attended_tokens)

    @property
    def ttft(self) -> float:
        """Seconds to the first token; 0 if none came."""
        return max(0.0, self.first_token_at - self.started_at)

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 with fewer than two."""
        gaps = self.output_tokens - 1
        return (self.last_token_at - self.first_token_at) / gaps if gaps > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """Figures for `--json`; times in seconds, tokens per decode step."""
        steps = len(self.cached_tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft_seconds": self.ttft,
            "tpot_seconds": self.tpot,
            "finish_reason": self.finish_reason,
            "attended_tokens_per_step": sum(self.attended_tokens) / steps if steps else None,
            "cached_tokens_per_step": sum(self.cached_tokens) / steps if steps else None,
        }

    def summary(self) -> str:
        """One line for people."""
        line = f"TTFT {self.ttft:.2f} s · TPOT {self.tpot * 1e3:.1f} ms"
        line += f" · {self.prompt_tokens:,} tokens in, {self.output_tokens} out"
        if self.cached_tokens:
            attended = sum(self.attended_tokens) / len(self.attended_tokens)
            cached = sum(self.cached_tokens) / len(self.cached_tokens)
            line += f" · each step attended to {attended:,.0f} of {cached:,.0f} cached tokens ({attended / cached:.1%})"
        return line
