"""Steps that are launched before the host knows the tokens of the step before: nothing that a request gets may tell.

On a GPU every engine does so. Here a CPU's steps do, whose results the engine takes a step later, as it does there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import BuildEngine, RandomModel

from kvseek.core.batch import LATEST
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import Request, SamplingParams, StepOutput
from kvseek.engine.draws.sampling import Launched
from kvseek.engine.engine import Engine
from kvseek.engine.model.cpu.steps import HostSteps
from kvseek.plugins.registry import METHODS

SLOTS = 3
PROMPT = [i * 13 % 101 for i in range(160)]
FLAGS = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
LIMITS = ("--max_batch_size", str(SLOTS), "--max_seq_len", "400", "--max_input_len", "300")
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"logprobs": 3},
    {"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 6},
    {"temperature": 1.2, "bad_words": ((5,), (7, 9))},
    {"temperature": 1.0, "guide": Guide(GuideType.REGEX, "[a-z ]{3,12}")},
]


class StepsAhead(HostSteps):
    """A CPU's steps, used as a GPU's are. `launches` counts those that began before the step before was collected."""

    launches = 0

    @property
    def runs_ahead(self) -> bool:
        return True

    def launch(self, tokens: Any, slots: Any, samplers: Any) -> Launched:
        self.launches += LATEST in tokens
        return super().launch(tokens, slots, samplers)


@dataclass
class Pair:
    """Two engines of a directory, of which one runs ahead."""

    usual: Engine
    ahead: Engine

    @property
    def launches(self) -> int:
        assert isinstance(self.ahead.decoder.steps, StepsAhead)
        return self.ahead.decoder.steps.launches


@dataclass
class Run:
    """What the requests of a schedule get from an engine."""

    outputs: dict[int, list[StepOutput]] = field(default_factory=dict)

    def told(self) -> list[Any]:
        """All but times, and progress in reading."""
        return [
            [of_output(one) for one in outputs if one.token_id is not None or one.finish_reason]
            for outputs in self.outputs.values()
        ]


def of_output(output: StepOutput) -> Any:
    counts: Any = None
    if output.statistics is not None:
        times = dict.fromkeys(("submitted_at", "started_at", "first_token_at", "last_token_at"), 0.0)
        counts = replace(output.statistics, **times)
    logprobs = None if output.logprobs is None else [one for one, _ in output.logprobs.top]
    ends = output.token_id, output.end_id, output.finish_reason
    return ends, output.cached_tokens, output.attended_tokens, counts, logprobs, output.error


def start(directory: Path) -> Pair:
    pair = Pair(Engine.load(directory), Engine.load(directory))
    pair.ahead.decoder.steps.__class__ = StepsAhead
    return pair


@pytest.fixture(scope="module")
def pair_of(random_model: RandomModel, build_engine: BuildEngine) -> Callable[[str], Pair]:
    pairs = dict[str, Pair]()

    def find(method: str) -> Pair:
        if method not in pairs:
            pairs[method] = start(build_engine(random_model("llama"), method, *FLAGS, *LIMITS))
        return pairs[method]

    return find


def run(engine: Engine, requests: list[Request], cancels: dict[int, int]) -> Run:
    """All requests to their ends; `cancels` says after how many tokens a request is cancelled, by its number."""
    ids = {engine.submit(request): number for number, request in enumerate(requests)}
    found = Run({number: [] for number in ids.values()})
    seen = dict.fromkeys(ids, 0)
    while engine.has_work:
        for output in engine.step():
            number = ids[output.request_id]
            found.outputs[number].append(output)
            seen[output.request_id] += output.token_id is not None
            if (
                output.finish_reason is None
                and output.token_id is not None
                and seen[output.request_id] == cancels.get(number)
            ):
                end = engine.cancel(output.request_id)
                assert end is not None
                found.outputs[number].append(end)
    return found


def check_empty(engine: Engine) -> None:
    cache = engine._cache
    assert cache.extents.used == 0
    assert cache.tokens == cache.lengths == [0] * len(cache.tokens)
    assert sorted(engine._scheduler._free_slots) == list(range(SLOTS))
    assert engine._flight is None


def kept(engine: Engine) -> set[bytes]:
    """Every sequence of tokens of which something is kept."""
    found = set[bytes]()
    for node in engine._prefixes._tree:
        tokens, one = b"", node
        while one is not None:
            tokens, one = one.tokens + tokens, one.parent
        found.add(tokens)
    return found


requests_drawn = st.lists(
    st.tuples(
        st.integers(5, 160),  # tokens of the prompt
        st.integers(1, 40),  # max_tokens
        st.integers(0, len(SAMPLING) - 1),
        st.integers(0, 3),  # how it may end: by length, an end token, a stop word, a cancellation
        st.integers(0, 1 << 30),
    ),
    min_size=1,
    max_size=6,
)


def make_requests(drawn: list[tuple[int, int, int, int, int]], ends: list[int]) -> tuple[list[Request], dict[int, int]]:
    requests, cancels = list[Request](), dict[int, int]()
    for number, (length, most, kind, end, seed) in enumerate(drawn):
        params = SamplingParams(**(SAMPLING[kind] | {"seed": seed}))
        guided = params.guide is not None
        end_ids = tuple(ends) if end == 1 or guided else ()
        stop = ((ends[0],), (ends[1], ends[2])) if end == 2 else ()
        requests.append(
            Request(
                tuple(PROMPT[seed % 7 :][:length]),
                most,
                params,
                end_ids=end_ids,
                stop_words=stop,
                cache_salt=str(number),
            )
        )
        if end == 3:
            cancels[number] = 1 + seed % most
    return requests, cancels


@pytest.mark.parametrize("method", METHODS)
def test_requests_get_the_same(method: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(method)

    @settings(max_examples=12)
    @given(requests_drawn)
    def check(drawn: list[tuple[int, int, int, int, int]]) -> None:
        requests, cancels = make_requests(drawn, [3, 11, 42, 55, 90])
        for engine in (pair.usual, pair.ahead):
            engine._prefixes._evict(engine._cache.extents.capacity)
        before = pair.usual._meter.usage().host_rows, pair.ahead._meter.usage().host_rows
        usual, ahead = (run(engine, requests, cancels) for engine in (pair.usual, pair.ahead))
        assert ahead.told() == usual.told()
        for engine in (pair.usual, pair.ahead):
            check_empty(engine)
        after = pair.usual._meter.usage().host_rows, pair.ahead._meter.usage().host_rows
        assert after[0] - before[0] == pytest.approx(after[1] - before[1], abs=1000)
        if len(requests) <= SLOTS:  # else there is no room for what all leave, and who ends last stays
            assert kept(pair.ahead) == kept(pair.usual)

    check()
    assert pair.launches > 0
