"""A CPU's decode steps, used as a GPU's are: the engine launches a step before it takes the tokens of the one before."""

from __future__ import annotations

from typing import Any

from kvseek.core.batch import LATEST
from kvseek.engine.draws.sampling import Launched
from kvseek.engine.engine import Engine
from kvseek.engine.model.cpu.steps import HostDecoder
from kvseek.engine.row_recorder import NOBODY


class DecoderAhead(HostDecoder):
    """`launches` counts those that began before the step before was collected."""

    launches = 0

    @property
    def runs_ahead(self) -> bool:
        return True

    def launch(self, tokens: Any, slots: Any, samplers: Any, wanted: Any = NOBODY) -> Launched:
        self.launches += LATEST in tokens
        return super().launch(tokens, slots, samplers, wanted)


def run_ahead(engine: Engine) -> DecoderAhead:
    """Let a CPU's engine run ahead, which gains nothing there."""
    decoder: Any = engine.decoder
    decoder.__class__ = DecoderAhead
    assert isinstance(decoder, DecoderAhead)
    return decoder
