"""What every decoder does, whatever computes its products: reads prompts into cache and indexes, and counts steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.engine.cache.host_cache.host_cache import Cache
from kvseek.plugins.contract import Index

from .prefill import LayerwisePrefill, Prefill, Prompts

Prompt = TypeVar("Prompt")


class BaseDecoder(ABC):
    """A decoder over a cache and one index per layer; weights, if it has any, are its subclasses' own.

    Attributes
    ----------
    reads_packs : bool
        Whether a prefill may have several prompts, and units of any size. If not, it has one prompt, in units that are the
        decoder's own, whatever `Prefill.advance` asks for.
    """

    reads_packs: ClassVar[bool] = True

    def __init__(self, config: EngineConfig, cache: Cache, indexes: Sequence[Index]) -> None:
        self.config, self.model = config, config.model
        self.cache, self.indexes = cache, indexes
        self.scaling = config.model.head_dim**-0.5

    @abstractmethod
    def prefill(self, prompts: Prompts) -> Prefill:
        """Begin to read prompts, slot and token ids of each; nothing is computed or changed before `Prefill.advance`.

        Several together must not be longer than a chunk (prefill_chunk_tokens), and the decoder must read packs.
        """

    def expect(self, slot: int, tokens: int) -> None:
        """Prepare cache and indexes for a prompt of `tokens` tokens."""
        for index in self.indexes:
            index.forget(slot)
        self.cache.begin_prefill(slot, tokens)

    def reading(self, tokens: int) -> AbstractContextManager[None]:
        """Surrounds each unit of a prefill of `tokens` tokens; may turn errors into such as say more."""
        return nullcontext()

    def hand_over(self, slots: Sequence[int], logits: Tensor) -> Tensor:
        """Logits of a prefill on the CPU, once the first decode step of `slots` may be launched."""
        return logits

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

    def new_rows(self, tokens: int) -> Tensor:
        """Room for the keys or the values of a layer, [G, tokens, D]."""
        return self.cache.window.new_empty(self.model.num_kv_heads, tokens, self.model.head_dim)

    def store_layer(self, number: int, slot: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Write a prompt's rows of a layer, keys and values [G, n, D], and index them; queries are its last [H, w, D]."""
        index, sink, length = self.indexes[number], self.cache.config.sink, self.cache.lengths[slot]
        retrieval = keys[:, sink : sink + length]
        order = index.arrange(slot, retrieval, queries)
        self.cache.write_prompt(number, slot, keys, values, order)
        if order is not None:
            retrieval = retrieval.gather(1, order[..., None].expand_as(retrieval))
        index.build(slot, retrieval, queries)

    def finish_indexes(self, slot: int) -> None:
        """Wait for what the indexes left running; the prompt's last layer has been stored."""
        for index in self.indexes:
            index.finish_build(slot)


class LayerwiseDecoder(BaseDecoder, Generic[Prompt]):
    """Reads prompts layer by layer (LayerwisePrefill). `Prompt` is what it keeps of them from one layer to the next."""

    def prefill(self, prompts: Prompts) -> Prefill:
        """See BaseDecoder.prefill."""
        return LayerwisePrefill(self, prompts)

    @abstractmethod
    def begin_prompt(self, prefill: Prefill) -> Prompt:
        """What the first layer begins with."""

    @abstractmethod
    def prefill_chunk(self, number: int, prompt: Prompt, start: int, stop: int, keys: Tensor, values: Tensor) -> Tensor:
        """One layer over rows start .. stop - 1, whose keys and values it adds to those of all rows, [G, n, D].

        Returns the chunk's queries, [H, stop - start, D].
        """

    @abstractmethod
    def prompt_logits(self, prompt: Prompt) -> Tensor:
        """Logits of each prompt's last token, float32 [prompts, vocabulary]; all layers are done."""
