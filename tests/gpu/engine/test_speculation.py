"""What tests/engine/test_speculation.py asks of engines on the CPU: the answers are those without drafts, to the bit."""

from __future__ import annotations

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_preemption import LIMITS
from tests.engine.test_speculation import answers, drafts_of
from tests.gpu.engine.test_preemption import LONGER
from tests.gpu.engine.test_prefix_reuse import SPARSE, WINDOW
from tests.support.long_prompts import HEADS, SHAPE, load_changed

from kvseek.core.errors import ConfigError
from kvseek.engine.engine import Engine
from kvseek.engine.speculation import Speculation, check_speculation
from kvseek.plugins.registry import get_method

pytestmark = pytest.mark.gpu


def speculates(method: str) -> bool:
    traits = get_method(method).traits()
    return traits.verifies_drafts and traits.prefix_reuse == "entries"


MODELS = {
    "llama": {},
    "qwen3_next": {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
}


@pytest.mark.parametrize("offload", ["always", "never"])
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("name", [name for name, (method, _) in SPARSE.items() if speculates(method)])
def test_answers_are_those_without_drafts(
    name: str, architecture: str, offload: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    """With rows in host memory steps that verify do without hot rows, which others go on to use; states in all that do."""
    method, few = SPARSE[name]
    model = random_model(architecture, **SHAPE | MODELS[architecture], **HEADS, head_dim=64)
    directory = on_gpu(model, method, *WINDOW, *LIMITS, *few, "--dtype", "bfloat16")
    expected = answers(load_changed(directory, {"offload": offload}), LONGER)
    for acceptance in (0.0, 0.7, 1.0):
        fresh = load_changed(directory, {"offload": offload})
        engine = Engine(fresh.config, fresh.decoder, fresh.tokenizer, speculation=Speculation())
        engine.make_drafter = drafts_of(LONGER, expected, acceptance)
        for preempted in (False, True):
            assert answers(engine, LONGER, preempted=preempted) == expected
        assert engine.preemptions > 3


@pytest.mark.parametrize("name", [name for name, (method, _) in SPARSE.items() if not speculates(method)])
def test_others_are_refused(name: str, random_model: RandomModel, on_gpu: BuildEngine) -> None:
    method, few = SPARSE[name]
    model = random_model("llama", **SHAPE, **HEADS, head_dim=64)
    config = load_changed(on_gpu(model, method, *WINDOW, *LIMITS, *few, "--dtype", "bfloat16")).config
    with pytest.raises(ConfigError, match=f"speculation = 'ngram': must be left out .*method = '{method}'"):
        check_speculation(config, Speculation())
