"""`kvseek build --calibrate`: a text's perplexity with weights in the engine's dtype, as they are stored, and rounded otherwise.

The engine's own arithmetic for prompts computes it. The text is cut into windows that do not see each other. All windows pass a
layer before the next layer is read, so memory holds all hidden states but the weights of only one layer, never those of the
whole model. calibration.json of the engine directory keeps the result.

Weights are rounded to INT4 by what the text shows, too: the errors of an input count by its mean square. Then the perplexity of
the same text is a little better than that of another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, fuse, weight_reader
from kvseek.builder.flags import CALIBRATE_TOKENS
from kvseek.builder.printing import Advance, Column, table
from kvseek.core.config import EngineConfig
from kvseek.core.errors import CapacityError, ConfigError, EngineDirectoryError, from_dict, require
from kvseek.core.model_config import ModelConfig
from kvseek.core.rope import LocalRotation, RotaryEmbedding
from kvseek.core.weight_only import HEAD, INT4, NONE, QUANTISED
from kvseek.engine.draws.sampling import overflow_remedy
from kvseek.engine.model.cpu import HostProducts, bfloat16_works
from kvseek.engine.model.experts import GatedProduct, LoopedExperts
from kvseek.engine.model.layer import Head, Layer, Linear, Product, Products
from kvseek.engine.model.library_attention import causal_attention_device
from kvseek.engine.model.reference import TorchOperations, causal_attention, scaled
from kvseek.engine.model.weights import EXPERTS, SHARED, list_weights, load_weights
from kvseek.engine.tokenizer import Tokenizer
from kvseek.kernels.reference.delta_net import DeltaPrompt, read_prompts

CPU = torch.device("cpu")
ALTERNATIVES = ("int8", INT4)  # weight_only_precisions that are compared, too, where the engine has another
LITTLE, LEAST = 0.01, 1e-30  # of the mean importance of a matrix's inputs; a mean that is not divided by
NO_OTHERS: Mapping[str, WeightFormat] = {}
CALIBRATION_FILE = "calibration.json"
LOGIT_BYTES = 64 << 20  # bytes of one slice's logits; a handful of tensors of this size exist at a time
LayerSource = Callable[[int], dict[str, Tensor]]
"""Takes a layer's number; returns its weights, on the CPU or on the device of the computation."""


@dataclass(frozen=True)
class QuantisationCost:
    """Comparison of weights of 8 or 4 bits with the weights in the engine's dtype, on the same text.

    Attributes
    ----------
    perplexity : float
        Perplexity with the former.
    perplexity_ratio : float
        That over the perplexity with the weights in the engine's dtype.
    mean_kl_divergence : float
        Divergence of the next token's distribution with the former from that with the weights in the engine's dtype, in nats.
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
        Results with the stored weights of 8 or 4 bits; None if there are none.
    int8, int4 : QuantisationCost or None
        Results with weights that an engine of this precision would store; None if the engine stores them, or cannot.
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
    int8: QuantisationCost | None = None
    int4: QuantisationCost | None = None

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
        columns = {self.weight_only_precision: self.quantised}
        columns |= {f"{name}, not stored": getattr(self, name) for name in ALTERNATIVES}
        costs = {name: cost for name, cost in columns.items() if cost is not None}
        headings: list[Column] = [("weights", "left"), (self.dtype, "right"), *((name, "right") for name in costs)]
        rows = [["perplexity", f"{self.perplexity:,.4f}", *(f"{cost.perplexity:,.4f}" for cost in costs.values())]]
        if costs:
            rows.append(["ratio", "", *(f"{cost.perplexity_ratio:.5f}" for cost in costs.values())])
            divergences = [f"{cost.mean_kl_divergence:.6f}" for cost in costs.values()]
            rows.append(["mean KL divergence, nats", "", *divergences])
            shares = [f"{cost.same_token_share:.2%}" for cost in costs.values()]
            rows.append(["most probable token the same", "", *shares])
        console.print(table("Calibration", *headings, rows=rows))
        console.print(
            f"{self.predictions:,} predictions in windows of {self.window:,} tokens of {self.text}, on {self.device}",
            soft_wrap=True,
        )


@dataclass(frozen=True)
class Text:
    """A text to calibrate with: the name of its file, the SHA-256 of its bytes, its content."""

    name: str
    sha256: str
    content: str

    @classmethod
    def read(cls, path: Path) -> Text:
        """Read a file; raises ConfigError if it is absent, a directory, or not UTF-8."""
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"calibrate = {str(path)!r}: does not exist; name a text file") from None
        except IsADirectoryError:
            raise ConfigError(f"calibrate = {str(path)!r}: is a directory; name a text file") from None
        try:
            return cls(path.name, hashlib.sha256(content).hexdigest(), content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"calibrate = {str(path)!r}: byte {error.start} is not UTF-8 ({error.reason}); convert the text to UTF-8"
            ) from None


class Losses(NamedTuple):
    """Results over all predictions, for each set of weights; the first is what the others are compared with."""

    perplexities: tuple[float, ...]  # exp of the mean negative log-likelihood of the next token
    kl_divergences: tuple[float, ...]  # see QuantisationCost
    same_tokens: tuple[float, ...]  # see QuantisationCost


class WindowedText:
    """Token ids in windows of `window` tokens; the last window has the rest.

    A window of n tokens has n - 1 predictions, because nothing predicts its first token.

    Parameters
    ----------
    ids : sequence of int
        At least two.
    window : int
        At least two.
    products : Products, optional
        Makes the matrix products; None: with PyTorch's operator.
    """

    def __init__(
        self,
        model: ModelConfig,
        ids: Sequence[int],
        window: int,
        device: torch.device,
        products: Products | None = None,
    ) -> None:
        self.model, self.device, self.products = model, device, products
        self._ops = TorchOperations(model)
        self.ids = torch.tensor(ids)  # on the CPU, where the embedding is
        self.window = min(window, len(ids))
        self.spans = [(start, min(start + window, len(ids))) for start in range(0, len(ids), window)]
        self._slice = max(1, LOGIT_BYTES // (4 * model.vocab_size))

    @property
    def predictions(self) -> int:
        """Number of tokens that are predicted."""
        return len(self.ids) - len(self.spans)

    def units(self, sets: int) -> int:
        """Count the steps of progress for `sets` sets of weights: windows of all layers, then slices of the predictions."""
        return sets * self.model.num_layers * len(self.spans) + len(list(self._slices()))

    @torch.inference_mode()
    def hidden_states(
        self, embedding: Tensor, layers: LayerSource, advance: Advance, record: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Compute the hidden states [tokens, hidden] after the last layer.

        Parameters
        ----------
        embedding : Tensor [vocabulary, hidden]
            On the CPU; only the rows of the text's tokens are copied.
        layers : callable
            Called once for each layer, in order; the returned weights are dropped before the next call.
        record : dict of str to Tensor, optional
            Receives the sums of the squares of each input of the layers' matrices, [1 or experts, inputs], by the names of these.
        """
        hidden = scaled(F.embedding(self.ids, embedding).to(self.device), self.model)
        local = LocalRotation(self.model, self.device) if self.model.local_rope_theta is not None else None
        rope, kv_heads, dim = RotaryEmbedding(self.model, self.device), self.model.num_kv_heads, self.model.head_dim
        attention = causal_attention_device if self.device.type == "cuda" else causal_attention
        for number in range(self.model.num_layers):
            weights = {name: tensor.to(self.device) for name, tensor in layers(number).items()}
            layer = Layer(weights, number, self.products, self.model)
            if record is not None:
                _record(layer, number, weights, record)
            del weights
            for start, stop in self.spans:
                x, tokens = hidden[start:stop], stop - start
                if layer.delta_net is not None:
                    begun = [DeltaPrompt.begin(layer.delta_net.config, x.dtype, x.device)]
                    projected = layer.project_state(self._ops, x, None, prompt=True)
                    mixed, _ = read_prompts(*projected, begun, [tokens], layer.delta_net)
                    x += layer.finish(self._ops, x, mixed, prompt=True)
                    advance(1)
                    continue
                keys, values = x.new_empty(2, kv_heads, tokens, dim)
                qkv, rotation = layer.project(self._ops, x, None, prompt=True), rope(0, tokens, tokens)
                if local is not None and self.model.window_of(number) is not None:
                    rotation = local(torch.arange(tokens, device=self.device))
                q = self._ops.rope_prompt(qkv, rotation, keys, values, 0, layer.q_norm, layer.k_norm)
                out = attention(q.transpose(0, 1), keys, values, self.model.scaling, self.model.window_of(number))
                x += layer.finish(self._ops, x, layer.gate(out.flatten(1), qkv), prompt=True)
                advance(1)
            del layer  # before the next one is read
        return hidden

    @torch.inference_mode()
    def losses(self, heads: Sequence[Head], hidden: Sequence[Tensor], advance: Advance) -> Losses:
        """Compare sets of hidden states [tokens, hidden] with the text, and each with the first.

        `heads` has the head of each set.
        """
        likelihood, divergence, same = torch.zeros(3, len(hidden), dtype=torch.float64)
        for start, stop in self._slices():
            targets = self.ids[start + 1 : stop + 1].to(self.device)[:, None]
            first: Tensor | None = None
            for number, (head, states) in enumerate(zip(heads, hidden, strict=True)):
                one = head(states[start:stop], prompt=True).log_softmax(dim=-1)
                first = one if first is None else first
                likelihood[number] += one.gather(1, targets).double().sum().cpu()
                same[number] += (first.argmax(dim=-1) == one.argmax(dim=-1)).sum().cpu()
                if number > 0:
                    each = F.kl_div(one, first, reduction="none", log_target=True).sum(dim=-1)
                    divergence[number] += each.double().sum().cpu()
            advance(1)
        perplexities = (-likelihood / self.predictions).exp().tolist()  # inf where a number is too large
        means = (tuple((sums / self.predictions).tolist()) for sums in (divergence, same))
        return Losses(tuple(perplexities), *means)

    def _slices(self) -> Iterator[tuple[int, int]]:
        """Cut the positions that predict a token into slices; the last position of a window predicts nothing."""
        for start, stop in self.spans:
            for first in range(start, stop - 1, self._slice):
                yield first, min(first + self._slice, stop - 1)


class _Recorded(Linear):
    """A product that adds the squares of what it multiplies to `squares` [inputs]."""

    def __init__(self, product: Product, squares: Tensor) -> None:
        self._product, self._squares = product, squares

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        self._squares += x.float().square().sum(dim=0)
        return self._product(x, prompt=prompt)


def _record(layer: Layer, number: int, weights: Mapping[str, Tensor], record: dict[str, Tensor]) -> None:
    """Make the products of a layer's matrices add to `record`, as hidden_states says; of experts those that a token passes."""

    def watched(name: str, products: Sequence[Product]) -> list[GatedProduct]:
        full = f"layers.{number}.{name}.weight"
        inputs, device = weights[full].shape[1], weights[full].device
        record[full] = torch.zeros(len(products), inputs, device=device)
        return [_Recorded(one, squares) for one, squares in zip(products, record[full], strict=True)]

    for name in (one for one in QUANTISED if hasattr(layer, one)):
        setattr(layer, name, watched(name, [getattr(layer, name)])[0])
    mixture = layer.mixture
    if mixture is None:
        return
    experts = mixture.experts
    assert isinstance(experts, LoopedExperts), "neither PyTorch's products nor the CPU's group experts"
    experts.gate_up = watched(f"{EXPERTS}.gate_up", experts.gate_up)
    experts.down = watched(f"{EXPERTS}.down", experts.down)
    for place, name in enumerate(("gate_up", "down") if mixture.shared else ()):
        mixture.shared[place : place + 1] = watched(f"{SHARED}.{name}", [mixture.shared[place]])


class Calibrator:
    """A calibration, checked when it is made, and run once the weights are written.

    Parameters
    ----------
    tokens : int
        Number of tokens to read from the start of the text; a text with fewer tokens is read whole.
    window : int, optional
        Number of tokens that see each other; None: CALIBRATE_TOKENS, or max_seq_len if that is less.
    others : mapping of str to WeightFormat
        Of ALTERNATIVES, what the weights are rounded to, too, to compare with; there are some if the engine's are rounded.

    Attributes
    ----------
    importance : dict of str to Tensor
        Of `write_weights`, by `measure`: mean squares of the text's activations.

    Raises
    ------
    ConfigError
        If `tokens` or `window` is out of range, the text has fewer than two tokens or ids that the model does not know, or
        the processor cannot multiply numbers of the engine's dtype.
    """

    def __init__(
        self,
        text: Text,
        config: EngineConfig,
        tokenizer: Tokenizer,
        tokens: int,
        window: int | None = None,
        others: Mapping[str, WeightFormat] = NO_OTHERS,
    ) -> None:
        window = min(config.max_seq_len, CALIBRATE_TOKENS) if window is None else window
        require(tokens >= 2, "calibrate_tokens", tokens, ">= 2", "the first token of a text is predicted by nothing")
        limit, remedy = f"between 2 and max_seq_len = {config.max_seq_len}", "set --calibrate_window, or leave it out"
        require(2 <= window <= config.max_seq_len, "calibrate_window", window, limit, remedy)
        self.text, self.config, self._others = text, config, others
        self.importance: dict[str, Tensor] = {}
        self._first: Tensor | None = None  # hidden states with the weights in the engine's dtype
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device == CPU and config.dtype == "bfloat16" and not bfloat16_works():
            remedy = "build where PyTorch sees a GPU, with --dtype float32, or without --calibrate"
            raise ConfigError(f"calibrate: this processor cannot multiply dtype = 'bfloat16'; {remedy}")
        ids = tokenizer.encode(text.content)  # as a request would be
        require(len(ids) >= 2, f"tokens of {text.name}", len(ids), ">= 2", "name a longer text with --calibrate")
        self.text_tokens = len(ids)
        products = HostProducts(getattr(torch, config.dtype)) if self.device == CPU else None
        self._windows = WindowedText(config.model, ids[:tokens], window, self.device, products)

    @property
    def tokens(self) -> int:
        """Tokens that are read."""
        return len(self._windows.ids)

    @property
    def measures(self) -> bool:
        """Whether weights are rounded to INT4, whose errors then count by `importance`."""
        return bool(self._others) and INT4 in (self.config.weight_only_precision, *self._others)

    @property
    def measuring_units(self) -> int:
        """Steps of progress that `measure` makes."""
        return self._windows.units(1) - self._windows.units(0)

    @property
    def units(self) -> int:
        """Steps of progress that `run` makes."""
        sets = (1 if self.config.weight_only_precision == NONE else 2) + len(self._others)
        return self._windows.units(sets if self._first is None else sets - 1)

    def measure(self, checkpoint: Checkpoint, advance: Advance) -> None:
        """Compute with the weights of the checkpoint, before any are written, and find `importance`; raises as `run`."""
        dtype = getattr(torch, self.config.dtype)
        embedding, record = weight_reader(checkpoint, dtype)("embed.weight"), dict[str, Tensor]()
        with self._enough_memory():
            layers = checkpoint_layers(checkpoint, dtype)
            self._first = self._windows.hidden_states(embedding, layers, advance, record)
        for name, squares in record.items():
            # An input that the text does not use counts a little, too.
            means = squares.mean(dim=1, keepdim=True)
            self.importance[name] = (squares / means.clamp(min=LEAST) + LITTLE).squeeze(0).cpu()

    def run(self, checkpoint: Checkpoint, directory: Path, advance: Advance) -> Calibration:
        """Compute with the weights in `directory`, if these are quantised with the weights of the checkpoint, and with `others`.

        Raises
        ------
        ConfigError
            If a perplexity is not a finite number.
        CapacityError
            If the GPU has not enough memory.
        """
        sources = [stored_layers(directory)]
        if self.config.weight_only_precision != NONE:
            sources.insert(0, checkpoint_layers(checkpoint, getattr(torch, self.config.dtype)))
        sources += [rounded_layers(checkpoint, other, self.importance) for other in self._others.values()]
        with self._enough_memory():
            return self._report(self._losses(checkpoint, directory, sources, advance))

    @contextlib.contextmanager
    def _enough_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"calibrate: the GPU's memory does not hold one layer and {self.tokens:,} tokens "
                f"({str(error).splitlines()[0]}); lower --calibrate_tokens or --calibrate_window, or hide the GPU with "
                "CUDA_VISIBLE_DEVICES= to compute on the CPU"
            ) from None

    def _losses(self, checkpoint: Checkpoint, directory: Path, sources: list[LayerSource], advance: Advance) -> Losses:
        embedding = load_weights(directory, CPU, lambda name: name == "embed.weight")["embed.weight"]
        known = [] if self._first is None else [self._first]
        hidden = known + [self._windows.hidden_states(embedding, one, advance) for one in sources[len(known) :]]
        stored = load_weights(directory, CPU, lambda name: name != "embed.weight" and not name.startswith("layers."))
        stored["embed.weight"] = embedding
        heads = [self._head(stored)] * len(sources)
        if self.config.quantize_lm_head:  # all but the engine's are those of an engine without quantisation
            tied = self.config.model.tie_word_embeddings
            plain = {} if tied else {HEAD: weight_reader(checkpoint, embedding.dtype)(HEAD)}
            other = self._head({"norm.weight": stored["norm.weight"], "embed.weight": embedding} | plain)
            heads = [one if number == 1 else other for number, one in enumerate(heads)]
        return self._windows.losses(heads, hidden, advance)

    def _head(self, weights: dict[str, Tensor]) -> Head:
        wanted = [name for name in weights if name != "embed.weight" or HEAD not in weights]
        own = {name: weights[name].to(self.device) for name in wanted}
        return Head.of(self.config.model, own, self._windows.products)

    def _report(self, losses: Losses) -> Calibration:
        config, perplexities = self.config, losses.perplexities
        stored = [] if config.weight_only_precision == NONE else [config.weight_only_precision]
        names = [config.dtype, *stored, *self._others]
        for name, value in zip(names, perplexities, strict=True):
            limit = f"a finite number with the weights in {name}"
            require(math.isfinite(value), "perplexity", value, limit, overflow_remedy(config.dtype))
        ratios = [one / perplexities[0] for one in perplexities]
        each = zip(perplexities, ratios, losses.kl_divergences, losses.same_tokens, strict=True)
        costs = {name: QuantisationCost(*values) for name, values in zip(names, each, strict=True)}
        return Calibration(
            text=self.text.name,
            text_sha256=self.text.sha256,
            text_tokens=self.text_tokens,
            tokens=self.tokens,
            window=self._windows.window,
            predictions=self._windows.predictions,
            device=self.device.type,
            dtype=config.dtype,
            weight_only_precision=config.weight_only_precision,
            perplexity=perplexities[0],
            quantised=costs[stored[0]] if stored else None,
            **{name: costs[name] for name in self._others},
        )


def stored_layers(directory: Path) -> LayerSource:
    """Read layers of an engine directory as they are stored: views of the mapped files."""
    return lambda number: load_weights(directory, CPU, lambda name: name.startswith(f"layers.{number}."))


def rounded_layers(checkpoint: Checkpoint, other: WeightFormat, importance: Mapping[str, Tensor]) -> LayerSource:
    """Read layers of a checkpoint, rounded as an engine of another format would store them; `importance` as `write_weights`."""
    listed = list_weights(checkpoint.config)

    def read(number: int) -> dict[str, Tensor]:
        weights = [weight for weight in listed if weight.name.startswith(f"layers.{number}.")]
        found: dict[str, Tensor] = {}
        for weight in weights:
            parts = other.convert(fuse(checkpoint, weight), weight.name, importance.get(weight.name))
            found |= {stored.name: part for stored, part in zip(other.stored(weight), parts, strict=True)}
        return found

    return read


def checkpoint_layers(checkpoint: Checkpoint, dtype: torch.dtype) -> LayerSource:
    """Read layers of a checkpoint, fused and in `dtype`, as an engine without quantisation would hold them."""
    read = weight_reader(checkpoint, dtype)
    names = [weight.name for weight in list_weights(checkpoint.config)]
    return lambda number: {name: read(name) for name in names if name.startswith(f"layers.{number}.")}
