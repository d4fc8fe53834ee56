"""The multi-token-prediction head against transformers' layers, and answers of engines that draft with it."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import BuildEngine
from tests.engine.test_preemption import LIMITS, REQUESTS, prompt
from tests.engine.test_speculation import answers
from tests.support.long_prompts import HEADS, SHAPE, WINDOW
from tests.support.random_models import class_prefix, randomise, save_random_model
from torch import Tensor

from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.engine.model import mtp
from kvseek.engine.speculation import PATIENCE, MtpDrafter, Speculation, StepCosts

KINDS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


class Reference:
    """A random hybrid and its head, in transformers; `save` writes both as one checkpoint."""

    def __init__(self, directory: Path, architecture: str) -> None:
        import transformers

        self.path = save_random_model(directory, architecture, **SHAPE | KINDS, **HEADS)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.path)
        config = copy.deepcopy(self._model.config)
        config.num_hidden_layers, config.layer_types, config.mlp_only_layers = 1, ["full_attention"], []
        text = "Text" * architecture.startswith("qwen3_5")
        torch.manual_seed(5)
        self._layer: Any = getattr(transformers, f"{class_prefix(architecture)}{text}Model")(config).eval()
        randomise(self._layer)
        hidden = config.hidden_size
        self._fc = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
        self._norms = {name: torch.rand(hidden) - 0.5 for name in ("embedding", "hidden")}
        own = {f"mtp.{name}": part for name, part in self._layer.state_dict().items() if "embed" not in name}
        own |= {"mtp.fc.weight": self._fc}
        own |= {f"mtp.pre_fc_norm_{name}.weight": part for name, part in self._norms.items()}
        file = self.path / "model.safetensors"
        tensors = load_file(file) | {name: part.contiguous().clone() for name, part in own.items()}
        save_file(tensors, file, metadata={"format": "pt"})

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int, sink: int, reach: int) -> list[int]:
        """Compute everything again: the pair of position p attends to those before `sink`, and the latest `reach`."""
        states = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        pairs, following, drafted = [], list(tokens[1:]), list[int]()
        for hidden, token in zip(states, following, strict=True):
            pairs.append(self._pair(hidden, token))
        for _ in range(count):
            size = len(pairs)
            places = torch.arange(size)
            back = places[:, None] - places
            seen = (back >= 0) & ((places < sink) | (back < reach))
            mask = torch.zeros(1, 1, size, size).masked_fill(~seen, torch.finfo(torch.float32).min)
            hidden = self._layer(inputs_embeds=torch.stack(pairs)[None], attention_mask=mask).last_hidden_state[0, -1]
            drafted.append(int(self._model.lm_head(hidden).argmax()))
            pairs.append(self._pair(hidden, drafted[-1]))
        return drafted

    def _pair(self, hidden: Tensor, token: int) -> Tensor:
        parts = {"embedding": self._model.model.embed_tokens.weight[token], "hidden": hidden}
        normed = [
            part * torch.rsqrt(part.square().mean() + self._model.config.rms_norm_eps) * (1 + self._norms[name])
            for name, part in parts.items()
        ]
        return self._fc @ torch.cat(normed)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("mtp") / "model", request.param)


class AllDrafted(StepCosts):
    """Has as many tokens drafted as may be."""

    def choose(self, chances: Sequence[Sequence[float]], most_rows: int) -> list[int]:
        return [len(own) for own in chances]


def test_drafts_are_those_of_transformers(
    reference: Reference, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prompts and after steps that accept some of a draft, with more tokens than the head keeps rows of."""
    monkeypatch.setattr(mtp, "SINK", 3)
    monkeypatch.setattr(mtp, "WINDOW", 20)
    engine = Engine.load(
        build_engine(reference.path, "full", *WINDOW, *LIMITS, "--mtp"), speculation=Speculation("mtp", 4)
    )
    known, chance, found = prompt(3, 20), random.Random(4), list[int]()
    plain = Engine.load(build_engine(reference.path, "full", *WINDOW, *LIMITS))
    (expected,) = plain.generate([Request(known, 40)])
    whole, head = (*known, *expected), engine.decoder.mtp
    assert head is not None
    follow, draft, tokens = head.follow, head.draft, list[int]()

    def noted(slot: int, so_far: Sequence[int]) -> bool:
        tokens[:] = so_far
        return follow(slot, so_far)

    def checked(slot: int, count: int) -> list[int]:
        drafted = draft(slot, count)
        assert drafted == reference.draft(tokens, count, 3, 20 - 7)
        found.append(count)
        right = chance.randint(0, count)  # so many are accepted
        return [*whole[len(tokens) :][:right], *drafted[right:]]

    monkeypatch.setattr(head, "follow", noted)
    monkeypatch.setattr(head, "draft", checked)
    engine.step_costs = AllDrafted()
    assert engine.generate([Request(known, 40)]) == [expected]
    assert len(found) > 8


@pytest.mark.parametrize("method", ["full", "nested"])
def test_answers_are_those_without_drafts(
    method: str, reference: Reference, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests at once, sampled ones too, some of which are preempted or begin with others' rows."""
    form = (*WINDOW, *LIMITS, "--dtype", "bfloat16")
    expected = answers(Engine.load(build_engine(reference.path, method, *form)), REQUESTS)
    engine = Engine.load(build_engine(reference.path, method, *form, "--mtp"), speculation=Speculation("mtp"))
    engine.step_costs = AllDrafted()
    reports = [0, 0]
    engine.on_step = lambda report: reports.__setitem__(0, reports[0] + report.drafted_tokens)
    assert answers(engine, REQUESTS, preempted=True) == expected
    assert reports[0] > 100
    again = answers(engine, REQUESTS[:2])
    assert [one[0] for one in again] == [one[0] for one in expected[:2]]


class Head:
    """Guesses 7, 8, 9, …; is ready whenever it is asked."""

    def follow(self, slot: int, tokens: Sequence[int]) -> bool:
        return True

    def draft(self, slot: int, count: int) -> list[int]:
        return list(range(7, 7 + count))


def test_a_head_that_is_wrong_is_believed_again_later() -> None:
    drafter, text = MtpDrafter(Head(), 0, [1, 2, 3]), [7]
    drafter.follow(text)
    first = drafter.chances(3)
    assert first == sorted(first, reverse=True)
    for number in range(40):
        assert drafter.draft(2) == [7, 8]
        text.append(100 + number)
        drafter.follow(text)
    assert drafter.chances(1)[0] < 0.05
    for _ in range(PATIENCE):
        text.append(5)
        drafter.follow(text)
    assert drafter.chances(3) == first
    for _ in range(20):
        text += [*drafter.draft(2), 5]
        drafter.follow(text)
    assert drafter.chances(1)[0] > 0.95


def test_one_process_on_the_cpu_drafts(reference: Reference, build_engine: BuildEngine) -> None:
    config = read_config(build_engine(reference.path, "full", *WINDOW, *LIMITS, "--dtype", "bfloat16", "--mtp"))
    for fields in ({"device": "cuda"}, {"tp_size": 2}):
        with pytest.raises(ConfigError, match="mtp = True: must be left out on cuda and with tp_size > 1"):
            dataclasses.replace(config, **fields)


def test_models_without_a_head_say_so(random_model: Callable[..., Path], build_engine: BuildEngine) -> None:
    for architecture in ("qwen3_next", "llama"):
        with pytest.raises(ConfigError, match=r"mtp = True: must be left out with files that have no tensors mtp\.\*"):
            open_checkpoint(random_model(architecture), mtp=True)
    with pytest.raises(
        ConfigError, match="speculation = 'mtp': must be left out with an engine that has no multi-token"
    ):
        Engine.load(build_engine(random_model("qwen3_5"), "full"), speculation=Speculation("mtp"))
