"""Would norms of values, or a number of rows that follows the attention, choose better rows than the top k? On a model's rows.

    python evaluation/row_choice.py --model PATH --text FILE --context 8192 --queries 16 --output FILE

Attention is exact here, so what is compared is the rule alone and not an index. Every rule sees the mean of the heads' softmax
weights over all tokens, and the window's tokens are always attended to:

top_k   the k rows of the largest weights
norms   the k rows of the largest products of weight and norm of the value
share   rows of the largest weights until window and rows together have a share of the attention, at least and at most so many

For each rule and number: `rows`, the mean number of rows; `kept`, the share of the attention on window and rows; `error`, the
length of what the output of attention then lacks over the output's length; means over heads, steps and layers. Each `share` is
followed by the top k of as many rows. docs/nested_codes.md has the figures of SmolLM2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.core.errors import KvseekError
from kvseek.evaluation.capture import CapturedLayer, feed, load_model, recording, token_ids
from kvseek.measurement.machine import describe

SINK, LOCAL = 64, 256  # tokens of the window, as in an engine
RECORDING = "kvseek_row_choice"


@dataclass(frozen=True)
class Rule:
    """How many rows are chosen, and by what.

    Attributes
    ----------
    most, least : int
        Rows; the same but for a `share`.
    share : float
        Of the attention that window and rows are to have; 1: `most` rows are chosen.
    norms : bool
        Whether weights are multiplied by the norms of the values.
    """

    most: int
    least: int = 0
    share: float = 1.0
    norms: bool = False

    def __str__(self) -> str:
        if self.share < 1:
            return f"share {self.share} of {self.least} to {self.most} rows"
        return f"{'norms' if self.norms else 'top_k'} {self.most}"


RULES = [
    *(Rule(most, norms=norms) for most in (50, 100, 200) for norms in (False, True)),
    *(Rule(most, 16, share) for most in (256, 512) for share in (0.9, 0.95, 0.98)),
]


@dataclass(frozen=True)
class Step:
    """What a decode step's attention does: weights float32 [G, g, n] over all tokens, values [G, n, D], the window bool [n]."""

    weights: Tensor
    values: Tensor
    window: Tensor


def step_of(layer: CapturedLayer, values: Tensor, steps: int, step: int) -> Step:
    """Step `step` of the last `steps` of a captured layer; its window ends where the steps begin, and they belong to it."""
    prompt = layer.keys.shape[1] - steps
    seen = prompt + step + 1
    kv_heads, _, dim = layer.keys.shape
    query = layer.queries[:, step - steps].reshape(kv_heads, -1, dim)
    weights = (query @ layer.keys[:, :seen].transpose(1, 2) * layer.scaling).softmax(dim=-1)
    place = torch.arange(seen)
    return Step(weights, values[:, :seen].float(), (place < SINK) | (place >= prompt - LOCAL))


def choose(step: Step, rule: Rule) -> Tensor:
    """Rows that a rule chooses outside of the window: bool [G, n]."""
    mean = step.weights.mean(dim=1)
    values = mean * step.values.norm(dim=-1) if rule.norms else mean
    values = values.masked_fill(step.window, -1.0)
    most = min(rule.most, int((~step.window).sum()))
    best = values.topk(most, dim=-1).indices
    kept = mean[:, step.window].sum(dim=-1, keepdim=True) + mean.gather(1, best).cumsum(dim=-1)
    taken = (kept < rule.share).sum(dim=-1, keepdim=True) + 1 if rule.share < 1 else torch.full_like(best[:, :1], most)
    ranks = torch.arange(most).expand_as(best)
    return torch.zeros_like(mean, dtype=torch.bool).scatter_(1, best, ranks < taken.clamp(min=rule.least))


def measure_step(step: Step, rule: Rule) -> Tensor:
    """Rows, kept and error of a step: float32 [3], means over KV heads and heads."""
    chosen = choose(step, rule)
    attended = (chosen | step.window)[:, None]
    kept = (step.weights * attended).sum(dim=-1, keepdim=True)
    found = (step.weights * attended / kept) @ step.values
    exact = step.weights @ step.values
    error = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    return torch.stack((chosen.sum(dim=-1).float().mean(), kept.mean(), error.mean()))


def measure(steps: Sequence[Step], rule: Rule) -> dict[str, Any]:
    """Means over steps and layers; JSON-able."""
    rows, kept, error = torch.stack([measure_step(step, rule) for step in steps]).mean(dim=0).tolist()
    return {"rule": str(rule), **dataclasses.asdict(rule), "rows": rows, "kept": kept, "error": error}


def compare(steps: Sequence[Step], rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Figures of each rule, and of the top k of as many rows behind each share."""
    results = []
    for rule in rules:
        results.append(measure(steps, rule))
        if rule.share < 1:
            results.append(measure(steps, Rule(round(results[-1]["rows"]))))
    return results


def capture_steps(model: Path, text: Path, context: int, queries: int, every: int) -> list[Step]:
    """The last `queries` steps of every `every`-th layer of a model on the first tokens of a text."""
    from transformers import DynamicCache

    loaded, tokenizer = load_model(model)
    with recording(loaded, queries, RECORDING) as recorder:
        feed(loaded, DynamicCache(), token_ids(tokenizer, text.read_text(encoding="utf-8"), context))
    steps = []
    for layer, values in list(zip(recorder.layers(), recorder.values, strict=True))[::every]:
        assert values is not None, "a layer that was captured has values"
        steps += [step_of(layer, values, queries, step) for step in range(queries)]
    return steps


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory or .gguf file")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text, at least --context tokens long")
    parser.add_argument("--context", type=int, default=8192, help="tokens, the decode steps' included")
    parser.add_argument("--queries", type=int, default=16, help="last positions, which stand for decode steps")
    parser.add_argument("--every", type=int, default=3, help="measure every so many layers")
    parser.add_argument("--output", type=Path, help="write the figures as JSON to this file")
    options = parser.parse_args(argv)
    try:
        steps = capture_steps(options.model, options.text, options.context, options.queries, options.every)
    except (KvseekError, OSError) as error:
        print(f"row_choice: {error}", file=sys.stderr)
        return 1
    results = compare(steps, RULES)
    print("  rows  kept   error   rule")
    for found in results:
        print(f"{found['rows']:6.1f}  {found['kept']:.4f} {found['error']:.4f}  {found['rule']}")
    if options.output is not None:
        report = {"evaluation": "row_choice", "machine": describe(), "model": options.model.name}
        sizes = {"context": options.context, "queries": options.queries, "every": options.every}
        options.output.write_text(json.dumps({**report, **sizes, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
