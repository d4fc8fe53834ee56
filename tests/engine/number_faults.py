"""Faults in numbers: NaN and flipped bits in weights, kept rows, index entries and activations, while an engine serves.

A trial lets an engine read a document, breaks a number, asks a question about the document (the victim) with another request
beside it, mends the number where a restart would (weights) or where it was passing (activations), and then asks canaries: some
begin like the victim, others share nothing. Each is asked again while it fails by name. As a command this makes random trials and
counts how they end: python -m tests.engine.number_faults --trials 200
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.engine.cache.test_isolation import tensors_in
from tests.plugins.cases import CASES, method_flags
from tests.support.long_prompts import DOCUMENT, HEADS, SHAPE, WINDOW, Plain, known_answers, load_changed
from tests.support.prefill import run_to_end
from tests.support.random_models import save_random_model
from torch import Tensor

from kvseek.builder import build
from kvseek.core.errors import ErrorCode
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.engine.engine import Engine
from kvseek.plugins.registry import METHODS

FIRST, VICTIM, SAME = (Request(DOCUMENT + (number,) * 20, 10) for number in (5, 6, 7))
ALIKE = (VICTIM, SAME, Request(DOCUMENT[:1500] + (7,) * 40, 10))
BESIDE = Request(DOCUMENT[5:45], 10)
OTHER = Request(DOCUMENT[::-1][:1300], 10)
PLACES = ("weights", "rows", "entries", "activations")
NAN = -1  # in the place of the number of a bit
MOST_FAILURES = 4  # of a canary, before it counts as failing for ever


def ask(engine: Engine, *requests: Request) -> list[tuple[StepOutput, list[int]]]:
    """The only end and the tokens of each of some requests that are submitted together."""
    ids = [engine.submit(request) for request in requests]
    outputs = run_to_end(engine)
    assert engine._cache.extents.used == 0
    found = []
    for one in ids:
        own = [output for output in outputs if output.request_id == one]
        assert [output.finish_reason is not None for output in own] == [False] * (len(own) - 1) + [True]
        found.append((own[-1], [output.token_id for output in own if output.token_id is not None]))
    return found


def is_unsound(end: StepOutput) -> bool:
    """Whether a request failed by the name of this fault; raises AssertionError if it failed otherwise."""
    assert end.finish_reason in (FinishReason.LENGTH, FinishReason.ERROR)
    if end.finish_reason is FinishReason.LENGTH:
        return False
    assert (end.code, "must be finite" in end.error) == (ErrorCode.INTERNAL, True), end.error
    return True


@contextlib.contextmanager
def broken_activations(engine: Engine, token: int | None = None, bit: int = NAN) -> Iterator[None]:
    """Whoever reads this token (None: any) has broken numbers in all layers from there on, and in its rows."""
    model: Any = engine.decoder.model
    embed = model.embed

    def broken(tokens: Tensor) -> Tensor:
        rows: Tensor = embed(tokens).clone()
        for row in (tokens >= 0 if token is None else tokens == token).nonzero()[:, 0].tolist():
            break_number(rows[row], 7, bit)
        return rows

    model.embed = broken
    try:
        yield
    finally:
        model.embed = embed


def break_number(tensor: Tensor, place: int, bit: int) -> None:
    """Write NaN to a place of a float32 tensor, or flip a bit of the number there."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.flatten()
    if bit == NAN:
        flat[place] = torch.nan
    else:
        flat.view(torch.int32)[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view_as(tensor))


@contextlib.contextmanager
def broken(engine: Engine, place: str, bit: int, chance: random.Random) -> Iterator[None]:
    """Break a number; one of the weights and of activations is mended at the end."""
    if place == "activations":
        with broken_activations(engine, 6, bit):
            yield
        return
    model: Any = engine.decoder.model
    tensors = {
        "weights": lambda: _weights(chance.choice(model.layers)),
        "rows": lambda: [_kept(engine, engine._cache.rows.pool.rows, chance)],
        "entries": lambda: [_kept(engine, one, chance) for one in entries_of(engine)],
    }[place]()
    tensor = chance.choice(tensors)
    number = chance.randrange(tensor.numel())
    before = tensor.clone()
    with torch.inference_mode():
        break_number(tensor, number, bit)
    yield
    if place == "weights":
        with torch.inference_mode():
            tensor.copy_(before)


def entries_of(engine: Engine) -> list[Tensor]:
    """The numbers that the indexes keep of extents; none for methods whose requests share no entries."""
    if not engine._prefixes.rows.shares_entries:
        return []
    capacity = engine._cache.extents.capacity
    held = tensors_in([vars(index) for index in engine.decoder.retrieval.indexes], set())
    return [one for one in held if one.dtype is torch.float32 and one.ndim > 2 and one.shape[0] == capacity]


def _weights(layer: Any) -> list[Tensor]:
    """A layer's norms, and its products where they are not packed."""
    found = [getattr(one, "weight", one) for one in vars(layer).values()]
    return [one for one in found if isinstance(one, Tensor) and not one.is_mkldnn]


def _kept(engine: Engine, array: Tensor, chance: random.Random) -> Tensor:
    """The part of an array that belongs to a whole extent of the document."""
    extents = [node.extent for node in engine._prefixes._tree if len(node.children) > 0]
    return array[chance.choice(extents)]


@dataclass
class Outcome:
    """How the victim ended, and the canaries: "right", "failed" (by name), "other" (another answer).

    `alike` and `others` count the failures of canaries before their answers too.
    """

    victim: str
    alike: Counter[str]
    others: Counter[str]


def trial(engine: Engine, plain: Plain, place: str, bit: int, chance: random.Random) -> Outcome:
    """Make a trial with an engine that serves nothing, and let it forget what it has kept."""
    engine._prefixes._evict(engine._cache.extents.capacity)

    def kind(end: StepOutput, tokens: list[int], request: Request) -> str:
        return "failed" if is_unsound(end) else "right" if tokens == plain(request) else "other"

    def canary(request: Request) -> Counter[str]:
        found: Counter[str] = Counter()
        for _ in range(MOST_FAILURES):
            ((end, tokens),) = ask(engine, request)
            found[one := kind(end, tokens, request)] += 1
            if one != "failed":
                break
        return found

    assert canary(FIRST) == {"right": 1}
    with broken(engine, place, bit, chance):
        victim, _ = ask(engine, VICTIM, BESIDE)
    alike = sum((canary(request) for request in ALIKE), Counter[str]())
    return Outcome(kind(*victim, VICTIM), alike, canary(OTHER))


def main(arguments: Sequence[str] | None = None) -> None:
    """Make random trials with each method and place, and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--trials", type=int, default=50, help="of each method and place")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print("method, place, bits: victims; canaries that begin alike; others")
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_model(Path(folder) / "model", "llama", **SHAPE, **HEADS)
        for method in options.methods:
            directory = Path(folder) / method
            flags = ["--model", str(model), "--method", method, "--output_dir", str(directory), "--quiet", "--no-check"]
            limits = ["--max_batch_size", "4", "--max_seq_len", "3200", "--prefill_chunk_tokens", "512"]
            build.main([*flags, *WINDOW, *limits, *method_flags(method, CASES[method].everything)])
            engine, chance = Engine.load(directory), random.Random(options.seed)
            plain = known_answers(load_changed(directory, {"reuse": False}))
            for place in PLACES:
                if place == "entries" and not entries_of(engine):
                    continue
                for name, bits in {"NaN": (NAN,), "exponent": range(23, 31), "mantissa": range(23)}.items():
                    victims, alike, others = Counter[str](), Counter[str](), Counter[str]()
                    for _ in range(options.trials):
                        outcome = trial(engine, plain, place, chance.choice(bits), chance)
                        victims[outcome.victim] += 1
                        alike += outcome.alike
                        others += outcome.others
                    print(method, place, name, dict(victims), dict(alike), dict(others), sep="; ", flush=True)


if __name__ == "__main__":
    main()
