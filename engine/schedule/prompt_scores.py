"""What one request asks of its prompt: log probabilities of the tokens, and the logits that they follow from."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.request import LogProbs, Request, StepOutput
from kvseek.engine.draws.sampling import log_probabilities, not_finite


class PromptScores:
    """Takes the logits of a prompt while they are computed, and makes outputs of them, piece by piece."""

    def __init__(self, request_id: int, request: Request) -> None:
        self._request_id, self._ids, self._params = request_id, request.prompt_ids, request.sampling
        self._taken = 0  # tokens whose logits have been taken
        self._pieces: list[tuple[tuple[LogProbs, ...], bytes]] = []  # log probabilities and logits, not yet passed on

    @property
    def holds_logits(self) -> bool:
        """Whether there are logits to pass on, which should not wait for more of them: they take much memory."""
        return bool(self._pieces) and self._params.return_context_logits

    def take(self, start: int, logits: Tensor) -> None:
        """Take the logits of consecutive tokens, the next ones or some of them again: a pack that has failed is read again.

        Parameters
        ----------
        start : int
            Position of the first token.
        logits : Tensor, float32 [tokens, vocabulary]
            On any device. Row i says which token may follow the token at position start + i.

        Raises
        ------
        LogitsError
            If a largest logit is NaN or infinite.
        """
        logits, start = logits[max(0, self._taken - start) :], max(start, self._taken)
        rows = logits.shape[0]
        if not rows:
            return
        largest = logits.amax(dim=1)  # a NaN in a row comes out as its maximum
        if not torch.isfinite(largest).all():
            raise not_finite(None)
        self._taken = start + rows
        following, top = self._ids[start + 1 : start + 1 + rows], self._params.prompt_logprobs
        logprobs = () if top is None or not following else log_probabilities(logits[: len(following)], following, top)
        data = logits.cpu().numpy().tobytes() if self._params.return_context_logits else b""
        self._pieces.append((logprobs, data))

    def pop(self, progress: float) -> list[StepOutput]:
        """Return the outputs to pass on; `progress` is the share of the prompt's reading that is done."""
        pieces, self._pieces = self._pieces, []
        return [
            StepOutput(self._request_id, prefill_progress=progress, prompt_logprobs=logprobs, context_logits=logits)
            for logprobs, logits in pieces
        ]
