"""Prompts of Gated DeltaNet layers against steps, token by token, and however they are read."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.gpu.kernels.layer.test_delta_net import CONFIGS, check_cuts, draw

from kvseek.core.batch import Batch, RequestState
from kvseek.core.model_config import DeltaNetConfig
from kvseek.kernels.reference.delta_net import GROUPS, DeltaPrompt, delta_step, read_prompts


@pytest.mark.parametrize("decay", [-30.0, -1.0, 3.0], ids=["keeps all", "as models", "forgets at once"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_prompt_is_as_many_steps(config: DeltaNetConfig, decay: float) -> None:
    parameters, states = draw(config, torch.float32, "cpu")
    parameters = dataclasses.replace(parameters, a_log=torch.full_like(parameters.a_log, decay))
    DeltaPrompt.begin(config, torch.float32, torch.device("cpu")).write(states, 1)
    source = torch.Generator().manual_seed(6)
    shapes = (150, config.channels + config.values), (150, 2 * config.num_value_heads)
    qkvz, ba = (torch.randn(shape, generator=source) for shape in shapes)
    qkvz[60:100] = qkvz[60]  # equal keys, for which what tokens write depends most on those before them
    steps = [
        delta_step(
            qkvz[token, None],
            ba[token, None],
            Batch.of([RequestState(slot=1, position=token, length=0)], torch.zeros(5, 1, dtype=torch.int32)),
            parameters,
            states,
        )
        for token in range(150)
    ]
    begun = DeltaPrompt.begin(config, torch.float32, torch.device("cpu"))
    out, (end,) = read_prompts(qkvz, ba, [begun], [150], parameters)
    torch.testing.assert_close(out, torch.cat(steps), rtol=1e-4, atol=1e-4)
    kept = DeltaPrompt.of_slot(states, 1, 150)
    assert torch.equal(end.latest, kept.latest)
    torch.testing.assert_close(end.recurrent, kept.recurrent, rtol=1e-4, atol=1e-4)
    end.write(states, 4)
    again = DeltaPrompt.of_slot(states, 4, 150)
    assert torch.equal(again.latest, end.latest)
    assert torch.equal(again.recurrent, end.recurrent)


@pytest.mark.parametrize("group", [1, 8], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_prompt_does_not_depend_on_others_or_on_how_it_is_cut(
    config: DeltaNetConfig, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GROUPS, "cpu", group)
    check_cuts(config, "cpu")
