"""Requests whose prompts begin alike, in an engine: what is not read again, who shares it, and that answers stay the same."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.cache.test_isolation import arrays_of, poison, tensors_in
from tests.plugins.cases import CASES, method_flags
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.support.long_prompts import (
    DOCUMENT,
    HEADS,
    SHAPE,
    SINK,
    WINDOW,
    Load,
    Plain,
    known_answers,
    load_changed,
)
from tests.support.prefill import run_to_end
from tests.support.random_models import WINDOWS, save_random_model
from tests.support.steps_ahead import run_ahead
from torch import Tensor

from kvseek.core.request import FinishReason, Request, RequestStatistics, SamplingConfig
from kvseek.engine.cache.prefixes.tree import TOKEN_BYTES, Node
from kvseek.engine.cache.states import Snapshot
from kvseek.engine.engine import Engine
from kvseek.engine.loading.prefixes import DiskSettings
from kvseek.plugins.registry import METHODS, method_traits

EXTENT_BYTES = 2 * 1024 * 2 * 32 * 4  # of two layers and one KV head of 32 channels
LIMITS = ("--max_batch_size", "8", "--max_seq_len", "3200", "--prefill_chunk_tokens", "512")
Answer = tuple[list[int], RequestStatistics]
# By name: a method, and flags. Requests of `ctkvr` share rows only where it keeps no codes.
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{method: (method, ()) for method in METHODS},
    "ctkvr-rows": ("ctkvr", method_flags("ctkvr", BY_KEYS)),
}


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("llama", **SHAPE, **HEADS)


@pytest.fixture(scope="module")
def load(model: Path, build_engine: BuildEngine) -> Load:
    """Load an engine whose method attends to everything; with fields of its configuration of the cache changed."""

    def make(name: str = "full", *flags: str, **cache: object) -> Engine:
        method, own = NAMES[name]
        everything = method_flags(method, CASES[method].everything)
        return load_changed(build_engine(model, method, *WINDOW, *LIMITS, *everything, *own, *flags), cache)

    return make


@pytest.fixture(scope="module")
def plain(load: Load) -> Plain:
    """What an engine answers that reads every prompt, and has only one request."""
    return known_answers(load(reuse=False))


def ask(engine: Engine, *requests: Request) -> list[Answer]:
    """Tokens and statistics of requests that are submitted together."""
    ids = [engine.submit(request) for request in requests]
    outputs = run_to_end(engine)
    tokens = [[o.token_id for o in outputs if o.request_id == one and o.token_id is not None] for one in ids]
    last = {o.request_id: o.statistics for o in outputs if o.finish_reason is not None}
    statistics = [last[one] for one in ids]
    assert engine._cache.extents.used == 0
    return [(one, two) for one, two in zip(tokens, statistics, strict=True) if two is not None]


class KeptRows:
    """Watches that the rows of kept extents are never written, nor the index entries of whole ones, if they are shared."""

    def __init__(self, engine: Engine) -> None:
        self._tree, rows = engine._prefixes._tree, engine._cache.rows
        self._pools = rows.device_rows, rows.pool.rows
        shares = method_traits(engine.config).prefix_reuse == "entries"
        held = tensors_in([vars(index) for index in engine.decoder.retrieval.indexes], set()) if shares else ()
        capacity = rows.layout.capacity
        self._entries = [one for one in held if one.ndim > 2 and (one.shape[0], one.shape[2]) == (capacity, 1024)]
        self._rows = dict[Node, list[torch.Tensor]]()

    def check(self) -> None:
        if self._pools[0].is_cuda:
            torch.cuda.synchronize()
        rows = {}
        for node in self._tree:
            count = len(node.tokens) // TOKEN_BYTES - (SINK if node.parent is None else 0)
            now = [pool[node.extent, :, :, : max(0, count)] for pool in self._pools]
            now += [array[node.extent] for array in self._entries] if count == 1024 else []
            rows[node] = self._rows[node] if node in self._rows else [part.clone() for part in now]
            assert all(torch.equal(one, other) for one, other in zip(rows[node], now, strict=True))
        self._rows = rows


def may_reuse(engine: Engine, prompt: tuple[int, ...], common: int) -> int:
    """How much of a prompt is not read whose first `common` tokens are known: not the last ones that a method wants to see."""
    places = engine._cache.retrieval_tokens(len(prompt))
    unread = method_traits(engine.config).last_queries(places)
    return max(0, min(common, len(prompt) - max(1, unread))) if places else 0


def check_prompts_that_begin_alike(engine: Engine, plain: Plain) -> None:
    """Prompts that leave DOCUMENT anywhere reuse what they may, and have the answers of an engine that keeps nothing."""
    for prompt, reused in (
        (DOCUMENT, 0),
        (DOCUMENT, len(DOCUMENT) - 1),  # its last token is read, whose logits are needed
        (DOCUMENT + (5,) * 40, len(DOCUMENT)),  # ends in the ring of the first
        (DOCUMENT[:1500] + (7,) * 40, 1500),  # in the middle of an extent
        (DOCUMENT[: 1024 + SINK] + (9,) * 30, 1024 + SINK),  # at the end of one
        (DOCUMENT[: SINK - 1] + (11,) * 60, SINK - 1),  # in the sink
        (DOCUMENT[:1500] + (7,) * 40 + (6,) * 900, 1540),
    ):
        request = Request(prompt, 12)
        ((tokens, statistics),) = ask(engine, request)
        assert statistics.reused_tokens == may_reuse(engine, prompt, reused)
        assert tokens == plain(request)


@pytest.mark.parametrize("method", NAMES)
def test_a_prompt_that_begins_alike_has_the_same_answer(method: str, load: Load, plain: Plain) -> None:
    check_prompts_that_begin_alike(load(method), plain)


@pytest.mark.parametrize(("architecture", "fields"), [("qwen2_moe", {"mlp_only_layers": [0]}), ("qwen3_moe", {})])
def test_mixtures_of_experts_answer_the_same_behind_a_prefix(
    architecture: str, fields: dict[str, object], random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path
) -> None:
    """In bfloat16, where rows are the same to the bit whatever is read with them, in memory and from disk."""
    own = random_model(architecture, **SHAPE, **HEADS, head_dim=32, **fields)
    everything = method_flags("nested", CASES["nested"].everything)
    directory = build_engine(own, "nested", *WINDOW, *LIMITS, *everything, "--dtype", "bfloat16")
    plain = known_answers(load_changed(directory, {"reuse": False}))
    check_prompts_that_begin_alike(load_changed(directory), plain)
    for reused in (0, len(DOCUMENT)):
        engine = Engine.load(directory, disk=DiskSettings(tmp_path))
        ((tokens, statistics),) = ask(engine, request := Request(DOCUMENT + (5,) * (40 if reused else 0), 12))
        assert (tokens, statistics.reused_tokens) == (plain(request), reused)
        engine.close()


HYBRID_SHAPE = SHAPE | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
}


@pytest.fixture(scope="module", params=["states", "windows", "gemma3"])
def hybrid(
    request: pytest.FixtureRequest, random_model: RandomModel, build_engine: BuildEngine
) -> Callable[..., Engine]:
    """Load an engine of a hybrid, or with sliding windows, in bfloat16, with fields of its cache's configuration changed."""
    architecture, shape = "qwen3_next", dict[str, Any](HYBRID_SHAPE)
    if request.param == "windows":
        architecture, shape = "qwen3", shape | WINDOWS | {"sliding_window": 100}
    elif request.param == "gemma3":
        architecture, shape = "gemma3", shape | {"layer_types": WINDOWS["layer_types"]}
    own = random_model(architecture, **shape, **HEADS)
    everything = method_flags("nested", CASES["nested"].everything)
    directory = build_engine(own, "nested", *WINDOW, *LIMITS, *everything, "--dtype", "bfloat16")
    return lambda **cache: load_changed(directory, {"reuse_state_tokens": 512, **cache})


def test_a_hybrid_goes_on_from_the_last_states_that_are_kept(hybrid: Callable[..., Engine]) -> None:
    """Those of each 512 tokens, of the last block of 64 of a prompt, and of a request's end; answers are those without any."""
    engine, plain = hybrid(), known_answers(hybrid(reuse=False))
    for prompt, reused in (
        (DOCUMENT, 0),
        (DOCUMENT, 2240),
        (DOCUMENT + (5,) * 40, 2240),
        (DOCUMENT[:1500] + (7,) * 40, 1024),
        (DOCUMENT[:1100] + (9,) * 30, 1024),
        (DOCUMENT[:200] + (9,) * 300, 0),
        (DOCUMENT[:1500] + (7,) * 40 + (6,) * 900, 1536),
        (DOCUMENT[:1500] + (7,) * 40 + (8,) * 300, 1536),
    ):
        request = Request(prompt, 12)
        ((tokens, statistics),) = ask(engine, request)
        assert (statistics.reused_tokens, tokens) == (reused, plain(request))
    turn = DOCUMENT + tuple(plain(Request(DOCUMENT, 12))) + (4,) * 30
    ((_, statistics),) = ask(engine, Request(turn, 4))
    assert statistics.reused_tokens == len(DOCUMENT) + 11, "the end of the first request, whose last token has no rows"


def test_rings_have_room_for_steps_that_were_launched_ahead(hybrid: Callable[..., Engine]) -> None:
    """As on a GPU: the step behind an end token has been launched. A hybrid's states then have had a token too many."""
    engine, answer = hybrid(), tuple(range(50, 70))
    decoder, turn = run_ahead(engine), Request(DOCUMENT + answer[:6] + (4,) * 30, 12)
    ask(engine, Request(DOCUMENT, 20, SamplingConfig(forced_tokens=answer), end_ids=answer[6:7]))
    assert decoder.launches
    ((tokens, statistics),) = ask(engine, turn)
    assert tokens == known_answers(hybrid(reuse=False))(turn)
    states = engine._cache.states
    assert statistics.reused_tokens == (len(DOCUMENT) + 6 if states and states.rings else 2240)


def test_a_hybrids_requests_that_come_together_share_states(hybrid: Callable[..., Engine]) -> None:
    engine, plain = hybrid(), known_answers(hybrid(reuse=False))
    requests = [Request(DOCUMENT + (5 + number,) * 60, 8) for number in range(4)]
    for request, (tokens, statistics) in zip(requests, ask(engine, *requests), strict=True):
        assert tokens == plain(request)
        assert statistics.reused_tokens == (0 if request is requests[0] else 2048)


def snapshot_bytes(engine: Engine) -> list[int]:
    """Sizes of an engine's snapshots."""
    return [sum(part.nbytes for layer in one.layers for part in layer) for one in engine._prefixes._snapshots]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Snapshot]:
    """All snapshots that a test makes and that have not been freed."""
    found, make = weakref.WeakSet[Snapshot](), Snapshot.__init__

    def init(snapshot: Snapshot, tokens: int) -> None:
        make(snapshot, tokens)
        found.add(snapshot)

    monkeypatch.setattr(Snapshot, "__init__", init)
    return found


def test_states_have_a_budget(hybrid: Callable[..., Engine]) -> None:
    """The last ones of a prompt are made, and the least recently used go; without any, prompts are read again."""
    one = hybrid()
    ask(one, Request(DOCUMENT, 4))
    (size,) = set(snapshot_bytes(one))
    plain = known_answers(hybrid(reuse=False))
    other = tuple(reversed(DOCUMENT))
    for snapshots, reused in ((2, [0, 2240, 0, 0]), (9, [0, 2240, 0, 2240]), (0, [0, 0, 0, 0])):
        engine, found = hybrid(reuse_state_bytes=snapshots * size), list[int]()
        for prompt in (DOCUMENT, DOCUMENT + (5,) * 40, other, DOCUMENT + (6,) * 40):
            ((tokens, statistics),) = ask(engine, Request(prompt, 4))
            assert tokens == plain(Request(prompt, 4))
            found.append(statistics.reused_tokens)
            assert sum(snapshot_bytes(engine)) <= snapshots * size
        assert found == reused


@pytest.mark.parametrize("most", [1, 4])
def test_states_of_running_requests_are_within_the_budget(
    most: int, hybrid: Callable[..., Engine], alive: weakref.WeakSet[Snapshot]
) -> None:
    """Those of prompts that are being read, of requests that go on, and of some that are cancelled meanwhile."""
    ask(one := hybrid(), Request(DOCUMENT, 4))
    (size,) = set(snapshot_bytes(one))
    del one
    gc.collect()
    others = set(alive)
    engine, plain = hybrid(reuse_state_bytes=most * size), known_answers(hybrid(reuse=False))
    prompts = [tuple((token + number) % 300 for token in DOCUMENT[: 1300 + 90 * number]) for number in range(6)]
    tokens = {engine.submit(Request(prompt, 30)): list[int]() for prompt in prompts}
    ids, counts = list(tokens), list[int]()
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += [] if output.token_id is None else [output.token_id]
        counts.append(len(alive - others))
        if len(counts) in (4, 9):
            engine.cancel(ids[len(counts) // 4])
    assert 0 < max(counts) <= most
    for prompt, answer in zip(prompts, tokens.values(), strict=True):
        assert answer == plain(Request(prompt, 30))[: len(answer)]
    assert not any(states.pending for states in [engine._cache.states] if states)
    assert all(engine._prefixes._snapshots.values()), "what is pending nowhere any more is forgotten"


def test_states_go_with_their_extents(hybrid: Callable[..., Engine]) -> None:
    room = 8 * EXTENT_BYTES // 2  # of one layer with rows
    engine, chance = hybrid(kv_cache_host_memory_bytes=room), random.Random(5)
    plain = known_answers(hybrid(reuse=False))
    for number in range(24):
        begin = DOCUMENT[: chance.choice([700, 1100, 1500, 2000, 2300])]
        request = Request(begin + (4 + number % 5,) * chance.randrange(1, 400), chance.randrange(1, 40))
        ((tokens, _),) = ask(engine, request)
        assert tokens == plain(request)
        prefixes = engine._prefixes
        held = {(node, within, kept) for kept, places in prefixes._snapshots.items() for node, within in places.items()}
        assert held == {(node, within, kept) for node in prefixes._tree for within, kept in node.states.items()}
    assert engine._prefixes.counts.evicted_extents > 0


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("method", NAMES)
def test_few_selected_rows_are_those_of_a_fresh_prompt(
    method: str, kernels: str, model: Path, build_engine: BuildEngine
) -> None:
    """An answer is a function of the request's own tokens, whatever is kept; the references take long for each."""
    method, own = NAMES[method]
    few = method_flags(method, CASES[method].sparse)
    directory = build_engine(model, method, *WINDOW, *LIMITS, *few, *own, "--kernels", kernels)
    check_few_rows(Engine.load(directory), load_changed(directory, {"reuse": False}), 80 if kernels == "native" else 20)


def check_few_rows(engine: Engine, other: Engine, tokens: int) -> None:
    """Answers of so many tokens to questions about one document are those of another engine, which keeps nothing."""
    chance = random.Random(3)
    document, *questions = [tuple(chance.randrange(3, 380) for _ in range(size)) for size in (1300, 200, 100)]
    ask(engine, Request(document, 3))
    for question in questions:
        request = Request(document + question, tokens)
        ((answer, statistics),) = ask(engine, request)
        assert statistics.reused_tokens == may_reuse(engine, request.prompt_ids, 1300)
        assert answer == ask(other, request)[0][0]


@pytest.mark.parametrize("method", NAMES)
def test_a_conversation_goes_on(method: str, load: Load, plain: Plain) -> None:
    """Six turns, between which tokens leave the window; each prompt has all that was said before."""
    engine, said, before = load(method), DOCUMENT[:960], 0
    for turn in range(6):
        request = Request(said, 40)
        ((tokens, statistics),) = ask(engine, request)
        assert tokens == plain(request)
        assert statistics.reused_tokens == may_reuse(engine, said, before)
        before = len(said) + 39  # the last token of an answer has no rows
        said += (*tokens, *((turn + 3,) * 20))
    assert engine.cache_usage.extents_kept == 2, "shorter beginnings of the same conversation are not kept too"


@pytest.mark.parametrize(
    ("method", "shared"), [("full", 2), ("ctkvr-rows", 2), ("ctkvr", 0), ("clusterkv", 0), ("prkv", 0)]
)
def test_requests_that_are_submitted_together_read_a_document_once(
    method: str, shared: int, load: Load, plain: Plain
) -> None:
    engine = load(method)
    # The document ends with an extent, so that as much of it is reused when the first request has ended.
    requests = [Request(DOCUMENT[: 2048 + SINK] + (number,) * 200, 5) for number in range(8)]
    answers = ask(engine, *requests)
    assert [tokens for tokens, _ in answers] == [plain(request) for request in requests]
    reused = [statistics.reused_tokens for _, statistics in answers]
    assert [statistics.shared_extents for _, statistics in answers] == [0] + [shared] * 7
    usage = engine.cache_usage
    assert (usage.reuse.queried_tokens, usage.reuse.reused_tokens) == (8 * len(requests[0].prompt_ids), sum(reused))
    if method == "prkv":  # the rows of its running requests have changed places
        assert set(reused) <= {0, 2048 + SINK}
    else:
        assert reused == [0] + [2048 + SINK] * 7


@pytest.mark.parametrize("method", NAMES)
def test_a_cancelled_request_keeps_what_all_layers_have_read(method: str, load: Load, plain: Plain) -> None:
    engine = load(method)
    engine._reader._budget = 512 * 2  # a quarter of the prompt a step
    first = engine.submit(Request(DOCUMENT, 100))
    engine.step()
    engine.cancel(first)
    assert engine.cache_usage.extents_kept == 0, "no token has passed all layers"
    second, steps = engine.submit(Request(DOCUMENT, 100)), 0
    while steps < 10:
        steps += any(output.token_id is not None for output in engine.step())
    engine.cancel(second)
    request = Request((*DOCUMENT, *plain(Request(DOCUMENT, 100))[:9], 7), 5)
    ((tokens, statistics),) = ask(engine, request)
    reused = may_reuse(engine, request.prompt_ids, len(DOCUMENT) + 9)
    assert (tokens, statistics.reused_tokens) == (plain(request), reused)


def test_a_request_that_fails_keeps_nothing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "launch", lambda *step: 1 // 0)
        engine.submit(Request(DOCUMENT[:1000], 5))
        assert run_to_end(engine)[-1].finish_reason is FinishReason.ERROR
    assert engine.cache_usage.extents_kept == 0


def test_as_much_is_copied_as_there_is_room_for(load: Load, plain: Plain) -> None:
    """Four extents: of the three that are kept, two must go for the second request, and it copies from the first one."""
    engine = load("clusterkv", kv_cache_host_memory_bytes=4 * EXTENT_BYTES)
    ask(engine, Request(DOCUMENT, 5))
    request = Request((*DOCUMENT, 7), 5)
    ((tokens, statistics),) = ask(engine, request)
    assert (tokens, statistics.reused_tokens) == (plain(request), 1024 + SINK)


def test_prompts_whose_logits_are_asked_for_are_read(load: Load) -> None:
    engine = load()
    asked = Request(DOCUMENT[:1200], 2, SamplingConfig(prompt_logprobs=0))
    answers = [ask(engine, request)[0] for request in (Request(DOCUMENT[:1200], 2), asked)]
    assert answers[0][0] == answers[1][0]
    assert answers[1][1].reused_tokens == 0


@pytest.mark.parametrize("method", [method for method in NAMES if method != "full"])
def test_what_is_free_tells_nothing(method: str, load: Load, plain: Plain) -> None:
    engine = load(method)
    assert check_what_is_free(engine, plain, arrays_of, ("nan",)) == may_reuse(
        engine, DOCUMENT[:1500] + (8,) * 90, 1500
    )


def check_what_is_free(
    engine: Engine, plain: Plain, arrays: Callable[[Engine], Iterable[Tensor]], kinds: Sequence[str]
) -> int:
    """Windows, entries of slots, hot rows and all extents but the kept ones may hold anything; tokens first reused."""
    generator, extents, reused = torch.Generator().manual_seed(3), engine._cache.extents, list[int]()
    first, second = Request(DOCUMENT[:1500], 12), Request(DOCUMENT[:1500] + (8,) * 90, 30)
    ask(engine, first)
    for kind in kinds:
        free = set(extents._free)
        assert 0 < len(free) < extents.capacity
        with torch.inference_mode():
            for array in arrays(engine):
                for number in range(array.shape[0]):
                    if array.shape[0] != extents.capacity or number in free:
                        poison(array[number], kind, generator)
        ((tokens, statistics),) = ask(engine, second)
        assert tokens == plain(second)
        reused.append(statistics.reused_tokens)
        assert reused[-1] >= may_reuse(engine, second.prompt_ids, 1500)
    return reused[0]


def test_longrope_rotates_the_keys_of_longer_requests_differently(tmp_path: Path, build_engine: BuildEngine) -> None:
    """A request on the far side of the short factors finds nothing of those on this side, and leaves nothing for them."""
    parameters = {"rope_theta": 10000.0, "rope_type": "longrope", "original_max_position_embeddings": 1400}
    parameters |= {"short_factor": [1.0] * 16, "long_factor": [1.0 + 2 * pair for pair in range(16)]}
    model = save_random_model(tmp_path / "model", "llama", rope_parameters=parameters, max_position_embeddings=4096)
    directory = build_engine(model, "full", *WINDOW, *LIMITS)
    engine, fresh = Engine.load(directory), load_changed(directory, {"reuse": False})
    for length, more, reused in (
        (1300, 5, 0),  # leaves its rows
        (1350, 5, 1300),  # finds them
        (1380, 40, 1350),  # finds them, but grows too long to leave its own
        (1410, 5, 0),  # is too long to find any
        (1390, 5, 1350),
    ):
        request = Request(tuple(i * i * 13 % 300 + 3 for i in range(1300)) + (7,) * (length - 1300), more)
        ((tokens, statistics),) = ask(engine, request)
        assert tokens == fresh.generate([request])[0]
        assert statistics.reused_tokens == reused
