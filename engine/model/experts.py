"""Mixtures of experts: a router chooses a few of a layer's MLPs for each token, and the layer gives their weighted sum.

As transformers' Qwen2MoeSparseMoeBlock computes it, whose experts' sum here is in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .weights import EXPERTS, ROUTER, SHARED, SHARED_GATE

if TYPE_CHECKING:
    from kvseek.core.model_config import ExpertsConfig

    from .reference import LayerOperations

SiluMul = Callable[[Tensor], Tensor]
Mark = Callable[[str], None]
Parts = tuple[Tensor, Tensor | None]
"""A weight and its scale, if it has one."""


def route(logits: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row by the router's logits [rows, experts].

    Returns
    -------
    weights : Tensor, float32 [rows, chosen]
        Probabilities of the softmax over all experts; with norm_topk_prob their sum is 1.
    chosen : Tensor, int64 [rows, chosen]
        The experts with the largest logits, in descending order; of equal ones the first.
    """
    logits = logits.float() + 0.0  # without -0
    bits, last = logits.view(torch.int32), config.num_experts - 1
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # compares as the numbers do
    # No two keys are equal, among which topk would choose as it likes.
    keys = (ordered.long() << 16) + torch.arange(last, -1, -1, device=logits.device)
    chosen = last - (keys.topk(config.num_experts_per_tok, dim=-1).values & 0xFFFF)
    weights = logits.softmax(dim=-1).gather(1, chosen)
    if config.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


class GatedProduct(Protocol):
    """A Linear of layer.py."""

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor: ...

    def gated(self, x: Tensor, silu_mul: SiluMul, *, prompt: bool = False) -> Tensor: ...


class Experts(Protocol):
    """The experts of a layer, without router and shared expert."""

    def __call__(self, x: Tensor, logits: Tensor, silu_mul: SiluMul, mark: Mark, *, prompt: bool = False) -> Tensor:
        """Give the weighted sum [rows, hidden] of what x passes, by the router's logits [rows, experts].

        A row's sum does not depend on other rows, as with Product. `mark` is that of Layer.project.
        """
        ...


class MakesProducts(Protocol):
    """The Products of layer.py, as far as mixtures need them."""

    def linear(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> GatedProduct: ...

    def experts(self, config: ExpertsConfig, gate_up: Parts, down: Parts) -> Experts: ...

    def sum(self, part: Tensor) -> Tensor: ...


class LoopedExperts:
    """Each expert's products apart, with the rows that chose it.

    Parameters
    ----------
    gate_up, down : sequence of GatedProduct
        By expert.
    """

    def __init__(self, config: ExpertsConfig, gate_up: Sequence[GatedProduct], down: Sequence[GatedProduct]) -> None:
        self._config, self.gate_up, self.down = config, gate_up, down

    def __call__(self, x: Tensor, logits: Tensor, silu_mul: SiluMul, mark: Mark, *, prompt: bool = False) -> Tensor:
        """See Experts. A row's experts are summed in the order of their numbers, whatever other rows have chosen."""
        weights, chosen = route(logits, self._config)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, rows, own in _by_expert(weights, chosen):
            activated = self.gate_up[expert].gated(x[rows], silu_mul, prompt=prompt)
            total.index_add_(0, rows, self.down[expert](activated, prompt=prompt) * own)
        mark("down")
        return total.to(x.dtype)


def _by_expert(weights: Tensor, chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that rows have chosen, these rows ascending, and its weight in each, float32 [rows, 1]."""
    experts, order = chosen.flatten().sort(stable=True)
    found, counts = torch.unique_consecutive(experts, return_counts=True)
    rows, own = (
        order // chosen.shape[1],
        weights.flatten()[order, None],
    )  # of all: an operator for each expert costs more
    sizes = counts.tolist()
    yield from zip(found.tolist(), torch.split(rows, sizes), torch.split(own, sizes), strict=True)


class Mixture:
    """The mixture of experts of one layer.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Weights of a layer under the names of engine/model/weights.py.
    prefix : str
        Of the layer's names.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], prefix: str, config: ExpertsConfig, products: MakesProducts
    ) -> None:
        def parts(name: str) -> Parts:
            return weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.weight_scale")

        def linear(name: str) -> GatedProduct:
            weight, scale = parts(name)
            return products.linear(weight, None, scale)

        self._router, self._sum = linear(ROUTER), products.sum
        self.experts = products.experts(config, parts(f"{EXPERTS}.gate_up"), parts(f"{EXPERTS}.down"))
        names = (f"{SHARED}.gate_up", f"{SHARED}.down", SHARED_GATE) if config.shared_intermediate_size else ()
        self.shared = [linear(name) for name in names]

    def __call__(self, ops: LayerOperations, x: Tensor, mark: Mark, *, prompt: bool = False) -> Tensor:
        """Compute the output [rows, hidden] of normalised rows x; `mark` and `prompt` are those of Layer.finish."""
        logits = self._router(x, prompt=prompt)
        total = self.experts(x, logits, ops.silu_mul, mark, prompt=prompt)
        if self.shared:
            gate_up, down, gate = self.shared
            out = down(gate_up.gated(x, ops.silu_mul, prompt=prompt), prompt=prompt).float()
            total = (total.float() + gate(x, prompt=prompt).float().sigmoid() * out).to(x.dtype)
            mark("down")
        return self._sum(total)
