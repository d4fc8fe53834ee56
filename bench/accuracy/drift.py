"""Does retrieval get worse as a request generates on and on? Recall by step of one long generation.

    python bench/accuracy/drift.py --engine_dir DIR --text FILE --prompt_tokens 4096 --steps 10000 --every 50 --follow

Keys that are generated are indexed as they leave the window, long after the prompt's. Every so many steps the rows that a few
layers selected are compared with the exact top k of the same query over the true keys, which come from the row pool. The engine
runs as it serves; an observer copies what the indexes select.

What recall loses may be the data's doing and not the index's: a model that samples on and on leaves what it knows, its attention
becomes flat, and which rows are the top k is then chance. Hence --follow, which feeds the document's own tokens; the attention
that the rows hold; and an index built afresh from the same keys at the first and the last measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.bench.accuracy.capture import membership
from kvseek.bench.accuracy.needle import check_vocabulary
from kvseek.bench.accuracy.needle_tasks.tasks import make_dialogues
from kvseek.bench.machine import describe
from kvseek.bench.methods import batch_of
from kvseek.bench.output import (
    add_output_flags,
    at_least_one,
    chosen_layers,
    command,
    figure,
    figures_table,
    print_whole,
)
from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import ConfigError, KvseekError
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.core.index_context import LayerRows
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine.draws.sampling import Drawn, Sampler
from kvseek.engine.engine import Engine
from kvseek.engine.retrieval import Observer
from kvseek.plugins.contract import Index
from kvseek.plugins.flat.method import exact_top_k
from kvseek.plugins.registry import get_method, method_traits

SPAN = 1000  # steps whose figures are averaged
DOCUMENT_TASK = "niah_multikey"  # whose context is the document with --needle
QUESTION_TOKENS = 32  # more than DOCUMENT_TASK reserves for a question and its answer


@dataclass(frozen=True)
class Tapped:
    """One request's selection in one layer, and what it was made from.

    Attributes
    ----------
    queries : Tensor [H, D]
    rows : Tensor, int32 [G, entries]
        Places of the retrieval region; -1 is none.
    keys : Tensor [G, n, D]
        The retrieval region's keys by place, as they lay in the row pool when the rows were selected.
    scaling : float
        Softmax scale.
    """

    queries: Tensor
    rows: Tensor
    keys: Tensor
    scaling: float

    def quality(self, top_k: int) -> dict[str, float]:
        """Share of the exact top k that was selected, mean over KV heads; mean attention on the rows, and on the exact ones."""
        grouped = self.queries.reshape(self.keys.shape[0], -1, self.keys.shape[2])
        exact = exact_top_k(grouped, self.keys, top_k, self.scaling)
        selected = membership(self.rows, self.keys.shape[1])
        weights = (grouped.float() @ self.keys.float().transpose(1, 2) * self.scaling).softmax(dim=-1).mean(dim=1)
        return {
            "recall": selected.gather(1, exact).float().mean().item(),
            "mass": (weights * selected).sum(dim=1).mean().item(),
            "exact_mass": weights.gather(1, exact).sum(dim=1).mean().item(),
        }


class SelectionTap(Observer):
    """Keeps the last selections of some layers of an engine that runs one request at a time.

    On a GPU a selection runs inside a captured graph: the copies made here are captured with it, into tensors that this object
    keeps, and every replay refreshes them. Upkeep after a step may move rows in the pool, so the keys of a step that is measured
    are copied before it.
    """

    slot = 0  # of the request: the first that a scheduler gives

    def __init__(self, engine: Engine, layers: Sequence[int]) -> None:
        """Observe an engine's steps from now on; on a GPU they are captured anew."""
        self._cache, self._scaling = engine.decoder.cache, engine.config.model.head_dim**-0.5
        self._layers, self._wanted = tuple(layers), False
        self._selected: dict[int, tuple[Tensor, Tensor | None]] = {}  # by layer: queries and rows
        self._keys: dict[int, Tensor] = {}
        engine.decoder.observe(self)

    def selected(self, layer: int, queries: Tensor, batch: Batch, selection: Selection | None) -> None:
        """See Observer. Steps of several requests, which a GPU captures too, are left out."""
        if layer in self._layers and batch.size == 1:
            rows = None if selection is None else selection.rows.clone()
            self._selected[layer] = queries.clone(), rows

    def step_ended(self, slots: Sequence[int]) -> None:
        """See Observer."""
        if self._wanted:
            self._keys, self._wanted = {layer: self._read_keys(layer) for layer in self._layers}, False

    def expect(self) -> None:
        """The next decode step is measured: keep the keys that it selects from."""
        self._wanted = True

    def last(self, layer: int) -> Tapped:
        """What the layer selected in the step that was measured last (`expect`); raises ConfigError if nothing is known of it."""
        queries, rows = self._selected.get(layer, (None, None))
        if queries is None or rows is None or not bool((rows[0] >= 0).any()):
            raise ConfigError(
                f"--layers: layer {layer} selected nothing here: must be a layer of a method that retrieves, and on a GPU its "
                "rows must be chosen there; choose another, or build the engine with --cache.offload never"
            )
        return Tapped(queries[0], rows[0], self._keys[layer], self._scaling)

    def _read_keys(self, layer: int) -> Tensor:
        """A copy of the layer's keys of the request by place, [G, n, D], where its queries are."""
        device = self._cache.window.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pool = self._cache.rows.of_layer(layer).pool
        return self._cache.extents.read(pool, self.slot, self._cache.lengths[self.slot])[:, :, 0].to(device)


@torch.inference_mode()
def fresh_rows(tapped: Tapped, index: Index, method: str) -> Tensor:
    """What an index that is built from `tapped.keys` in one go selects for `tapped.queries`: int32 [G, entries].

    It has the settings and kernels of `index`, but extents, work space and a row pool (without values) of its own. Of the
    prompt's last queries, which Index.build asks for, it gets these instead.
    """
    kv_heads, n, dim = tapped.keys.shape
    extents = ExtentTable(1, extents_for(n), extents_for(n), index.context.device)
    extents.reserve(0, n)
    pool = tapped.keys.new_zeros((extents.capacity, kv_heads, EXTENT_TOKENS, 2, dim))
    rows = LayerRows(pool, pool.data_ptr(), pool.stride(0))
    context = dataclasses.replace(index.context, extents=extents, lengths=[n], rows=rows, shared={})
    fresh = get_method(method).create(context)
    work = fresh.build(0, tapped.keys, tapped.queries[:, None])
    extents.write(pool[:, :, :, 0], 0, 0, tapped.keys)
    if work is not None:
        work.wait()
    batch = batch_of(fresh)
    selection = fresh.select(tapped.queries[None], batch)
    assert selection is not None, "an index selects whenever another of the same method and layer does"
    return selection.rows[0]


class ScriptedSampler(Sampler):
    """Gives a document's tokens, whatever the model makes of them; after the last, what the model draws."""

    def __init__(self, request: Request, vocab_size: int, script: Sequence[int]):
        super().__init__(request, vocab_size)
        self._script = iter(script)

    def take(self, drawn: Drawn | int) -> int:
        """See Sampler.take. A token is drawn as in generation, then replaced by the script's."""
        return next(self._script, super().take(drawn))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--engine_dir", type=Path, required=True, help="an engine of a method that selects rows")
    source = parser.add_mutually_exclusive_group(required=True)
    about = (
        "UTF-8 text: the document, whose first tokens are the prompt; of several texts, --topic_tokens of each in turn"
    )
    source.add_argument("--text", type=Path, nargs="+", help=about)
    source.add_argument("--needle", action="store_true", help="the document is a context of the needle tasks")
    add("--prompt_tokens", type=int, default=4096)
    add("--topic_tokens", type=int, default=250, help="tokens until the next of several texts goes on")
    add("--steps", type=int, default=10_000, help="tokens to generate; end tokens do not end it")
    add("--follow", action="store_true", help="feed the document's next tokens, not those drawn")
    add("--every", type=int, default=50, help="steps between two measurements")
    add("--layers", help="comma list; the first that selects, the middle and the last if left out")
    add("--temperature", type=float, default=1.0, help="1 keeps the model out of loops")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="CPU threads; torch's choice if left out")
    add_output_flags(parser)
    arguments = parser.parse_args(argv)
    at_least_one(arguments, "prompt_tokens", "topic_tokens", "steps", "every")
    return arguments


def document(arguments: argparse.Namespace, engine: Engine) -> tuple[int, ...]:
    """Token ids of the prompt and, with --follow, of what is fed after it; raises ConfigError if the text is too short."""
    wanted: int = arguments.prompt_tokens + (arguments.steps if arguments.follow else 0)
    if arguments.needle:
        check_vocabulary(engine.config, "--engine_dir")
        (dialogue,) = make_dialogues(DOCUMENT_TASK, wanted + QUESTION_TOKENS, 1)
        return tuple(dialogue.context[:wanted])
    texts = [engine.tokenizer.encode(path.read_text(encoding="utf-8")) for path in arguments.text]
    span = arguments.topic_tokens if len(texts) > 1 else len(texts[0])
    starts = range(0, max(map(len, texts)), max(1, span))
    ids = [token for start in starts for text in texts for token in text[start : start + span]]
    if len(ids) < wanted:
        followed = f" and --steps = {arguments.steps} with --follow" if arguments.follow else ""
        raise ConfigError(
            f"--prompt_tokens = {arguments.prompt_tokens}{followed}: the document must have {wanted} tokens, "
            f"{', '.join(map(str, arguments.text))} has {len(ids)}; ask for fewer or give a longer one"
        )
    return tuple(ids[:wanted])


def submit(engine: Engine, arguments: argparse.Namespace) -> int:
    """Queue the request, with --follow to be fed what follows the prompt in the document; returns its id."""
    ids = document(arguments, engine)
    sampling = SamplingConfig(temperature=arguments.temperature, seed=arguments.seed)
    # One token comes from prefill; another is left over, so that the last measured step finds the request's rows in place.
    sequence = engine.prepare(Request(ids[: arguments.prompt_tokens], arguments.steps + 2, sampling))
    if arguments.follow:
        script = ids[arguments.prompt_tokens :]
        sequence.sampler = ScriptedSampler(sequence.request, engine.config.model.vocab_size, script)
    engine.enqueue(sequence)
    return sequence.request_id


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate and measure; the JSON-able report."""
    engine = Engine.load(arguments.engine_dir, arguments.threads)
    top_k = getattr(get_method(engine.config.method).configure(engine.config.method_config), "top_k", None)
    if top_k is None:
        raise ConfigError(f"--engine_dir: method {engine.config.method!r}: must have a field top_k; use another engine")
    count, dense = engine.config.model.num_layers, method_traits(engine.config).device_layers
    usual = sorted({min(dense, count - 1), max(dense, count // 2) % count, count - 1})
    layers = usual if arguments.layers is None else chosen_layers(arguments.layers, count)
    tap, request = SelectionTap(engine, layers), submit(engine, arguments)
    samples, fresh, step = list[dict[str, Any]](), list[dict[str, Any]](), 0
    while step < arguments.steps:
        if (step + 1) % arguments.every == 0:
            tap.expect()
        # What has been tapped is that of the step, so none may run ahead.
        for output in (output for output in (*engine.step(), *engine.settle()) if _is_step(output)):
            step += 1
            if step % arguments.every == 0 and output.attended_tokens < output.cached_tokens:
                found = {layer: tap.last(layer) for layer in layers}
                quality = {layer: tapped.quality(top_k) for layer, tapped in found.items()}
                samples.append({"step": step, "cached_tokens": output.cached_tokens, "layers": quality})
                if len(samples) == 1 or step + arguments.every > arguments.steps:
                    fresh += [{"step": step, "layer": n, **_beside_fresh(engine, n, found[n], top_k)} for n in layers]
    engine.cancel(request)
    if not samples:
        raise ConfigError(f"--steps = {arguments.steps}: no step that was measured attended sparsely; generate more")
    settings = ("prompt_tokens", "topic_tokens", "steps", "follow", "every", "temperature", "seed")
    return {
        "evaluation": "drift",
        "machine": describe(),
        "engine": dataclasses.asdict(engine.config),
        "texts": [path.name for path in arguments.text or ()],
        **{name: getattr(arguments, name) for name in settings},
        "top_k": top_k,
        "by_thousand": by_thousand(samples),
        "fresh_index": fresh,
        "samples": samples,
    }


def _is_step(output: StepOutput) -> bool:
    """Whether an output is a token of a decode step; raises KvseekError if the request failed."""
    if output.finish_reason is FinishReason.ERROR:
        raise KvseekError(f"the generation failed: {output.error}")
    return output.token_id is not None and output.cached_tokens > 0


def _beside_fresh(engine: Engine, layer: int, tapped: Tapped, top_k: int) -> dict[str, float]:
    """Recall, that of a fresh index, and the share of the selected rows that it selects too."""
    index = engine.decoder.retrieval.indexes[layer]
    fresh = dataclasses.replace(tapped, rows=fresh_rows(tapped, index, engine.config.method))
    ours, theirs = (membership(one.rows, tapped.keys.shape[1]) for one in (tapped, fresh))
    recall, fresh_recall = (one.quality(top_k)["recall"] for one in (tapped, fresh))
    same = ((ours & theirs).sum() / ours.sum()).item()
    return {"recall": recall, "fresh_recall": fresh_recall, "same_rows": same}


def by_thousand(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over samples and layers of each thousand steps; `mass_ratio`: attention on the rows over that on the exact top k."""
    spans: dict[int, list[dict[str, float]]] = {}
    for sample in samples:
        spans.setdefault((sample["step"] - 1) // SPAN, []).extend(sample["layers"].values())
    means = []
    for span, measured in sorted(spans.items()):
        recall, mass, exact = (
            sum(one[name] for one in measured) / len(measured) for name in ("recall", "mass", "exact_mass")
        )
        steps = f"{span * SPAN + 1:,}–{(span + 1) * SPAN:,}"
        means.append({"steps": steps, "recall": recall, "mass_ratio": mass / exact, "exact_mass": exact})
    return means


def print_report(report: dict[str, Any]) -> None:
    """Print a row for each thousand steps, and the comparison with fresh indexes."""
    figures = {name.replace("_", " "): figure(name, ".3f") for name in ("recall", "mass_ratio", "exact_mass")}
    print_whole(figures_table(f"recall@{report['top_k']} by step", "steps", figures, report["by_thousand"], "steps"))
    fresh = [{**row, "place": f"step {row['step']:,}, layer {row['layer']}"} for row in report["fresh_index"]]
    figures = {name.replace("_", " "): figure(name, ".3f") for name in ("recall", "fresh_recall", "same_rows")}
    print_whole(figures_table("beside an index built afresh from the same keys", "place", figures, fresh, "place"))


main = command(parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
