"""The engine: requests in, tokens out. One thread owns an engine; engine/service.py gives it a thread of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch
from torch import Tensor

from .config import EngineConfig
from .decoder import BaseDecoder
from .errors import CapacityError
from .loading import load_decoder
from .manifest import verify
from .metrics import RequestStatistics
from .request import FinishReason, Request, StepOutput
from .sampling import Sampler, accept
from .scheduler import Scheduler, Sequence
from .tokenizer import Tokenizer


class Engine:
    """Continuous batching over one decoder: each `step` runs one prefill unit and one decode step."""

    def __init__(self, config: EngineConfig, decoder: BaseDecoder, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._decoder, self._cache = decoder, decoder.cache
        self._scheduler = Scheduler(decoder.cache, config.max_batch_size)
        self._ids = itertools.count(1)

    @classmethod
    def load(cls, directory: Path, threads: int | None = None) -> Engine:
        """Load an engine directory that `kvseek build` wrote, after checking its checksums.

        Parameters
        ----------
        threads : int, optional
            CPU threads of the whole process (torch.set_num_threads); None leaves torch's choice.

        Raises
        ------
        EngineDirectoryError, ConfigError, KernelError, CapacityError
        """
        if threads is not None:
            torch.set_num_threads(threads)
        verify(directory)
        config = EngineConfig.load(directory)
        return cls(config, load_decoder(directory, config), Tokenizer(directory))

    @property
    def index_bytes_per_token(self) -> float:
        """Bytes that the method's indexes of all layers and KV heads keep per retrieval token."""
        return sum(index.bytes_per_token for index in self._decoder.indexes)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def check(self, request: Request) -> None:
        """Raise RequestError or CapacityError if this engine can never serve the request. Safe from any thread."""
        request.validate(self.config)
        tokens = len(request.prompt_ids) + request.max_tokens
        needed, capacity = self._cache.extents_needed(tokens), self._cache.extents.capacity
        if needed > capacity:
            raise CapacityError(
                f"prompt and max_tokens = {tokens} tokens need {needed} extents of the row pool, it has {capacity}; "
                "shorten the request or build with a larger cache.kv_cache_host_memory_bytes"
            )

    def submit(self, request: Request) -> int:
        """Queue a request and return its id; raises as `check`."""
        self.check(request)
        statistics = RequestStatistics(len(request.prompt_ids), time.perf_counter())
        sampler = Sampler(request.sampling, self.config.model.vocab_size, request.prompt_ids)
        sequence = Sequence(next(self._ids), request, sampler, statistics)
        self._scheduler.add(sequence)
        return sequence.request_id

    def cancel(self, request_id: int) -> StepOutput | None:
        """End a request now and return its last output; None if it has ended already."""
        sequence = self._scheduler.find(request_id)
        return None if sequence is None else self._end(sequence, FinishReason.CANCELLED)

    def step(self) -> list[StepOutput]:
        """Admit what fits, run one prefill unit and one decode step; returns what happened, in order."""
        outputs = self._admit()
        decoding = self._scheduler.decoding()
        outputs += self._prefill_unit()
        if decoding:
            outputs += self._decode(decoding)
        return outputs

    def generate(self, requests: SequenceOf[Request]) -> list[list[int]]:
        """Run requests to their ends and return the token ids of each; raises RuntimeError if one fails."""
        tokens: dict[int, list[int]] = {self.submit(request): [] for request in requests}
        while self.has_work:
            for output in self.step():
                if output.finish_reason is FinishReason.ERROR:
                    raise RuntimeError(output.error)
                if output.token_id is not None:
                    tokens[output.request_id].append(output.token_id)
        return list(tokens.values())

    def _admit(self) -> list[StepOutput]:
        """Admit what fits; returns the ends of requests that could not be admitted."""
        ends: list[StepOutput] = []
        while True:
            try:
                sequence = self._scheduler.admit()
            except Exception as error:  # one request's admission must not take the others down
                ends.append(self._fail(self._scheduler.waiting[0], error))
                continue
            if sequence is None:
                return ends
            sequence.prefill = self._decoder.prefill(sequence.slot, sequence.request.prompt_ids)

    def _prefill_unit(self) -> list[StepOutput]:
        sequence = self._scheduler.prefilling()
        if sequence is None or sequence.prefill is None:
            return []
        try:
            return [StepOutput(sequence.request_id, prefill_progress=next(sequence.prefill))]
        except StopIteration as end:
            sequence.prefill = None
            return [self._take_token(sequence, end.value, 0.0)]
        except Exception as error:  # one request's prefill must not take the others down
            return [self._fail(sequence, error)]

    def _decode(self, sequences: list[Sequence]) -> list[StepOutput]:
        tokens, slots = [s.generated[-1] for s in sequences], [s.slot for s in sequences]
        greedy = [s.sampler.greedy for s in sequences]
        try:
            drawn, attended = self._decoder.decode_tokens(tokens, slots, greedy)
        except Exception as error:  # the step's caches are in doubt: its requests end, waiting ones go on
            return [self._fail(sequence, error) for sequence in sequences]
        outputs = [self._take_token(s, one, share) for s, one, share in zip(sequences, drawn, attended, strict=True)]
        self._decoder.refresh([s.slot for s in sequences if s in self._scheduler.running])
        return outputs

    def _take_token(self, sequence: Sequence, drawn: Tensor | int, attended: float) -> StepOutput:
        """Take the greedy token, or draw one from logits, and end the sequence if it is the last."""
        try:
            token = accept(drawn) if isinstance(drawn, int) else sequence.sampler.sample(drawn)
        except Exception as error:
            return self._fail(sequence, error)
        statistics, cached = sequence.statistics, self._cache.tokens[sequence.slot] if attended else 0
        statistics.record_token(cached, attended)
        if token in sequence.request.end_ids:
            return self._end(sequence, FinishReason.END_ID, None, cached, attended)
        sequence.generated.append(token)
        reason = self._finish_reason(sequence)
        if reason is None:
            return StepOutput(sequence.request_id, token, cached_tokens=cached, attended_tokens=attended)
        return self._end(sequence, reason, token, cached, attended)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        generated, request = sequence.generated, sequence.request
        if any(tuple(generated[-len(word) :]) == word for word in request.stop_words):
            return FinishReason.STOP_WORD
        return FinishReason.LENGTH if len(generated) == request.max_tokens else None

    def _fail(self, sequence: Sequence, error: Exception) -> StepOutput:
        return self._end(sequence, FinishReason.ERROR, error=f"{type(error).__name__}: {error}")

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token: int | None = None,
        cached: int = 0,
        attended: float = 0.0,
        error: str = "",
    ) -> StepOutput:
        if sequence.prefill is not None:
            sequence.prefill.close()
        self._scheduler.remove(sequence)
        return StepOutput(
            sequence.request_id,
            token,
            reason,
            cached_tokens=cached,
            attended_tokens=attended,
            statistics=sequence.statistics,
            error=error,
        )
