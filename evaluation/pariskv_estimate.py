"""How far the 4-bit estimate of q·k is off: what evaluation/recall.py, which knows no method, cannot ask.

python evaluation/pariskv_estimate.py --model PATH --text FILE --context 8192 --queries 32
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kvseek.core.errors import KvseekError
from kvseek.core.extents import ExtentTable
from kvseek.plugins.codes.rotation import rotate
from kvseek.plugins.contract import IndexContext
from kvseek.plugins.pariskv.codebook import build_codebooks
from kvseek.plugins.pariskv.config import Config
from kvseek.plugins.pariskv.reference import ReferenceIndex, estimate_scores


@dataclass(frozen=True)
class EstimateError:
    """‖estimated - exact scores‖ / ‖exact scores‖, with α correction and without."""

    corrected: float
    uncorrected: float


def estimate_error(keys: Tensor, queries: Tensor) -> EstimateError:
    """Relative error of the estimates of all query heads and queries: keys [G, n, D], queries [H, q, D], float32."""
    grouped = queries.reshape(keys.shape[0], -1, keys.shape[2])
    exact = grouped @ keys.transpose(1, 2)
    errors = []
    for corrected in (True, False):
        index = _encoder(keys, queries.shape[0], Config(alpha_correction=corrected))
        _, codes, weights = index.encode(keys)
        estimate = estimate_scores(rotate(grouped, index.signs), codes, weights, index.levels)
        errors.append(((estimate - exact).norm() / exact.norm()).item())
    return EstimateError(*errors)


def _encoder(keys: Tensor, heads: int, config: Config) -> ReferenceIndex:
    """An index that encodes keys but holds none."""
    kv_heads, _, dim = keys.shape
    return ReferenceIndex(
        IndexContext(
            layer=0,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scaling=dim**-0.5,
            config=config,
            codebooks=build_codebooks(config, dim),
            extents=ExtentTable(1, 1, 1),
            lengths=[0],
            dtype=keys.dtype,
            device=keys.device,
            library=None,
        )
    )


def main(argv: list[str] | None = None) -> int:
    """Print the error of every layer of a model, and the mean."""
    from kvseek.evaluation.capture import capture, load_model, token_ids

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory or .gguf file")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text, at least --context tokens long")
    parser.add_argument("--context", type=int, default=8192, help="tokens, whose keys are estimated")
    parser.add_argument("--queries", type=int, default=32, help="last positions whose queries are taken")
    options = parser.parse_args(argv)
    try:
        model, tokenizer = load_model(options.model)
        ids = token_ids(tokenizer, options.text.read_text(encoding="utf-8"), options.context)
        layers = capture(model, ids, options.queries)
    except (KvseekError, OSError) as error:
        print(f"pariskv_estimate: {error}", file=sys.stderr)
        return 1
    errors = [estimate_error(layer.keys, layer.queries) for layer in layers]
    print("layer  relative error  without alpha")
    for number, one in enumerate(errors):
        print(f"{number:5}  {one.corrected:14.2%}  {one.uncorrected:13.2%}")
    corrected, uncorrected = (sum(getattr(e, n) for e in errors) / len(errors) for n in ("corrected", "uncorrected"))
    print(f" mean  {corrected:14.2%}  {uncorrected:13.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
