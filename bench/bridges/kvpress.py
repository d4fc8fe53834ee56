"""A press for kvpress (NVIDIA, Apache-2.0, `pip install kvseek[kvpress]`) that attends to what a method of kvseek selects.

    pipeline(context, question=question, press=KvseekPress(Selector("nested", {"top_k": 256})))

Presses of kvpress drop keys for good. A method that retrieves drops none and chooses again for every token, so this press
compresses nothing: it takes the place of the model's attention while it is entered. kvpress's own mask of keys
(`masked_key_indices`) would not do, as it overwrites them in the cache. It is a PrefillDecodingPress, because the pipeline
enters only those both for the context and for the answer; so it takes one question a context, as those do.

Its tests need transformers < 5.3, as kvpress does. CI has a newer one and skips them: `make test-bridges` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvpress import PrefillDecodingPress
from transformers import PreTrainedModel

from .attention import selecting
from .selector import Selector


class KvseekPress(PrefillDecodingPress):  # type: ignore[misc]  # kvpress has no types
    """Attends to everything in the context, and in the question and the answer to what a selector chooses."""

    def __init__(self, selector: Selector) -> None:
        super().__init__()
        self.selector = selector

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """Enter the press; a context that is entered after the one that read a prompt goes on with it."""
        with selecting(model, self.selector):
            yield
