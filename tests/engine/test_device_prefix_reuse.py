"""The engine's prefix reuse with the GPU's decoder, for which PyTorch on the CPU stands in: what the tests of the CPU check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import BuildEngine
from tests.engine import test_cached_prefill as sparse_checks
from tests.engine import test_prefix_reuse as checks
from tests.engine.test_prefix_reuse import LIMITS, model  # noqa: F401  a fixture
from tests.engine.test_reuse_operations import ROOM, check_operations
from tests.plugins.cases import CASES, method_flags
from tests.plugins.prkv.settings import UPDATES
from tests.support.device_stand_ins import make_decoder
from tests.support.long_prompts import WINDOW, Load, known_answers

from kvseek.core.config import read_config
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.engine.tokenizer import Tokenizer

# What PyTorch stands in for.
METHODS = ("full", "flat", "prkv")
OFFLOADS = ("always", "never")
LoadDevice = Callable[..., Engine]


@pytest.fixture(scope="module")
def load_device(model: Path, build_engine: BuildEngine) -> LoadDevice:  # noqa: F811
    """Load an engine as `load` of the CPU's tests does, but for `offload` of its cache."""

    def make(offload: str, method: str = "full", *flags: str, sparse: bool = False, **cache: object) -> Engine:
        window, limits = (sparse_checks.FLAGS, sparse_checks.LIMITS) if sparse else (WINDOW, LIMITS)
        attends = method_flags(method, CASES[method].sparse if sparse else CASES[method].everything)
        directory = build_engine(model, method, *window, *limits, *attends, *flags, "--kernels", "reference")
        config = read_config(directory)
        if offload == "never" and "kv_cache_host_memory_bytes" in cache:
            cache["kv_cache_device_memory_bytes"] = cache.pop("kv_cache_host_memory_bytes")
        decoder = make_decoder(directory, offload, cache=dataclasses.replace(config.cache, **cache))
        return Engine(decoder.config, decoder, Tokenizer(directory))

    return make


@pytest.fixture(params=OFFLOADS)
def load(request: pytest.FixtureRequest, load_device: LoadDevice) -> Load:
    return partial(load_device, request.param)


@pytest.fixture(scope="module")
def plain(load_device: LoadDevice) -> checks.Plain:
    """What an engine answers that reads every prompt, and has only one request."""
    return known_answers(load_device("always", reuse=False))


@pytest.mark.parametrize(
    "check",
    [
        checks.test_a_prompt_that_begins_alike_has_the_same_answer,
        checks.test_a_conversation_goes_on,
        checks.test_a_cancelled_request_keeps_what_all_layers_have_read,
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_what_holds_on_the_cpu(
    method: str, check: Callable[[str, Load, checks.Plain], None], load: Load, plain: checks.Plain
) -> None:
    check(method, load, plain)


@pytest.mark.parametrize("method", METHODS)
def test_random_operations(method: str, load: Load, plain: checks.Plain) -> None:
    engine = load(method, kv_cache_host_memory_bytes=ROOM * checks.EXTENT_BYTES)
    check_operations(lambda folder: engine, plain, restarts=False, examples=2)


def test_a_reused_prefix_has_the_static_set_of_a_fresh_prompt(load: Load) -> None:
    checks.check_few_rows(*(load("prkv", *UPDATES, sparse=True, reuse=reuse) for reuse in (None, False)), tokens=30)


def test_a_layer_that_is_read_ahead_is_given_up_with_its_request(load: Load, plain: checks.Plain) -> None:
    """A second prompt is cancelled while a layer is computed, and the extents that it was reading go to another one."""
    engine = load()
    checks.ask(engine, Request(checks.DOCUMENT, 3))
    engine._reader._budget = 1
    late = engine.submit(Request(checks.DOCUMENT + (5,) * 300, 3))
    engine.step()
    engine.cancel(late)
    engine._reader._budget = 1 << 20
    request = Request((4, *checks.DOCUMENT), 5)
    assert checks.ask(engine, request)[0][0] == plain(request)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_the_rest_of_a_prompt_is_read_as_by_decode_steps(offload: str, load_device: LoadDevice) -> None:
    load = partial(load_device, offload, sparse=True, cached_prefill="sparse")
    sparse_checks.test_the_rest_of_a_prompt_is_read_as_by_decode_steps("flat", "native", load)
