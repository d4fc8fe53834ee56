"""Tables of what methods lose: of perplexity, of answers, and of the attention that their rows have."""

from __future__ import annotations

from typing import Any

from kvseek.bench.accuracy.perplexity import rise
from kvseek.bench.variants import Variant, parse_variants
from kvseek.plugins.registry import get_method

from .answers import right
from .results import METHODS, NEEDLE, K, Results, Rows, Tables, one, step, with_ratio

PERPLEXITY = "perplexity-cpu-smollm2"
BUDGETS = (256, 1024)  # tokens that a step attends to, of all methods


def losses(results: Results) -> Rows:
    """What each method loses at its default: of perplexity and of needle answers; bold beyond 1 % or a point."""
    entries = results(PERPLEXITY)["results"]
    documents = [results(name) for name in NEEDLE]
    asked = (
        (document["cells"][0]["length"], sum(c["questions"] for c in document["cells"] if c["engine"] == "full"))
        for document in documents
    )
    lost = (f"needle answers lost of {questions} at {length:,} tokens" for length, questions in asked)
    yield ("method", "rows by default", "perplexity over `full`, %", "on the worst text, %", *lost)
    for method in METHODS[1:]:
        (default,) = parse_variants(method)
        own = [entry for entry in entries if _is_default(entry["name"], method)]
        worst = max((text["percent"] for text in own[0]["by_text"]), default=0.0) if own else 0.0
        shown = (_bold(rise(own[0]), own[0]["percent"]), _bold(f"{worst:+.1f}", worst)) if own else ("not measured", "")
        cells = (_lost(document, method, default.settings.top_k) for document in documents)
        yield (f"`{method}`", f"{default.settings.top_k:,}", *shown, *cells)


def long_losses(results: Results) -> Rows:
    """Loss of perplexity behind a long context, by methods and budgets."""
    budgets, losses = (100, 256, 512), dict[str, list[tuple[int, str]]]()
    for entry in results("perplexity-64k-h200")["results"][1:]:
        if "candidates" not in entry["name"]:  # choosing.md has their time
            (variant,) = parse_variants(entry["name"])
            losses.setdefault(variant.method, []).append((variant.settings.top_k, rise(entry)))
    yield ("", *(f"{budget} rows" for budget in budgets))
    for method in METHODS[1:]:
        own = zip(budgets, sorted(losses[method]), strict=True)
        yield (f"`{method}`", *(text if rows == budget else f"{text} ({rows})" for budget, (rows, text) in own))


def drift(results: Results) -> Rows:
    """What is lost the further an answer has come."""
    found = results("long-answers-cpu-smollm2")
    tokens, parts = found["tokens"], len(found["results"][0]["by_part"])
    yield ("", *(f"to {tokens * (part + 1) // parts:,}" for part in range(parts)))
    for entry in found["results"][1:]:
        yield (f"`{entry['name']}`", *(f"{percent:+.1f}" for percent in entry["by_part"]))


def peer_losses(results: Results) -> Rows:
    """Loss of perplexity of all methods and competing systems, by budget; those that lose least first."""
    losses = dict[str, dict[int, dict[str, Any]]]()
    for budget in BUDGETS:
        for entry in results(f"perplexity-{budget}-cpu-smollm2")["results"][1:]:
            losses.setdefault(entry["name"].partition(":")[0], {})[budget] = entry
    yield ("", "", *(f"{budget:,} tokens" for budget in BUDGETS))
    for method, own in sorted(losses.items(), key=lambda item: float(item[1][BUDGETS[0]]["percent"])):
        kind = "evicts" if get_method(method).evicts else ""
        yield (f"`{method}`", kind, *(rise(own[budget]) for budget in BUDGETS))


def rounded_rows(results: Results) -> Rows:
    """Perplexity with rows of the engine's type and with rows in 8 bits, of each method."""
    found = {entry["name"]: entry["perplexity"] for entry in results("perplexity-rows-cpu-smollm2")["results"]}
    yield ("perplexity", "16-bit rows", "8-bit rows", "%")
    for name in (name for name in found if ":" not in name):
        exact, rounded = found[name], found[f"{name}:cache.row_dtype=int8"]
        yield (f"`{name}`", f"{exact:.2f}", f"{rounded:.2f}", f"{100 * (rounded / exact - 1):+.1f}")


def loss_and_time(results: Results) -> Rows:
    """What settings lose of perplexity beside what their steps take, where both were measured."""
    losses, times = results(PERPLEXITY)["results"], results("budgets-h200")
    yield ("", "perplexity over `full`, %", "on the worst text, %", "a step, rows in GPU memory", "rows in host memory")
    settings = {entry["name"]: parse_variants(entry["name"])[0] for entry in losses[1:]}
    for entry in sorted(losses[1:], key=lambda one: _method_and_rows(settings[one["name"]])):
        if entry["name"] not in times["methods"]:
            continue
        steps = [with_ratio(step(times, entry["name"], place, 128 * K)) for place in ("never", "always")]
        worst = max(text["percent"] for text in entry["by_text"])
        yield (f"`{entry['name']}`", rise(entry), f"{worst:+.1f}", *steps)


def _is_default(name: str, method: str) -> bool:
    (variant,), (default,) = parse_variants(name), parse_variants(method)
    same = (variant.method, variant.settings, variant.cache, variant.engine)
    return same == (default.method, default.settings, default.cache, default.engine)


def _bold(text: str, loss: float) -> str:
    return f"**{text}**" if loss > 1 else text


def _lost(document: dict[str, Any], method: str, rows: int) -> str:
    """Answers fewer than those of `full`; the rows, where the result is of others than `rows`."""
    own, full = ([cell for cell in document["cells"] if cell["engine"] == name] for name in (method, "full"))
    fewer = sum(map(right, full)) - sum(map(right, own))
    measured = document["engines"][method]["method_config"]["top_k"]
    share = 100 * fewer / sum(cell["questions"] for cell in own)
    return _bold(str(max(fewer, 0)), share) + ("" if measured == rows else f" (with {measured} rows)")


def _method_and_rows(variant: Variant) -> tuple[str, int]:
    return variant.method, variant.settings.top_k


CODES = {  # what is said of it, and the changes from the defaults under which the result file has it
    "**the defaults: 2 bits find 8 candidates a row, 4 bits choose**": "defaults",
    "1 bit finds candidates": "first_bits 1",
    "the mean of the whole region": "block 1073741824",
    "no mean subtracted": "block 0",
    "one pass of 4 bits over all keys": "first_bits 0",
    "one pass of 4 bits, not rotated": "first_bits 0, rotated False",
    "one pass of 2 bits": "bits 2, first_bits 0",
    "codes of 2 bits alone, with a scale and cells of their own": "bits 2, first_bits 0, step 0.25, scale own",
}


def codes(results: Results) -> Rows:
    found = results("key-codes-smollm2-8k")["results"]
    yield ("", "recall", "mass")
    for words, changes in CODES.items():
        entry = one(found, changes=changes)
        yield (words, f"{entry['recall']:.3f}", f"{entry['mass']:.3f}")


TABLES: Tables = {
    "losses": losses,
    "rounded rows": rounded_rows,
    "loss and time": loss_and_time,
    "losses at 64K": long_losses,
    "losses within long answers": drift,
    "losses of competing systems": peer_losses,
    "key codes": codes,
}
