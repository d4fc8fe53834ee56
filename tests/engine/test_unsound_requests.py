"""What a request leaves whose logits are not finite: nothing that it has used is kept, in memory or on disk.

So canaries are answered as by a fresh engine, whether they begin like it or not.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine
from tests.engine.number_faults import NAN, Outcome, ask, broken_activations, is_unsound, trial
from tests.engine.test_prefix_reuse import DOCUMENT, LIMITS, NAMES, WINDOW, Load, Plain, load, model, plain
from tests.plugins.cases import CASES, method_flags
from tests.support.prefill import run_to_end
from tests.support.waiting import wait_for

from kvseek.core.request import FinishReason, Request, Session, StepOutput
from kvseek.engine.cache.prefixes import store as prefix_store
from kvseek.engine.cache.prefixes.file import write_file
from kvseek.engine.cache.prefixes.store import PrefixStore, Write
from kvseek.engine.engine import Engine
from kvseek.engine.loading.prefixes import DiskSettings

__all__ = ["load", "model", "plain"]  # fixtures
QUESTIONS = [Request(DOCUMENT + (number,) * 20, 10) for number in (5, 6, 7)]  # that share the document
ALIKE = [QUESTIONS[1], Request(DOCUMENT[:1500] + (7,) * 40, 10)]
OTHERS = [Request(DOCUMENT[::-1][:1300], 10), Request(DOCUMENT[5:45], 10)]
METHODS = [name for name in NAMES if name != "ctkvr-rows"]


def check_canaries(engine: Engine, plain: Plain, requests: list[Request], failures: int = 0) -> None:
    """Each is answered as by a fresh engine, after at most so many failures of all of them."""
    for request in requests:
        while is_unsound((answer := ask(engine, request)[0])[0]):
            failures -= 1
            assert failures >= 0
        assert answer[1] == plain(replace(request, cache_salt=None, session=None))


@pytest.mark.parametrize("place", ["weights", "rows"])
@pytest.mark.parametrize("method", METHODS)
def test_after_a_nan_canaries_have_their_answers(method: str, place: str, load: Load, plain: Plain) -> None:
    """At once, as the first request that meets the NaN fails by name and takes what it has used with it."""
    outcome = trial(load(method), plain, place, NAN, random.Random(1))
    assert outcome == Outcome("failed", alike=Counter(right=3), others=Counter(right=1))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["weights", "rows", "activations"])
@pytest.mark.parametrize("method", METHODS)
def test_flipped_bits_fail_by_name_or_give_an_answer(method: str, place: str, load: Load, plain: Plain) -> None:
    """What stays finite is not noticed (docs/robustness.md), but ends no other request and nothing else."""
    engine, chance = load(method), random.Random(1)
    for bit in (30, 27, 3):
        outcome = trial(engine, plain, place, bit, chance)
        assert outcome.others == {"right": 1}


@pytest.mark.parametrize("method", NAMES)
def test_a_prompt_whose_logits_are_not_finite_leaves_nothing(method: str, load: Load, plain: Plain) -> None:
    """Neither its own rows, nor those that it shared with a document, nor those of others that go on from there."""
    engine = load(method)
    check_canaries(engine, plain, [QUESTIONS[0], *OTHERS])
    kept = engine.cache_usage.extents_kept
    with broken_activations(engine, 6):
        (end, _), (other, tokens) = ask(engine, QUESTIONS[1], Request(DOCUMENT[5:45], 10))
        assert is_unsound(end)
        assert (other.finish_reason, tokens) == (FinishReason.LENGTH, plain(OTHERS[1]))
    usage = engine.cache_usage
    assert usage.extents_kept == kept - usage.reuse.discarded_extents < kept
    assert (engine.unsound, engine.unsound_in_a_row) == (1, 0), "the other one has ended well"
    check_canaries(engine, plain, [*ALIKE, *QUESTIONS, *OTHERS])
    assert engine.cache_usage.reuse.reused_tokens > 0, "what was read anew is reused"


@pytest.mark.parametrize("method", NAMES)
def test_a_step_whose_logits_are_not_finite_ends_its_request_alone(method: str, load: Load, plain: Plain) -> None:
    """Others that share the document go on, those that share nothing keep what they leave."""
    engine = load(method)
    check_canaries(engine, plain, [QUESTIONS[0]])
    bad, alike, other = (Request(one.prompt_ids, 12) for one in (QUESTIONS[1], QUESTIONS[2], OTHERS[0]))
    expected = [plain(one) for one in (bad, alike, other)]
    ids, outputs = [engine.submit(one) for one in (bad, alike, other)], list[StepOutput]()
    while len(engine._scheduler.decoding()) < 3:
        outputs += engine.step()
    slot = next(one.slot for one in engine._scheduler.running if one.request_id == ids[0])
    engine._cache.window[0, slot] = torch.nan
    outputs += run_to_end(engine)
    ends = {output.request_id: output for output in outputs if output.finish_reason is not None}
    assert [is_unsound(ends[one]) for one in ids] == [True, False, False]
    for one, tokens in zip(ids[1:], expected[1:], strict=True):
        assert [o.token_id for o in outputs if o.request_id == one and o.token_id is not None] == tokens
    assert engine.cache_usage.extents_kept == 2, "those of the one that shared nothing"
    check_canaries(engine, plain, [*ALIKE, *QUESTIONS, *OTHERS])


@pytest.fixture(scope="module")
def directory(model: Path, build_engine: BuildEngine) -> Path:
    return build_engine(model, "nested", *WINDOW, *LIMITS, *method_flags("nested", CASES["nested"].everything))


def on_disk(engine: Engine) -> int:
    """Files, once everything has been written or removed."""
    store = engine._prefixes.store
    wait_for(lambda: not (store._erasures or store._writes or store._busy_since is not None))
    return len([path for path in store.folder.path.iterdir() if path.suffix != ".new"])


def test_what_a_failed_request_has_used_goes_from_disk(directory: Path, tmp_path: Path, plain: Plain) -> None:
    """Also what is no longer in memory, and what a session keeps; files of others stay."""
    engine = Engine.load(directory, disk=DiskSettings(tmp_path))
    check_canaries(engine, plain, [Request(OTHERS[0].prompt_ids, 10, cache_salt="own")])
    others = on_disk(engine)
    session = Session("conversation", 100)
    check_canaries(engine, plain, [QUESTIONS[0], Request(QUESTIONS[2].prompt_ids, 10, session=session)])
    assert on_disk(engine) > others
    engine._prefixes._evict(1)  # the end of a question, which stays on disk
    with broken_activations(engine, 6):
        assert is_unsound(ask(engine, QUESTIONS[1])[0][0])
    assert on_disk(engine) == others
    assert engine._prefixes.sessions.pinned == 0
    check_canaries(engine, plain, ALIKE)
    engine.close()


def test_files_whose_rows_are_not_sound_are_found_out(
    directory: Path, tmp_path: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were written as they are, so that their checksums are right; a restart does not bring them back."""
    copy_out = PrefixStore._copy_out

    def broken(store: PrefixStore, write: Write, data: Any) -> None:
        copy_out(store, write, data)
        data[-2048:] = 255  # NaN, in the last rows

    engine = Engine.load(directory, disk=DiskSettings(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "_copy_out", broken)
        check_canaries(engine, plain, [QUESTIONS[0]])
        assert on_disk(engine) == 3
    engine.close()
    engine = Engine.load(directory, disk=DiskSettings(tmp_path))
    assert is_unsound(ask(engine, QUESTIONS[1])[0][0])
    assert on_disk(engine) == 0
    check_canaries(engine, plain, [QUESTIONS[1]])
    engine.close()
    engine = Engine.load(directory, disk=DiskSettings(tmp_path))
    check_canaries(engine, plain, ALIKE)
    assert engine.cache_usage.disk.counts.loaded > 0
    engine.close()


def test_a_copy_that_is_being_written_goes_too(
    directory: Path, tmp_path: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def held(*arguments: Any) -> Any:
        began.set()
        may_end.wait()
        return write_file(*arguments)

    engine = Engine.load(directory, disk=DiskSettings(tmp_path))
    monkeypatch.setattr(prefix_store, "write_file", held)
    check_canaries(engine, plain, [QUESTIONS[0]])
    began.wait()
    with broken_activations(engine, 6):
        assert is_unsound(ask(engine, QUESTIONS[1])[0][0])
    may_end.set()
    assert on_disk(engine) == 0
    check_canaries(engine, plain, ALIKE)
    engine.close()
