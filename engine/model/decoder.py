"""The decoder as an engine sees it: a model, the retrieval that it attends with, and how its decode steps run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvseek.engine.cache.prefixes.cache import PrefixRows
from kvseek.engine.draws.sampling import Drawn, Launched, Sampler, Verification
from kvseek.engine.retrieval import Observer, Retrieval
from kvseek.engine.row_recorder import NOBODY, Wanted
from kvseek.plugins.registry import method_traits, reports_rows

from .prefill import NO_CALLBACKS, LogitsCallbacks, Prefill, Prompts

if TYPE_CHECKING:
    from .mtp import MtpHead


class PromptModel(Protocol):
    """A model that reads prompts.

    Attributes
    ----------
    reads_packs : bool
        Whether a prefill may have several prompts, and units of any size. If not, a prefill has one prompt, and the model
        chooses the units, whatever `Prefill.advance` asks for.
    scores_prompts : bool
        Whether a prefill may have `on_logits`.
    """

    @property
    def reads_packs(self) -> bool: ...

    @property
    def scores_prompts(self) -> bool: ...

    def prefill(self, prompts: Prompts, on_logits: LogitsCallbacks = NO_CALLBACKS) -> Prefill:
        """Begin to read prompts, each with its slot and token ids; nothing is computed or changed before `Prefill.advance`.

        Several prompts need a model that reads packs, and must not be longer than a chunk (prefill_chunk_tokens) together.
        `on_logits`: see Prefill.
        """


class Decoder(ABC):
    """Reads prompts and runs decode steps, for one thread: HostDecoder of cpu.py, GraphDecoder of cuda/steps.py."""

    def __init__(self, model: PromptModel, retrieval: Retrieval) -> None:
        self.model, self.retrieval = model, retrieval
        self.config, self.cache = retrieval.config, retrieval.cache

    @property
    def sums(self) -> str:
        """How several ranks sum what they compute in decode steps; empty for one rank."""
        return ""

    def prefill(self, prompts: Prompts, on_logits: LogitsCallbacks = NO_CALLBACKS) -> Prefill:
        return self.model.prefill(prompts, on_logits)

    @torch.inference_mode()
    def resume(self, slot: int) -> None:
        """Begin a slot with the tokens of its prefix, none of which is read; see Retrieval.resume."""
        self.retrieval.resume(slot)

    @property
    def reports_rows(self) -> bool:
        """See plugins/registry.py."""
        return reports_rows(self.config)

    @property
    @abstractmethod
    def runs_ahead(self) -> bool:
        """Whether it helps to launch a step before the one before it has been collected, as the host works meanwhile."""

    @abstractmethod
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """Append one token per request and compute the logits of the next.

        Returns
        -------
        logits : Tensor, float32 [batch, vocabulary], on the CPU
        attended : list of float
            Cached tokens that one KV head attended to, per request, averaged over the layers.
        """

    @abstractmethod
    def launch(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        samplers: Sequence[Sampler | None],
        wanted: Wanted = NOBODY,
        steps: int = 1,
    ) -> Launched:
        """Launch a decode step as `decode` runs one, and the draws of the next tokens.

        A token may be LATEST: the one that the slot's last step draws, which need not have been collected. Steps are collected
        in the order of their launches. A request without a sampler gets the token with the largest logit, NO_TOKEN if that
        logit is not finite.

        Parameters
        ----------
        wanted : mapping
            Whose selected rows are reported; `reports_rows` says whether any can be.
        steps : int
            Launch so many steps, of which each takes in what the one before has drawn: more than one only where `runs_ahead`,
            for slots whose steps are alike (Cache.alike_steps), samplers that do not vary, and nobody who wants rows.
        """

    @property
    def mtp(self) -> MtpHead | None:
        """What drafts for requests, if the model has it and runs on the CPU."""
        return None

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """Most rows of a step that verifies drafts."""

    def prepare_to_verify(self) -> None:  # noqa: B027  on the CPU there is nothing to prepare
        """Prepare steps that verify drafts; call it before the first of them."""

    @abstractmethod
    def verify(self, tokens: Sequence[int], slots: Sequence[int], wanted: Wanted = NOBODY) -> Verification:
        """Launch a decode step of which a slot may have several tokens that follow each other, if its ring has room for them.

        No step may be in flight. When tokens have been drawn, `accept` ends the step. Arguments as `launch`, one token and slot
        a row, none of them LATEST; a slot whose selected rows are wanted has one.
        """

    @torch.inference_mode()
    def accept(self, slots: Sequence[int], surplus: Sequence[int]) -> None:
        """End a step that `verify` has launched: take back the last tokens, so many of each slot."""
        self.retrieval.accept(slots, surplus)

    @abstractmethod
    def draw(self, logits: Tensor, samplers: Sequence[Sampler]) -> list[Drawn | int]:
        """Draw a token for each sampler from logits that prompts gave, float32 [samplers, vocabulary] on the CPU."""

    @abstractmethod
    def prepare(self) -> None:
        """Capture the steps of all batch sizes, also those captured before, so that no request waits for a capture.

        Does nothing on the CPU.
        """

    @abstractmethod
    def close(self) -> None:
        """Forget what has been captured, and end what other processes do for this decoder. May be called twice."""

    def prefix_rows(self) -> PrefixRows:
        """Make what keeps the rows of this decoder's cache for later requests."""
        shares_entries = method_traits(self.config).prefix_reuse == "entries"
        return PrefixRows(self.cache, self.retrieval.indexes, shares_entries)

    def observe(self, observer: Observer) -> None:
        """Let `observer` look into the decode steps from now on; captured steps are captured again with it."""
        self.retrieval.observer = observer
        self.prepare()
