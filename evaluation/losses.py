"""Rows that a method's selections lost, of those that decode steps needed, counted by the stage that lost them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvseek.evaluation.capture import CapturedLayer
from kvseek.evaluation.replay import Replay
from kvseek.measurement.offers import stages_of
from kvseek.measurement.variants import Variant
from kvseek.plugins.contract import LAST_QUERIES


@dataclass
class Losses:
    """Counts over decode steps and KV heads; they add up over questions, layers and tasks.

    Attributes
    ----------
    choices, harmed : int
        Selections: decode steps x KV heads; those that lost a needed row.
    by_stage : dict or None
        Lost rows of each stage; None if the method does not tell.
    mass : float
        Attention lost, summed over the selections, each a mean over its query heads.
    dense : bool
        Every row was selected, every time.
    """

    needed: int = 0
    lost: int = 0
    choices: int = 0
    harmed: int = 0
    by_stage: dict[str, int] | None = field(default_factory=dict)
    mass: float = 0.0
    dense: bool = True

    def add(self, other: Losses) -> None:
        """Add the counts of the same method elsewhere."""
        for name in ("needed", "lost", "choices", "harmed", "mass"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dense = self.dense and other.dense
        if other.by_stage is None or self.by_stage is None:
            self.by_stage = None
        else:
            for name, count in other.by_stage.items():
                self.by_stage[name] = self.by_stage.get(name, 0) + count

    def figures(self) -> dict[str, Any]:
        """Counts and shares, JSON-able; shares of needed rows are 0 where none was."""
        needed, choices = max(1, self.needed), max(1, self.choices)
        stages = self.by_stage
        return {
            **{name: getattr(self, name) for name in ("dense", "needed", "lost", "choices", "harmed", "by_stage")},
            "lost_share": self.lost / needed,
            "lost_share_by_stage": None if stages is None else {name: lost / needed for name, lost in stages.items()},
            "harmed_share": self.harmed / choices,
            "mass_lost": self.mass / choices,
        }


@torch.inference_mode()
def measure_layer(layer: CapturedLayer, number: int, steps: int, variant: Variant, least: float) -> Losses:
    """One layer of one question: the last `steps` queries are decode steps."""
    layer = CapturedLayer(layer.keys, layer.queries[:, -(LAST_QUERIES + steps) :], layer.scaling)
    replay, tell_stages = Replay(layer, number, steps, variant), stages_of(variant.method)
    losses = Losses()
    for step in range(steps):
        query = layer.queries[:, layer.queries.shape[1] - steps + step].contiguous()
        # Before the step, which may change the index.
        stages = tell_stages(replay.index, query, 0) if tell_stages else None
        tokens = replay.tokens_by_place()
        chosen = replay.step(query)
        weights = replay.region_weights(query, step)
        needed = weights.amax(dim=1) >= least
        missed = needed & ~chosen
        by_stage = None
        if stages is not None:
            blamed = stages.blame(missed.gather(1, tokens))
            by_stage = {name: int(rows.sum()) for name, rows in blamed.items()}
        lost_mass = (weights * ~chosen[:, None]).sum(dim=-1).mean(dim=1)
        losses.add(
            Losses(
                needed=int(needed.sum()),
                lost=int(missed.sum()),
                choices=len(chosen),
                harmed=int(missed.any(dim=1).sum()),
                by_stage=by_stage,
                mass=float(lost_mass.sum()),
                dense=bool(chosen.all()),
            )
        )
    return losses


def total(parts: Iterable[Losses]) -> Losses:
    """The sum of losses of one method."""
    result = Losses()
    for part in parts:
        result.add(part)
    return result
