"""Writes, reads and prints calibration.json of an engine directory: what quantisation of the weights costs on a text."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvseek.builder.printing import Column, table
from kvseek.core.errors import ConfigError, EngineDirectoryError
from kvseek.core.fields import from_dict

CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class QuantisationCost:
    """Comparison of stored weights of 8 bits with the weights in the engine's dtype, on the same text.

    Attributes
    ----------
    perplexity : float
        Perplexity with the stored weights.
    perplexity_ratio : float
        Perplexity with the stored weights over that with the weights in the engine's dtype.
    mean_kl_divergence : float
        Divergence of the next token's distribution with the stored weights from that with the weights in the engine's dtype, in
        nats.
    same_token_share : float
        Share of predictions whose most probable token stays the same, 0 to 1.
    """

    perplexity: float
    perplexity_ratio: float
    mean_kl_divergence: float
    same_token_share: float


@dataclass(frozen=True)
class Calibration:
    """Result of `--calibrate`.

    Attributes
    ----------
    text, text_sha256 : str
        Name of the file, and the digest of its bytes.
    text_tokens, tokens : int
        Tokens of the whole text, and how many of them, from its start, were read.
    window : int
        Tokens that see each other; the last window may have fewer.
    predictions : int
        Tokens that were predicted: all but the first of each window.
    device : str
        Device of the computation: "cpu" or "cuda".
    dtype, weight_only_precision : str
        Fields of the engine's configuration.
    perplexity : float
        Perplexity with the weights in `dtype`.
    quantised : QuantisationCost or None
        Results with the stored weights of 8 bits; None if there are none.
    """

    text: str
    text_sha256: str
    text_tokens: int
    tokens: int
    window: int
    predictions: int
    device: str
    dtype: str
    weight_only_precision: str
    perplexity: float
    quantised: QuantisationCost | None = None

    def save(self, directory: Path) -> None:
        """Write calibration.json into `directory`."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        (directory / CALIBRATION_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Calibration:
        """Read calibration.json of an engine directory; raises EngineDirectoryError if it is missing or malformed."""
        path = directory / CALIBRATION_FILE
        try:
            return from_dict(cls, json.loads(path.read_text(encoding="utf-8")), CALIBRATION_FILE)
        except FileNotFoundError:
            raise EngineDirectoryError(f"{path} is missing; build the engine again, or copy all of its files") from None
        except (ValueError, TypeError, AttributeError, ConfigError) as error:
            raise EngineDirectoryError(f"{path} is corrupt ({error}); build the engine again") from None

    def print(self, console: Console) -> None:
        """Print a table with one column for each set of weights, and the text and sizes that it was computed with."""
        headings: list[Column] = [("weights", "left"), (self.dtype, "right")]
        rows = [["perplexity", f"{self.perplexity:,.4f}"]]
        if (cost := self.quantised) is not None:
            headings.append((self.weight_only_precision, "right"))
            rows[0].append(f"{cost.perplexity:,.4f}")
            rows.append(["ratio", "", f"{cost.perplexity_ratio:.5f}"])
            rows.append(["mean KL divergence, nats", "", f"{cost.mean_kl_divergence:.6f}"])
            rows.append(["most probable token the same", "", f"{cost.same_token_share:.2%}"])
        console.print(table("Calibration", *headings, rows=rows))
        console.print(
            f"{self.predictions:,} predictions in windows of {self.window:,} tokens of {self.text}, on {self.device}",
            soft_wrap=True,
        )
