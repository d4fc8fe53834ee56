"""The multi-token-prediction head of Qwen3-Next and Qwen3.5, which guesses the tokens behind the next one, on the CPU.

For the hidden state h of position p behind the model's last norm, and the embedding e of the token at p + 1 (DeepSeek-V3's
report, arXiv:2412.19437, section 2.2; here e comes first):

    x = fc [norm(e), norm(h)],   x → one layer that attends,   h' = norm(x)

The model's output matrix makes of h' the logits of the token at p + 2. For a token further, h' and that token take the places
of h and the token at p + 1.

The layer attends to what the pairs (h, e) of the first SINK positions and of the latest ones have left. Keys and values of a
pair follow from it alone, so a prompt costs one projection of so many rows. Pairs that are missing, such as those of a prefix
that was not read, only make guesses worse: steps verify all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.batch import Batch, RequestState
from kvseek.core.config import MOST_DRAFTED
from kvseek.core.rope import RotaryEmbedding
from kvseek.engine.cache.memory_layout import MTP_SINK as SINK
from kvseek.engine.cache.memory_layout import MTP_WINDOW as WINDOW
from kvseek.engine.draws.sampling import greedy_token

from .layer import Embedding, Head, Layer, Products

if TYPE_CHECKING:
    from kvseek.core.model_config import ModelConfig

    from .reference import LayerOperations


class MtpHead:
    """The head of one model, and what it keeps of the requests in `slots` slots.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Under the names of engine/model/weights.py.
    embed, head : Embedding, Head
        The model's own, which the multi-token-prediction head shares.
    dtype : torch.dtype
        That of the engine.

    Attributes
    ----------
    used : bool
        Whether prompts and steps pass `read_prompt` and `read_step`: not before the engine says so.
    """

    used = False

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, Tensor],
        products: Products,
        ops: LayerOperations,
        embed: Embedding,
        head: Head,
        slots: int,
        dtype: torch.dtype,
    ) -> None:
        self._ops, self._embed, self._head = ops, embed, head
        self._layer = Layer(weights, model.num_layers, products, model)
        self._fc = products.linear(weights["mtp.fc.weight"])
        norms = (weights[f"mtp.{name}norm.weight"] for name in ("embedding_", "hidden_", ""))
        self._embedding_norm, self._hidden_norm, self._norm = norms
        self._rope = RotaryEmbedding(model, embed.weight.device)
        self._scaling, self._kv_heads = model.scaling, model.num_kv_heads
        rows = SINK + WINDOW
        self._window = torch.zeros(slots, model.num_kv_heads, rows, 2, model.head_dim, dtype=dtype)
        self._positions = torch.full((slots, rows), -1)  # of the pair whose key and value each row has; -1: none
        self._table = torch.zeros(slots, 1, dtype=torch.int32)  # these rows lie in no extents
        self._unpaired: dict[int, tuple[int, Tensor]] = {}  # by slot: residual rows of positions that follow each other
        # By slot: the position of the latest pair, and what `_pair` returned of it.
        self._latest: dict[int, tuple[int, Tensor, Tensor, Tensor]] = {}

    def read_prompt(self, slot: int, ids: Sequence[int], first: int, residual: Tensor) -> None:
        """Begin a slot with the tokens of a prompt, of which those from `first` on were read.

        Parameters
        ----------
        residual : Tensor [tokens, hidden]
            Behind the last layer; what lies before row `first` is not looked at.
        """
        self._positions[slot], last = -1, len(ids) - 1
        self._latest.pop(slot, None)
        for start, stop in ((first, min(SINK, last)), (max(first, SINK, last - WINDOW), last)):
            if start < stop:
                self._pair(slot, start, self._normed(residual[start:stop]), ids[start + 1 : stop + 1])
        self._unpaired[slot] = last, residual[last:].clone()

    def read_step(self, slots: Sequence[int], positions: Sequence[int], residual: Tensor) -> None:
        """Take note of the residual rows [batch, hidden] of a step; those of a slot follow each other."""
        for slot in dict.fromkeys(slots):
            first = slots.index(slot)
            self._unpaired[slot] = positions[first], residual[first : first + slots.count(slot)]

    def follow(self, slot: int, tokens: Sequence[int]) -> bool:
        """Take in the pairs of the last step; `tokens` are all that the request has. Returns whether `draft` may go on."""
        if slot in self._unpaired:
            first, residual = self._unpaired[slot]
            count = min(len(tokens) - 1 - first, len(residual))
            if count > 0:
                following = tokens[first + 1 : first + 1 + count]
                pairs = self._pair(slot, first, self._normed(residual[:count]), following)
                x, queries, qkv = (part[-1:] for part in pairs)
                self._latest[slot] = first + count - 1, x, queries, qkv
                del self._unpaired[slot]
        return slot in self._latest and self._latest[slot][0] == len(tokens) - 2

    def draft(self, slot: int, count: int) -> list[int]:
        """Guess the next tokens of a slot, each the likeliest."""
        position, x, queries, qkv = self._latest[slot]
        drafted, x = list[int](), x.clone()  # which changes
        for place in range(position, position + count):
            attended = self._attend(slot, place, queries[0]).to(x.dtype)
            delta = self._layer.finish(self._ops, x, self._layer.gate(attended, qkv))
            hidden = self._ops.add_rms_norm(x, delta, self._norm)
            drafted.append(max(0, greedy_token(self._head.project(hidden).float()[0])))
            if len(drafted) < count:
                x, queries, qkv = self._pair(slot, place + 1, hidden, drafted[-1:])
        self._positions[slot, [_row(place) for place in range(position + 1, position + count)]] = -1  # of guesses
        return drafted

    def _pair(self, slot: int, first: int, hidden: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Project pairs of positions from `first` on, and keep their keys and values.

        `hidden` [pairs, hidden] is normed, `tokens` are those behind it. Returns x, queries [pairs, H, D], and qkv of the layer.
        """
        positions = list(range(first, first + len(tokens)))
        embedded = self._ops.add_rms_norm(self._embed(torch.tensor(tokens)), None, self._embedding_norm)
        x = self._fc(torch.cat((embedded, self._ops.add_rms_norm(hidden, None, self._hidden_norm)), dim=1))
        qkv = self._layer.project(self._ops, x, None)
        requests = [RequestState(slot=slot, position=p, write_row=_row(p), length=0) for p in positions]
        batch, rotation = Batch.of(requests, self._table), self._rope.at(positions)
        queries = self._ops.rope_append(qkv, batch, rotation, self._window, self._layer.q_norm, self._layer.k_norm)
        self._positions[slot, [_row(p) for p in positions]] = torch.tensor(positions)
        return x, queries, qkv

    def _attend(self, slot: int, position: int, queries: Tensor) -> Tensor:
        """Attend to what pairs up to a position have left: queries [H, D] to float32 [1, H * D]."""
        known = self._positions[slot]
        near = position - WINDOW + MOST_DRAFTED  # guesses take the rows of so many pairs before it
        rows = ((known >= 0) & (known <= position) & ((known < SINK) | (known > near))).nonzero()[:, 0]
        keys, values = self._window[slot][:, rows].float().unbind(dim=2)
        grouped = queries.float().view(self._kv_heads, -1, queries.shape[-1])
        shares = (grouped @ keys.transpose(1, 2) * self._scaling).softmax(dim=-1)
        attended: Tensor = shares @ values
        return attended.view(1, -1)

    def _normed(self, residual: Tensor) -> Tensor:
        return self._ops.add_rms_norm(residual.contiguous(), None, self._head.norm)


def _row(position: int) -> int:
    return position if position < SINK else SINK + (position - SINK) % WINDOW
