"""What a Gated DeltaNet layer (arXiv:2412.06464) computes between its products, in PyTorch: prompts, and the definition of steps.

A token's queries, keys and values pass a causal convolution of each channel and silu. Each value head then keeps a state
S [key channels, value channels], which a token changes by what its key does not find there yet:

    S ← exp(g) S,   S ← S + k ⊗ β (v − k S),   out = q S

Queries and keys have length 1 (queries then a head's scale), β = sigmoid(b), g = −exp(a_log) softplus(a + dt). A head's output is
normalised and multiplied with silu(z). As transformers' Qwen3NextGatedDeltaNet, but all of it in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.config import STATE_BLOCK as BLOCK

if TYPE_CHECKING:
    from kvseek.core.model_config import DeltaNetConfig

LENGTH_EPSILON = 1e-6  # of a query's and a key's squared length
# Blocks that a device solves at once, always as many: a library may choose another order of sums for another number.
GROUPS = {"cpu": 1, "cuda": 8}


@dataclass(frozen=True)
class DeltaParameters:
    """What a layer has beside its products.

    Attributes
    ----------
    conv : Tensor [channels, kernel]
    a_log, dt : Tensor, float32 [value heads]
    norm : Tensor [value_head_dim]
        Weight of the norm of a head's output.
    """

    config: DeltaNetConfig
    conv: Tensor
    a_log: Tensor
    dt: Tensor
    norm: Tensor
    epsilon: float


@dataclass(frozen=True)
class DeltaStates:
    """The states of a layer.

    A step may have several tokens of a slot, of which the first is certain and the others are a draft. `recurrent` is that behind
    the certain one. What the others would change it by is kept, and the slot's next step, whose position says how many of them
    were accepted, first applies these, in the same order and by the same operations as if each had come alone.

    Attributes
    ----------
    conv : Tensor [slots, ring, channels]
        What the convolution reads of the latest tokens; that of position p lies in row p mod ring (DeltaNetConfig.ring_rows).
    gates : Tensor [slots, ring, 2 value heads]
        Write strengths and decays of drafted tokens, before their functions, in the same rows.
    recurrent : Tensor, float32 [slots, value heads, key_head_dim, value_head_dim]
    tokens : Tensor, int32 [slots, value heads]
        How many `recurrent` has had.
    """

    conv: Tensor
    gates: Tensor
    recurrent: Tensor
    tokens: Tensor

    @classmethod
    def zeros(
        cls, config: DeltaNetConfig, slots: int, drafted: int, dtype: torch.dtype, device: torch.device
    ) -> DeltaStates:
        """Allocate the states of a layer, for drafts of at most `drafted` tokens."""
        heads, ring = config.num_value_heads, config.ring_rows(drafted)
        return cls(
            torch.zeros(slots, ring, config.channels, dtype=dtype, device=device),
            torch.zeros(slots, ring, 2 * heads, dtype=dtype, device=device),
            torch.zeros(slots, heads, config.key_head_dim, config.value_head_dim, device=device),
            torch.zeros(slots, heads, dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.conv.nbytes + self.gates.nbytes + self.recurrent.nbytes + self.tokens.nbytes

    def latest(self, slot: int, tokens: int, count: int) -> Tensor:
        """Copy what the convolution reads of the last `count` of a slot's first `tokens` tokens."""
        return self.conv[slot].roll((count - tokens) % self.conv.shape[1], dims=0)[:count]


class Requests(Protocol):
    """The Batch of core/batch.py, as far as steps need it."""

    def column(self, name: str) -> Tensor: ...


def delta_step(qkvz: Tensor, ba: Tensor, batch: Requests, parameters: DeltaParameters, states: DeltaStates) -> Tensor:
    """Compute a layer's outputs [batch, values] for the tokens of requests, and advance the states of their slots.

    Parameters
    ----------
    qkvz : Tensor [batch, channels + values]
        Queries, keys, values, and the z of the gates.
    ba : Tensor [batch, 2 value heads]
    batch : Batch
        Tokens of one slot lie behind each other, in the order of their positions. All but the first are a draft.
    """
    config, ring, out = parameters.config, states.conv.shape[1], list[Tensor]()
    before, own = (-1, -1), states.recurrent  # the row before, and the state behind it
    first = 0  # position of the slot's first row
    for row, place in enumerate(zip(batch.column("slot").tolist(), batch.column("position").tolist(), strict=True)):
        slot, position = place
        states.conv[slot, position % ring] = qkvz[row, : config.channels]
        states.gates[slot, position % ring] = ba[row]
        if place != (before[0], before[1] + 1):
            first, own = position, _caught_up(slot, position, parameters, states)
            states.tokens[slot] = position + 1
        elif position == first + 1:
            own = own.clone()
        out.append(_advance(own, slot, position, parameters, states))
        before = place
    return _gated(torch.cat(out), qkvz[:, config.channels :], parameters)


def catch_up(batch: Requests, parameters: DeltaParameters, states: DeltaStates) -> None:
    """Apply to a layer's states what earlier steps have kept of the tokens before each request's position."""
    for slot, position in zip(batch.column("slot").tolist(), batch.column("position").tolist(), strict=True):
        _caught_up(slot, position, parameters, states)
        states.tokens[slot].clamp_(min=position)


def _caught_up(slot: int, tokens: int, parameters: DeltaParameters, states: DeltaStates) -> Tensor:
    """Return the state of a slot, once it has had so many tokens."""
    own = states.recurrent[slot]
    for position in range(int(states.tokens[slot, 0]), tokens):
        _advance(own, slot, position, parameters, states)
    return own


def _advance(state: Tensor, slot: int, position: int, parameters: DeltaParameters, states: DeltaStates) -> Tensor:
    """Change a state by the token of a position; returns what it reads there, [1, values]."""
    config, ring = parameters.config, states.conv.shape[1]
    q, k, v = _heads(_convolve(states.latest(slot, position + 1, config.conv_kernel), parameters), config)
    strength, decay = _gates(states.gates[slot, position % ring, None], parameters)
    state *= decay[0].exp()[:, None, None]
    change = strength[0, :, None] * (v[0] - torch.bmm(k[0, :, None], state)[:, 0])
    state.addcmul_(k[0, :, :, None], change[:, None])
    return torch.bmm(q[0, :, None], state).view(1, -1)


@dataclass(frozen=True)
class DeltaPrompt:
    """The state of a prompt of which a layer has read the first tokens.

    Attributes
    ----------
    tokens : int
        How many.
    latest : Tensor [kernel - 1, channels]
        What the convolution reads of the last of them; zeros before the first token.
    recurrent : Tensor, float32 [value heads, key_head_dim, value_head_dim]
    """

    tokens: int
    latest: Tensor
    recurrent: Tensor

    @classmethod
    def begin(cls, config: DeltaNetConfig, dtype: torch.dtype, device: torch.device) -> DeltaPrompt:
        """Begin with the first token of a prompt."""
        latest = torch.zeros(config.conv_kernel - 1, config.channels, dtype=dtype, device=device)
        return cls(0, latest, _no_state(config, device))

    @classmethod
    def of_slot(cls, states: DeltaStates, slot: int, tokens: int, kernel: int) -> DeltaPrompt:
        """Copy the state of a slot, which has had so many tokens."""
        return cls(tokens, states.latest(slot, tokens, kernel - 1), states.recurrent[slot].clone())

    def write(self, states: DeltaStates, slot: int) -> None:
        """Write the state to a slot."""
        ring, count = states.conv[slot], self.latest.shape[0]
        first = (self.tokens - count) % ring.shape[0]
        end = min(count, ring.shape[0] - first)  # of those before the ring's end is passed
        ring[first : first + end], ring[: count - end] = self.latest[:end], self.latest[end:]
        states.recurrent[slot], states.tokens[slot] = self.recurrent, self.tokens


def _no_state(config: DeltaNetConfig, device: torch.device) -> Tensor:
    return torch.zeros(config.num_value_heads, config.key_head_dim, config.value_head_dim, device=device)


def read_prompts(
    qkvz: Tensor, ba: Tensor, prompts: Sequence[DeltaPrompt], counts: Sequence[int], parameters: DeltaParameters
) -> tuple[Tensor, list[DeltaPrompt]]:
    """Compute a layer's outputs [rows, values] for the next tokens of prompts, so many of each, whose rows follow each other.

    A prompt's outputs depend to the bit neither on other prompts nor on where it is cut, if it is cut where positions are
    multiples of BLOCK, wherever it begins. Parameters as `delta_step`. Returns the outputs, and the prompts after these tokens.
    """
    config, kernel = parameters.config, parameters.config.conv_kernel
    inputs, gates = torch.split(qkvz[:, : config.channels], list(counts)), _gates(ba, parameters)
    # The tokens of each prompt behind the latest that it has had.
    joined = torch.cat([part for prompt, own in zip(prompts, inputs, strict=True) for part in (prompt.latest, own)])
    mixed = _convolve(joined, parameters)  # that ends at row kernel - 1, kernel, ...
    firsts, first = [], 0
    for count in counts:
        firsts.append(first)
        first += count + kernel - 1
    latest = [joined[at + count : at + count + kernel - 1] for at, count in zip(firsts, counts, strict=True)]
    own = [mixed[at : at + count] for at, count in zip(firsts, counts, strict=True)]
    before = [prompt.tokens % BLOCK for prompt in prompts]  # places of its first block that a prompt leaves empty
    parts = [_blocks(part, counts, before) for part in (*_heads(torch.cat(own), config), *gates)]
    each = [-(-(empty + count) // BLOCK) for empty, count in zip(before, counts, strict=True)]
    owners = [number for number, blocks in enumerate(each) for _ in range(blocks)]
    states, size = [prompt.recurrent for prompt in prompts], GROUPS[qkvz.device.type]
    groups = [
        _solve(*(_filled_up(part[at : at + size], size) for part in parts)).advance(owners[at : at + size], states)
        for at in range(0, len(owners), size)
    ]
    rows = torch.cat(groups).transpose(1, 2).flatten(2)  # [blocks, BLOCK, values]
    places = zip(torch.split(rows, each), before, counts, strict=True)
    out = [part.flatten(0, 1)[empty : empty + count] for part, empty, count in places]
    read = [
        DeltaPrompt(prompt.tokens + count, end.clone(), state)
        for prompt, count, end, state in zip(prompts, counts, latest, states, strict=True)
    ]
    return _gated(torch.cat(out), qkvz[:, config.channels :], parameters), read


def _convolve(inputs: Tensor, parameters: DeltaParameters) -> Tensor:
    """Mix each `kernel` rows that follow each other, [rows, channels] to float32 [rows - kernel + 1, channels]; apply silu."""
    kernel, weight = parameters.config.conv_kernel, parameters.conv.float()
    inputs = inputs.float()
    rows = inputs.shape[0] - kernel + 1
    total = inputs[:rows] * weight[:, 0]
    for number in range(1, kernel):
        total = total + inputs[number : number + rows] * weight[:, number]
    return F.silu(total)


def _heads(mixed: Tensor, config: DeltaNetConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Split queries, keys and values of rows: float32 [rows, value heads, channels] each; queries and keys of length 1."""
    rows, shared = mixed.shape[0], config.num_value_heads // config.num_key_heads
    q, k, v = torch.split(mixed, [config.keys, config.keys, config.values], dim=1)
    q, k = (part.reshape(rows, -1, config.key_head_dim) for part in (q, k))
    q, k = (part * torch.rsqrt((part * part).sum(dim=-1, keepdim=True) + LENGTH_EPSILON) for part in (q, k))
    q, k = (part.repeat_interleave(shared, dim=1) for part in (q * config.key_head_dim**-0.5, k))
    return q, k, v.reshape(rows, -1, config.value_head_dim)


def _gates(ba: Tensor, parameters: DeltaParameters) -> tuple[Tensor, Tensor]:
    """Compute β and g of rows, float32 [rows, value heads] each."""
    b, a = ba.float().chunk(2, dim=1)
    return b.sigmoid(), -parameters.a_log.exp() * F.softplus(a + parameters.dt)


def _gated(out: Tensor, z: Tensor, parameters: DeltaParameters) -> Tensor:
    """Normalise the heads of `out`, float32 [rows, values], and multiply with silu(z); the result has the dtype of z."""
    heads = out.view(out.shape[0], -1, parameters.config.value_head_dim)
    normed = F.rms_norm(heads, heads.shape[-1:], parameters.norm.float(), parameters.epsilon).flatten(1)
    return (normed * F.silu(z.float())).to(z.dtype)


def _blocks(part: Tensor, counts: Sequence[int], before: Sequence[int]) -> Tensor:
    """Cut rows [rows, heads, ...] of prompts into blocks [blocks, heads, BLOCK, ...], filled up with zeros.

    So many are `before` the rows of each prompt, the others behind. A token of zeros changes no state: it has no key, and its g
    is 0.
    """
    filled = []
    for own, empty in zip(torch.split(part, list(counts)), before, strict=True):
        missing = -(empty + own.shape[0]) % BLOCK
        first, last = (own.new_zeros(rows, *own.shape[1:]) for rows in (empty, missing))
        filled.append(torch.cat((first, own, last)) if empty or missing else own)
    joined = filled[0] if len(filled) == 1 else torch.cat(filled)
    return joined.view(-1, BLOCK, *joined.shape[1:]).transpose(1, 2)


def _filled_up(part: Tensor, size: int) -> Tensor:
    """Put blocks of zeros behind those of the last group."""
    missing = size - part.shape[0]
    return torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) if missing else part


@dataclass(frozen=True)
class _Solved:
    """Blocks without what the state before them adds: [blocks, heads, BLOCK, ...].

    Attributes
    ----------
    values : Tensor [..., value channels]
        What the tokens write, had the state been zero.
    found : Tensor [..., key channels]
        Factors of the state in what is subtracted from these.
    queries, keys : Tensor [..., key channels]
        Decayed since the block's begin, and until its end.
    scores : Tensor [..., BLOCK]
        Of each query with the keys up to its own.
    decay : Tensor [blocks, heads, 1, 1]
        Of the whole block.
    """

    values: Tensor
    found: Tensor
    queries: Tensor
    keys: Tensor
    scores: Tensor
    decay: Tensor

    def advance(self, owners: Sequence[int], states: list[Tensor]) -> Tensor:
        """Compute the outputs [blocks, heads, BLOCK, value channels], and advance `states` in the list.

        `owners` are the numbers of the states of the first blocks; blocks behind them only fill up a group.
        """
        before, written = list[Tensor](), list[Tensor]()
        for block, owner in enumerate(owners):
            state = states[owner]
            before.append(state)
            written.append(torch.baddbmm(self.values[block], self.found[block], state, alpha=-1))
            states[owner] = torch.baddbmm(state * self.decay[block], self.keys[block].transpose(1, 2), written[block])
        missing = self.values.shape[0] - len(owners)
        joined, found = torch.stack(before + before[:1] * missing), torch.stack(written + written[:1] * missing)
        return (self.scores @ found + self.queries @ joined)[: len(owners)]


def _solve(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, decay: Tensor) -> _Solved:
    """Solve what the tokens of each block write: token i finds what those before it in the block have written.

    With L the strictly lower triangle of β k kᵀ, decayed, the writes w are those of (1 + L) w = β (v − decayed k S).
    """
    since = decay.cumsum(dim=-1)  # of the block's begin
    between = since[..., :, None] - since[..., None, :]
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()
    own = k * strength[..., None]
    system = (own @ k.transpose(-1, -2)) * between
    right = torch.cat((v * strength[..., None], own * since.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, found = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * between
    queries, keys = q * since.exp()[..., None], k * (since[..., -1:] - since).exp()[..., None]
    parts = (values.contiguous(), found.contiguous(), queries, keys, scores)
    return _Solved(*parts, since[..., -1:, None].exp())
