"""A press for kvpress (NVIDIA, Apache-2.0, `pip install kvseek[kvpress]`) that attends to what a method of kvseek selects.

    pipeline(context, question=question, press=KvseekPress(Selector("nested", {"top_k": 256})))

A press of kvpress drops keys once, when the context has been read. A method that retrieves drops none and chooses again for
every token, so this one compresses nothing: it takes the place of the model's attention while it is entered. kvpress's own mask
of keys (`masked_key_indices`) would not do, as it overwrites them in the cache for good. It is a PrefillDecodingPress, because
the pipeline enters only those both for the context and for the answer; so it takes one question a context, as those do.
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
