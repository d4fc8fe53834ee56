"""The ranks of an engine as torch.distributed sees them, and a model's products on them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ExpertsConfig
from kvseek.engine.model.experts import Experts, Parts
from kvseek.engine.model.layer import Embedding, Linear, Product, Products

from .nodes import LOOPBACK, interface_to
from .reports import Reporter

EMBEDDED_TOKENS = 8192  # of a prompt whose embeddings are summed at once


@dataclass(frozen=True)
class Ranks:
    """The ranks of an engine, in one of their processes, joined with gloo. A process has at most one engine of several ranks.

    Those of an engine on GPUs are DeviceRanks of cuda/ranks.py.

    Attributes
    ----------
    rank, size : int
    reporter : Reporter
        Takes what this rank is doing; sums are counted there when they begin.
    """

    rank: int
    size: int
    reporter: Reporter = field(default_factory=Reporter, kw_only=True, compare=False, repr=False)

    @classmethod
    def join(
        cls, store: TCPStore, rank: int, size: int, timeout_seconds: float, reporter: Reporter | None = None
    ) -> Ranks:
        """Join the others; returns when all have joined.

        Parameters
        ----------
        store : TCPStore
            That of `create_store` or `find_store`.
        timeout_seconds : float
            After so long a rank that waits for another raises RuntimeError.
        """
        with using_interface_to(store.host):
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_seconds)
            )
        return cls(rank, size, reporter=reporter or Reporter())

    @property
    def way(self) -> str:
        """How the tensors of decode steps are summed."""
        return "gloo"

    def leave(self) -> None:
        """End the communication, which must not be under way."""
        leave()

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by the sum of all ranks' tensors, in its dtype."""
        self.reporter.step()
        dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Put the tensors [rows, n] of all ranks side by side on rank 0: [rows, size * n]. The others get `tensor` back."""
        self.reporter.step()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(tensor.contiguous(), parts)
        return tensor if parts is None else torch.cat(parts, dim=1)


def create_store(timeout_seconds: float, host: str = LOOPBACK) -> TCPStore:
    """Create the store by which ranks find each other, on a free port of an address of this host."""
    if dist.is_initialized():
        raise ConfigError("tp_size: another engine of several ranks runs in this process; close it first")
    wait = timedelta(seconds=timeout_seconds)
    with socket.create_server((host, 0)) as listening:  # the store itself would listen at all addresses
        port = listening.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=wait,
            wait_for_workers=False,
            master_listen_fd=os.dup(listening.fileno()),
        )


def find_store(host: str, port: int, timeout_seconds: float) -> TCPStore:
    """Connect to the store that rank 0 has created."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))


def leave() -> None:
    """End this process's part in the communication of ranks, if it has joined; nothing must be under way."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def using_interface_to(host: str) -> Iterator[None]:
    """Let gloo use the interface that leads to `host`, unless the environment names one: it would look up the host's name."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ:
        yield
        return
    os.environ[name] = interface_to(host)
    try:
        yield
    finally:
        del os.environ[name]


class RankProducts(Products):
    """Makes the products of one rank, each by `products` of an engine of one rank.

    Parameters
    ----------
    vocab_size : int
        Of the model; ranks have rows beyond it (core/ranks.py).
    """

    def __init__(self, products: Products, ranks: Ranks, vocab_size: int) -> None:
        super().__init__(products.dtype)
        self._products, self._ranks, self._vocab_size = products, ranks, vocab_size
        self._made = 0

    def linear(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Linear:
        self._tell()
        return self._products.linear(weight, bias, scale)

    def row_parallel(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Product:
        """See Products. The ranks' outputs have been rounded to the engine's dtype when they are summed."""
        own = self.linear(weight, bias, scale)

        def product(x: Tensor, *, prompt: bool = False) -> Tensor:
            return self.sum(own(x, prompt=prompt))

        return product

    def experts(self, config: ExpertsConfig, gate_up: Parts, down: Parts) -> Experts:
        self._tell()
        return self._products.experts(config, gate_up, down)

    def sum(self, part: Tensor) -> Tensor:
        return self._ranks.sum(part)

    def head(self, weight: Tensor, scale: Tensor | None = None) -> Product:
        self._tell()
        own, ranks, vocab_size = self._products.head(weight, scale), self._ranks, self._vocab_size

        def product(x: Tensor, *, prompt: bool = False) -> Tensor:
            return ranks.gather(own(x, prompt=prompt))[:, :vocab_size].contiguous()

        return product

    def embedding(self, weight: Tensor) -> Embedding:
        return RankEmbedding(weight, self._ranks)

    def _tell(self) -> None:
        """Tell of the next product, as on the CPU it may copy its weight to another layout."""
        self._made += 1
        self._ranks.reporter.doing(f"prepares product {self._made}")


class RankPartProducts(RankProducts):
    """Makes the products of one rank on a GPU, whose RankLayerKernels sum what row-parallel products compute."""

    def sum(self, part: Tensor) -> Tensor:
        return part


class RankEmbedding(Embedding):
    """The embedding of all ranks, each of which has some rows of the vocabulary."""

    def __init__(self, weight: Tensor, ranks: Ranks) -> None:
        super().__init__(weight, ranks.rank * weight.shape[0])
        self._ranks = ranks

    def __call__(self, tokens: Tensor) -> Tensor:
        """See Embedding. Rows are summed in pieces: a sum takes two more tensors of its size, and a prompt's fill gigabytes."""
        rows = self.weight.new_empty(tokens.shape[0], self.weight.shape[1])
        for start in range(0, tokens.shape[0], EMBEDDED_TOKENS):
            piece = slice(start, start + EMBEDDED_TOKENS)
            own = tokens[piece].long() - self.first
            foreign = (own < 0) | (own >= self.weight.shape[0])
            part = F.embedding(own.masked_fill_(foreign, 0), self.weight)
            rows[piece] = self.complete(part.masked_fill_(foreign[:, None], 0))
        return rows

    def complete(self, rows: Tensor) -> Tensor:
        """See Embedding. All but one rank add zeros, so the sum is exact."""
        return self._ranks.sum(rows)
