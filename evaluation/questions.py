"""Queries and keys of a model that answers needle questions rightly: what each layer's attention sees at each decode step.

The right answer is fed, whatever the model would say, and attention is full: a layer's selection can be looked at by
itself, not after the errors of the layers and steps before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvseek.evaluation.capture import CapturedLayer, feed, hidden_states, recording
from kvseek.evaluation.needle_tasks.tasks import Dialogue
from kvseek.plugins.contract import LAST_QUERIES

ATTENTION_NAME = "kvseek_capture_questions"  # of its own: texts may be captured while questions go on


@dataclass(frozen=True)
class CapturedQuestion:
    """A question on a context, answered rightly.

    Attributes
    ----------
    layers : list of CapturedLayer
        Keys of context, question and answer but for the answer's last token, which is drawn and not fed; queries of the last
        positions: at least the decode steps', before them up to 2,048 of the prompt's.
    steps : int
        Decode steps, the last positions: an answer of n tokens has n - 1, for its first one is drawn by the prompt's last.
    right : bool
        Whether the model itself, with full attention, draws every token of the answer.
    """

    layers: list[CapturedLayer]
    steps: int
    right: bool


@torch.inference_mode()
def capture_questions(model: Any, dialogues: Sequence[Dialogue]) -> Iterator[CapturedQuestion]:
    """Run every question of the dialogues, one at a time, as they come; a context that dialogues share is read once.

    The rounds of a dialogue follow each other on a growing context: the question, then the right answer. Nothing captured is
    kept here; the keys of a context are in memory once, as long as its questions go on.
    """
    from transformers import DynamicCache

    longest = max(len(gold) for dialogue in dialogues for _, _, gold in dialogue.rounds)
    with recording(model, LAST_QUERIES + longest - 1, ATTENTION_NAME) as recorder:
        empty = recorder.mark()
        for context, sharing in itertools.groupby(dialogues, key=lambda dialogue: dialogue.context):
            recorder.rewind(empty)
            cache = DynamicCache()
            feed(model, cache, context)
            after_context = recorder.mark()
            for dialogue in sharing:
                if answered := cache.get_seq_length() - len(context):
                    cache.crop(-answered)
                recorder.rewind(after_context)
                for _, question, gold in dialogue.rounds:
                    hidden = hidden_states(model, cache, question + gold[:-1])[:, -len(gold) :]
                    drawn = model.lm_head(hidden)[0].argmax(dim=-1).tolist()
                    yield CapturedQuestion(recorder.layers(), len(gold) - 1, drawn == gold)
                    hidden_states(model, cache, gold[-1:])
