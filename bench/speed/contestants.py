"""Who takes part in the decode benchmark: kvseek engines, Hugging Face transformers and llama.cpp, behind one protocol."""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from kvseek.bench.speed.parts import HostClock
from kvseek.bench.speed.shapes import matrix_bytes, row_numbers
from kvseek.bench.timing import Clock
from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.errors import KvseekError
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.core.weight_only import NONE
from kvseek.engine.cache.memory_layout import layer_extent_bytes
from kvseek.engine.engine import Engine
from kvseek.engine.retrieval import Observer

OUTSIDE = "outside"  # what a step takes beside its parts
PART_STEPS = 9  # steps after the timed ones, whose parts are timed


class Contestant(ABC):
    """Processes a prompt, then generates greedily, one token a step.

    Attributes
    ----------
    threads : int
        That this process must have in each call (torch.set_num_threads); other ranks have theirs.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self.prefill_seconds = 0.0
        self.tokens: list[int] = []
        self.attended_tokens = 0.0  # per KV head, mean over the layers, in the last step
        self.cached_tokens = 0

    @abstractmethod
    def prefill(self, prompt_ids: list[int], steps: int) -> None:
        """Process a prompt up to its first token and set `prefill_seconds`; `steps` decode steps are to follow."""

    @abstractmethod
    def step(self) -> None:
        """Generate one more token."""

    @abstractmethod
    def close(self) -> None:
        """Forget the prompt."""

    @abstractmethod
    def step_bytes(self) -> dict[str, float]:
        """Bytes that the last step had to read: weights, attended rows, and the whole index at most."""


class EngineContestant(Contestant):
    """An engine, run through the same `step` that serves.

    `threads` are those of all its ranks together, `fingerprint` is its directory's.
    """

    def __init__(self, engine: Engine, threads: int, name: str | None = None, fingerprint: str | None = None) -> None:
        self.engine, self.config, self.fingerprint = engine, engine.config, fingerprint
        size = self.config.tp_size
        super().__init__(name or ranked(self.config.method, size), max(1, threads // size))
        self._weight_bytes = float(matrix_bytes(self.config, requests=1))
        self._request_id = 0

    def prefill(self, prompt_ids: list[int], steps: int) -> None:
        start = time.perf_counter()
        salt = f"prefill {time.perf_counter_ns()}"  # every prompt is read, also one that was read before
        self._request_id = self.engine.submit(
            Request(tuple(prompt_ids), max_tokens=steps + PART_STEPS + 2, cache_salt=salt)
        )
        while not self._run():
            pass
        self.prefill_seconds = time.perf_counter() - start

    def step(self) -> None:
        if not self._run() and not self._run():  # where steps run ahead, the first one after a prompt is only launched
            raise KvseekError(f"{self.name}: a decode step gave no token")

    def close(self) -> None:
        self.engine.cancel(self._request_id)
        self.engine.settle()
        self.tokens = []

    def step_bytes(self) -> dict[str, float]:
        row = row_bytes(self.config)
        sparse = self.attended_tokens < self.cached_tokens
        index = self.engine.index_bytes_per_token * self.cached_tokens if sparse else 0.0
        return {"weights": self._weight_bytes, "rows": self.attended_tokens * row, "index": index}

    def part_seconds(self, steps: int, clock: Clock = time.perf_counter) -> dict[str, float]:
        """Median seconds of the parts of `steps` further steps; "outside" is what a step takes beside them."""
        parts, samples = HostClock(clock), list[dict[str, float]]()
        decoder = self.engine.decoder
        decoder.observe(parts)
        try:
            for _ in range(steps):
                start = clock()
                parts.restart()
                self.step()
                outside = clock() - start - sum(parts.seconds.values())
                samples.append({**parts.seconds, OUTSIDE: outside})
        finally:
            decoder.observe(Observer())
        return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}

    def _run(self) -> bool:
        """One engine step; whether it gave a token."""
        tokens = [output for output in self.engine.step() if self._is_token(output)]
        for output in tokens:
            assert output.token_id is not None
            self.tokens.append(output.token_id)
            self.attended_tokens, self.cached_tokens = output.attended_tokens, output.cached_tokens
        return bool(tokens)

    def _is_token(self, output: StepOutput) -> bool:
        if output.finish_reason is FinishReason.ERROR:
            raise KvseekError(f"{self.name}: {output.error}")
        return output.token_id is not None


class TransformersContestant(Contestant):
    """Hugging Face transformers with its default cache (DynamicCache) and one attention implementation.

    Contestants of one model share its weights; those created with `like` take over the prompt's cache from another,
    as eager attention would need gigabytes for the prompt.
    """

    def __init__(
        self,
        model: Any,
        attention: str,
        config: EngineConfig,
        threads: int,
        like: TransformersContestant | None = None,
    ) -> None:
        super().__init__(f"transformers {attention}", threads)
        self._model, self._attention, self._config, self._like = model, attention, config, like
        self._cache: Any = None

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int], steps: int) -> None:
        if self._like is not None:
            self._cache, self.tokens = copy.deepcopy(self._like._cache), list(self._like.tokens)
            self.prefill_seconds = self._like.prefill_seconds
        else:
            from transformers import DynamicCache

            self._cache = DynamicCache(config=self._model.config)
            start = time.perf_counter()
            self._forward(prompt_ids)
            self.prefill_seconds = time.perf_counter() - start

    @torch.inference_mode()
    def step(self) -> None:
        self._forward(self.tokens[-1:])
        self.attended_tokens = self.cached_tokens = self._cache.get_seq_length()

    def close(self) -> None:
        self._cache, self.tokens = None, []

    def step_bytes(self) -> dict[str, float]:
        return {
            "weights": float(matrix_bytes(self._config, requests=1)),
            "rows": self.cached_tokens * row_bytes(self._config),
            "index": 0.0,
        }

    def _forward(self, ids: list[int]) -> None:
        self._model.set_attn_implementation(self._attention)
        inputs = torch.tensor([ids])
        logits = self._model(inputs, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        self.tokens.append(int(logits[0, -1].argmax()))


def load_transformers(model: Path, config: EngineConfig, threads: int) -> list[Contestant]:
    """transformers' contestants of a Hugging Face directory or GGUF file, in the dtype of `config`: sdpa and eager."""
    from transformers import AutoModelForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(model)}
    if model.is_file():
        source = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    config = dataclasses.replace(config, weight_only_precision=NONE, quantize_lm_head=False)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, config.dtype)).eval()
    sdpa = TransformersContestant(loaded, "sdpa", config, threads)
    return [sdpa, TransformersContestant(loaded, "eager", config, threads, like=sdpa)]


class LlamaCppContestant(Contestant):
    """llama.cpp with a GGUF file's own weights and a cache of float16, in a process of its own (llama_worker.py).

    Two runtimes of OpenMP in one process would wait for each other's threads.

    Parameters
    ----------
    python : Path
        A Python that has the package llama-cpp-python.
    longest : int
        Most tokens of a prompt and its answer.
    """

    def __init__(self, python: Path, model: Path, config: EngineConfig, threads: int, longest: int) -> None:
        super().__init__("llama.cpp", threads)
        self._rows, self._weight_bytes = row_numbers(config.model) * 2.0, float(model.stat().st_size)
        worker = Path(__file__).with_name("llama_worker.py")
        command = [str(python), str(worker), str(model), str(longest), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def prefill(self, prompt_ids: list[int], steps: int) -> None:
        start = time.perf_counter()
        self._evaluate(prompt_ids)
        self.prefill_seconds = time.perf_counter() - start

    def step(self) -> None:
        self._evaluate([])

    def close(self) -> None:
        self._ask(None)
        self.tokens, self.cached_tokens = [], 0

    def end(self) -> None:
        """End the process."""
        self._process.communicate()

    def step_bytes(self) -> dict[str, float]:
        return {"weights": self._weight_bytes, "rows": self.cached_tokens * self._rows, "index": 0.0}

    def _evaluate(self, ids: list[int]) -> None:
        token = self._ask(ids)
        assert token is not None, "the worker answers ids with a token"
        self.tokens.append(token)
        self.cached_tokens += len(ids) or 1
        self.attended_tokens = self.cached_tokens

    def _ask(self, ids: list[int] | None) -> int | None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(ids) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> int | None:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise KvseekError(
                f"--llama_cpp: its Python ended with status {self._process.wait()}; its message stands above"
            )
        token: int | None = json.loads(line)
        return token


def ranked(name: str, tp_size: int) -> str:
    """Return what an engine of so many ranks is called."""
    return name if tp_size == 1 else f"{name}, {tp_size} ranks"


def row_bytes(config: EngineConfig) -> float:
    """Bytes of one cached token: its key and value rows of all layers and KV heads."""
    return len(config.model.row_layers) * layer_extent_bytes(config, getattr(torch, config.dtype)) / EXTENT_TOKENS
