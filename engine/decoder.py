"""What every decoder does, whatever computes its products: reads prompts into cache and indexes, and counts steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvseek.plugins.base import Index

from .cache import Cache
from .config import EngineConfig

LAST_QUERIES = 2048  # prompt queries that an index sees at build (plugins/base.py)
Prompt = TypeVar("Prompt")


class BaseDecoder(ABC):
    """A decoder over a cache and one index per layer; weights, if it has any, are its subclasses' own."""

    def __init__(self, config: EngineConfig, cache: Cache, indexes: Sequence[Index]) -> None:
        self.config, self.model = config, config.model
        self.cache, self.indexes = cache, indexes
        self.scaling = config.model.head_dim**-0.5

    @torch.inference_mode()
    def prefill(self, slot: int, prompt_ids: Sequence[int]) -> Generator[float, None, Tensor]:
        """Process a prompt in units of work.

        Yields the share of the work done after each unit; returns the last token's logits, float32 [vocabulary].
        """
        for index in self.indexes:
            index.forget(slot)
        self.cache.begin_prefill(slot, len(prompt_ids))
        return (yield from self._read_prompt(slot, prompt_ids))

    @abstractmethod
    def _read_prompt(self, slot: int, prompt_ids: Sequence[int]) -> Generator[float, None, Tensor]:
        """`prefill`, once cache and indexes expect the prompt."""

    @abstractmethod
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """Append one token per request and compute what follows it.

        Returns
        -------
        logits : Tensor, float32 [batch, vocabulary]
        attended : list of float
            Cached tokens that one KV head attended to, per request, averaged over the layers.
        """

    @abstractmethod
    def decode_tokens(
        self, tokens: Sequence[int], slots: Sequence[int], greedy: Sequence[bool]
    ) -> tuple[list[Tensor | int], list[float]]:
        """One decode step for an engine: as `decode`, but greedy requests get their next token.

        Returns
        -------
        drawn : list
            Per request: the token with the largest logit (NO_TOKEN if that is not finite) where `greedy` is set, else
            logits, float32 [vocabulary] on the CPU.
        attended : list of float
            As `decode`.
        """

    def refresh(self, slots: Sequence[int]) -> None:
        """Let the indexes do upkeep that is due for these slots."""
        for index in self.indexes:
            index.refresh(slots)

    def _new_rows(self, tokens: int) -> Tensor:
        """Room for the keys or the values of a layer, [G, tokens, D]."""
        return self.cache.window.new_empty(self.model.num_kv_heads, tokens, self.model.head_dim)

    def _store_layer(self, number: int, slot: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Write a prompt's rows of a layer, keys and values [G, n, D], and index them; queries are its last [H, w, D]."""
        index, sink, length = self.indexes[number], self.cache.config.sink, self.cache.lengths[slot]
        retrieval = keys[:, sink : sink + length]
        order = index.arrange(slot, retrieval, queries)
        self.cache.write_prompt(number, slot, keys, values, order)
        if order is not None:
            retrieval = retrieval.gather(1, order[..., None].expand_as(retrieval))
        index.build(slot, retrieval, queries)

    def _finish_indexes(self, slot: int) -> None:
        """Wait for what the indexes left running; the prompt's last layer has been stored."""
        for index in self.indexes:
            index.finish_build(slot)


class LayerwiseDecoder(BaseDecoder, Generic[Prompt]):
    """Reads prompts layer by layer, in units of one layer and one chunk of tokens. `Prompt` is what it keeps of one."""

    def _read_prompt(self, slot: int, prompt_ids: Sequence[int]) -> Generator[float, None, Tensor]:
        n, chunk = len(prompt_ids), self.config.prefill_chunk_tokens
        prompt, layers = self._begin_prompt(prompt_ids), self.model.num_layers
        units, done = layers * -(-n // chunk), 0
        for number in range(layers):
            keys, values = self._new_rows(n), self._new_rows(n)
            last: list[Tensor] = []
            for start in range(0, n, chunk):
                stop = min(start + chunk, n)
                queries = self._prefill_chunk(number, prompt, start, stop, keys, values)
                part = queries[:, max(0, n - LAST_QUERIES - start) :]
                if part.shape[1] > 0:  # an empty part would keep the queries of its chunk
                    last.append(part)
                del queries, part
                done += 1
                if stop == n:
                    self._store_layer(number, slot, keys, values, torch.cat(last, dim=1)[:, -LAST_QUERIES:])
                yield done / units
            del keys, values, last  # before the next layer allocates its own
        self._finish_indexes(slot)
        return self._prompt_logits(prompt)

    @abstractmethod
    def _begin_prompt(self, prompt_ids: Sequence[int]) -> Prompt:
        """What the first layer begins with."""

    @abstractmethod
    def _prefill_chunk(
        self, number: int, prompt: Prompt, start: int, stop: int, keys: Tensor, values: Tensor
    ) -> Tensor:
        """One layer over tokens start .. stop - 1, whose keys and values it adds to those of the prompt, [G, n, D].

        Returns the chunk's queries, [H, stop - start, D].
        """

    @abstractmethod
    def _prompt_logits(self, prompt: Prompt) -> Tensor:
        """Logits of the last token, float32 [vocabulary]; all layers are done."""
