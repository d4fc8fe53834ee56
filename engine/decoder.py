"""A decoder as an engine sees it: a model, what it retrieves from, and the way its decode steps run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.engine.cache.cache import Cache
from kvseek.engine.model.prefill import Prefill, Prompts

from .observer import Observer
from .retrieval import Retrieval


class PromptModel(Protocol):
    """Reads prompts.

    Attributes
    ----------
    reads_packs : bool
        Whether a prefill may have several prompts, and units of any size. If not, it has one prompt, in units that are the
        model's own, whatever `Prefill.advance` asks for.
    """

    @property
    def reads_packs(self) -> bool: ...

    def prefill(self, prompts: Prompts) -> Prefill:
        """Begin to read prompts, slot and token ids of each; nothing is computed or changed before `Prefill.advance`.

        Several together must not be longer than a chunk (prefill_chunk_tokens), and the model must read packs.
        """


class Steps(Protocol):
    """Runs decode steps: engine/model/host_steps.py, engine/model/graph_steps.py."""

    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """Append one token per request and compute what follows it.

        Returns
        -------
        logits : Tensor, float32 [batch, vocabulary], on the CPU
        attended : list of float
            Cached tokens that one KV head attended to, per request, averaged over the layers.
        """

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

    def prepare(self) -> None:
        """Capture all steps, anew if they were captured before, so that no request waits for it. The CPU captures none."""


class Decoder:
    """Reads prompts and runs decode steps. One thread uses it.

    Parameters
    ----------
    model : PromptModel
    retrieval : Retrieval
    steps : Steps
        Decode steps of the same model over the same retrieval.
    """

    def __init__(self, model: PromptModel, retrieval: Retrieval, steps: Steps) -> None:
        self.model, self.retrieval, self.steps = model, retrieval, steps

    @property
    def config(self) -> EngineConfig:
        """Of the engine."""
        return self.retrieval.config

    @property
    def cache(self) -> Cache:
        """The cache of all layers."""
        return self.retrieval.cache

    def prefill(self, prompts: Prompts) -> Prefill:
        """See PromptModel.prefill."""
        return self.model.prefill(prompts)

    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """See Steps.decode."""
        return self.steps.decode(tokens, slots)

    def decode_tokens(
        self, tokens: Sequence[int], slots: Sequence[int], greedy: Sequence[bool]
    ) -> tuple[list[Tensor | int], list[float]]:
        """See Steps.decode_tokens."""
        return self.steps.decode_tokens(tokens, slots, greedy)

    def refresh(self, slots: Sequence[int]) -> None:
        """Let the indexes do upkeep that is due for these slots."""
        self.retrieval.refresh(slots)

    def observe(self, observer: Observer) -> None:
        """Let `observer` look into the decode steps from now on; steps are captured anew with it."""
        self.retrieval.observer = observer
        self.steps.prepare()
