"""A CPU's decode steps, used as a GPU's are: the engine launches a step before it takes the tokens of the one before."""

from __future__ import annotations

from itertools import chain
from typing import Any

from kvseek.core.batch import LATEST
from kvseek.engine.draws.sampling import Launched
from kvseek.engine.engine import Engine
from kvseek.engine.model.cpu import HostDecoder
from kvseek.engine.row_recorder import NOBODY


class DecoderAhead(HostDecoder):
    """`launches` counts those that began before the step before was collected; `at_once` are the most steps of one."""

    launches = at_once = 0

    @property
    def runs_ahead(self) -> bool:
        return True

    def launch(self, tokens: Any, slots: Any, samplers: Any, wanted: Any = NOBODY, steps: int = 1) -> Launched:
        self.launches += LATEST in tokens
        self.at_once = max(self.at_once, steps)
        drawing, parts = [one for one in samplers if one is not None], list[Launched]()
        for _ in range(steps):
            parts.append(super().launch(tokens, slots, samplers, wanted))
            tokens = [LATEST] * len(slots)
            for sampler in drawing:
                sampler.pending += 1
        for sampler in drawing:
            sampler.pending -= steps
        return Launched(
            parts[-1].attended, lambda: [*chain(*(part.collect() for part in parts))], parts[-1].selected_rows
        )


def run_ahead(engine: Engine) -> DecoderAhead:
    """Let a CPU's engine run ahead, which gains nothing there."""
    decoder: Any = engine.decoder
    decoder.__class__ = DecoderAhead
    assert isinstance(decoder, DecoderAhead)
    return decoder
