"""Real queries and keys of every layer of a Hugging Face model, as attention sees them after RoPE; and an index over a layer's.

Captured on a text with full attention, so that a layer's selection can be looked at by itself, not after the errors of the
layers and steps before it.

A replay is the engine's part of prefill and decode, without a model: the last queries captured stand for decode steps, all
before them is the prompt. Its row pool holds, in place of values, the number of each row's token, so that it is known which
token a place holds whatever order a method chooses or changes to.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvseek.bench.methods import batch_of
from kvseek.bench.variants import Variant
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.config import EXTENT_TOKENS, CacheConfig
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import ConfigError
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.core.index_context import IndexContext, LayerRows
from kvseek.plugins.contract import LAST_QUERIES

EXACT_TOKENS = 1 << 24  # token numbers that float32 holds exactly

CHUNK_TOKENS = 1024  # tokens a forward pass, which bounds the memory of attention scores
ATTENTION_NAME = "kvseek_capture"


@dataclass(frozen=True)
class CapturedLayer:
    """One layer's vectors, float32 on the CPU.

    Attributes
    ----------
    keys : Tensor [G, tokens, D]
    queries : Tensor [H, queries, D]
        Of the last positions.
    scaling : float
        Softmax scale.
    """

    keys: Tensor
    queries: Tensor
    scaling: float


def load_model(path: Path) -> tuple[Any, Any]:
    """Load a Hugging Face directory or a GGUF file: (transformers causal model in float32, tokenizer).

    Raises
    ------
    ConfigError
        If `path` is neither, or of an architecture that the builder does not support.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = open_checkpoint(path).tokenizer()  # the builder's: transformers misreads how a GGUF file splits words
    folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options)
    return model.eval(), tokenizer


def token_ids(tokenizer: Any, text: str, tokens: int) -> list[int]:
    """The first `tokens` token ids of a text; raises ConfigError if it is shorter."""
    ids: list[int] = tokenizer.backend.encode(text).ids
    if len(ids) < tokens:
        raise ConfigError(f"tokens = {tokens}: must be <= {len(ids)}, the length of the text; pass a longer --text")
    return ids[:tokens]


def cached_capture(model: Path, text: Path, tokens: int, queries: int, folder: Path) -> list[CapturedLayer]:
    """`capture` of a model on the first tokens of a text, kept in `folder`: minutes the first time, seconds after that.

    Files are named by a hash of the text, the model's name and size, and the counts; delete them if the model changes
    under the same name and size. Raises ConfigError as `load_model` and `token_ids` do.
    """
    content = text.read_text(encoding="utf-8")
    size = model.stat().st_size if model.is_file() else 0
    identity = repr((model.resolve().name, size, tokens, queries, content))
    path = folder / f"{model.stem}-{tokens}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.safetensors"
    if not path.exists():
        loaded, tokenizer = load_model(model)
        layers = capture(loaded, token_ids(tokenizer, content, tokens), queries)
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        save_file(_as_tensors(layers), part)
        part.replace(path)
    tensors = load_file(path)
    return [
        CapturedLayer(
            tensors[f"{number}.keys"], tensors[f"{number}.queries"], float(tensors[f"{number}.scaling"].item())
        )
        for number in range(len(tensors) // 3)
    ]


def _as_tensors(layers: list[CapturedLayer]) -> dict[str, Tensor]:
    tensors = {}
    for number, layer in enumerate(layers):
        tensors[f"{number}.keys"], tensors[f"{number}.queries"] = layer.keys.contiguous(), layer.queries.contiguous()
        tensors[f"{number}.scaling"] = torch.tensor(layer.scaling, dtype=torch.float64)
    return tensors


@torch.inference_mode()
def capture(model: Any, ids: list[int], queries: int) -> list[CapturedLayer]:
    """Run `model` over `ids` and keep every layer's keys and the last `queries` queries.

    The model's attention is replaced by a function that records and then calls the library's own; it is put back.
    """
    from transformers import AttentionInterface, DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    recorder = AttentionRecorder(model.config.num_hidden_layers, queries, sdpa_attention_forward)
    AttentionInterface.register(ATTENTION_NAME, recorder)
    before, cache = model.config._attn_implementation, DynamicCache()
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        for start in range(0, len(ids), CHUNK_TOKENS):
            chunk = ids[start : start + CHUNK_TOKENS]
            model.model(torch.tensor([chunk]), attention_mask=causal_mask(start, len(chunk)), past_key_values=cache)
    finally:
        model.set_attn_implementation(before)
    return recorder.layers()


def causal_mask(past: int, tokens: int) -> Tensor:
    # Given ready-made, because transformers makes no mask for an attention function that it does not know.
    allowed = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]


class AttentionRecorder:
    """An attention function of transformers' AttentionInterface."""

    def __init__(self, layers: int, queries: int, attention: Any) -> None:
        self._attention = attention
        self._kept = queries
        self._queries: list[Tensor | None] = [None] * layers
        self._keys: list[Tensor | None] = [None] * layers
        self._scaling = [0.0] * layers

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
        number = module.layer_idx
        earlier = self._queries[number]
        both = query[0] if earlier is None else torch.cat((earlier, query[0]), dim=1)
        self._queries[number] = both[:, -self._kept :].clone()
        # The whole cache so far; the last call's is the one that stays.
        self._keys[number] = key[0]
        self._scaling[number] = module.scaling
        return self._attention(module, query, key, value, mask, **options)

    def layers(self) -> list[CapturedLayer]:
        """What was seen; raises RuntimeError if a layer did not call the attention function."""
        layers = []
        for number, (keys, queries) in enumerate(zip(self._keys, self._queries, strict=True)):
            if keys is None or queries is None:
                raise RuntimeError(
                    f"layer {number} did not use transformers' attention interface: nothing was captured"
                )
            layers.append(CapturedLayer(keys.float(), queries.float(), self._scaling[number]))
        return layers


class Replay:
    """A prompt in slot 0 of one layer, and the decode steps after it; float32 on the CPU.

    Parameters
    ----------
    layer : CapturedLayer
        Keys of all tokens; queries of the last ones, of which `steps` are decode steps and up to 2,048 the prompt's.
    number : int
        Of the layer: methods may attend densely in the first ones.
    library : CpuLibrary or None
        Compiled kernels; None runs the method's reference.

    Attributes
    ----------
    prompt : int
        Tokens before the first decode step.
    length : int
        Tokens of the retrieval region; it begins behind the sink.
    """

    def __init__(
        self, layer: CapturedLayer, number: int, steps: int, variant: Variant, library: CpuLibrary | None = None
    ) -> None:
        self.layer, self.cache = layer, variant.cache
        self.prompt = layer.keys.shape[1] - steps
        self.length = self.prompt - self.cache.sink - self.cache.local
        _check(self.cache, layer.keys.shape[1], steps, self.length)
        self.scaling = layer.scaling
        kv_heads, _, dim = layer.keys.shape
        extents = ExtentTable(1, extents_for(self.length), extents_for(self.length))
        extents.reserve(0, self.length)
        self.pool = torch.zeros(extents.capacity, kv_heads, EXTENT_TOKENS, 2, dim)
        settings, entry = variant.settings, variant.entry
        self.index = entry.create(
            IndexContext(
                layer=number,
                num_heads=layer.queries.shape[0],
                num_kv_heads=kv_heads,
                head_dim=dim,
                scaling=layer.scaling,
                config=settings,
                codebooks=entry.traits(settings).codebooks(dim),
                extents=extents,
                lengths=[self.length],
                dtype=torch.float32,
                device=torch.device("cpu"),
                library=library,
                rows=LayerRows(self.pool, self.pool.data_ptr(), self.pool.stride(0)),
            )
        )
        self._steps = 0
        self._prefill(layer.queries[:, : layer.queries.shape[1] - steps][:, -LAST_QUERIES:])

    @property
    def region(self) -> Tensor:
        """Keys of the retrieval region by token, [G, n, D]."""
        return self.layer.keys[:, self.cache.sink : self.cache.sink + self.length]

    def step(self, query: Tensor) -> Tensor:
        """Select for a decode step's query [H, D], then let the index do its upkeep.

        Returns
        -------
        Tensor, bool [G, n]
            Tokens of the retrieval region that were selected.
        """
        chosen = self.places(query)
        held = self.tokens_by_place()
        self._steps += 1
        self.index.refresh([0])
        return torch.zeros_like(chosen).scatter_(1, held, chosen)

    def places(self, query: Tensor) -> Tensor:
        """Places that the index selects for a decode step's query [H, D], bool [G, n]; no step is counted."""
        batch = batch_of(self.index, position=self.prompt + self._steps)
        selection = self.index.select(query[None], batch)
        if selection is None:
            return torch.ones(self.index.context.num_kv_heads, self.length, dtype=torch.bool)
        return membership(selection.rows[0], self.length)

    def region_weights(self, query: Tensor, step: int) -> Tensor:
        """Attention of decode step `step`'s query [H, D] on the retrieval region by token, [G, g, n]; softmax over all tokens."""
        keys = self.layer.keys[:, : self.prompt + step + 1]  # a query attends to its own token, and to none after it
        grouped = query.view(keys.shape[0], -1, query.shape[-1])
        weights = (grouped @ keys.transpose(1, 2) * self.scaling).softmax(dim=-1)
        return weights[:, :, self.cache.sink : self.cache.sink + self.length]

    def tokens_by_place(self) -> Tensor:
        """Token of the retrieval region that each place holds now, int64 [G, n]."""
        return self.index.context.extents.read(self.pool, 0, self.length)[:, :, 1, 0].long()

    def _prefill(self, queries: Tensor) -> None:
        keys, index = self.region, self.index
        tokens = torch.arange(self.length).expand(keys.shape[0], -1)
        work = index.build(0, keys.contiguous(), queries.contiguous())
        rows = torch.zeros(keys.shape[0], self.length, 2, keys.shape[2])
        rows[:, :, 0], rows[:, :, 1, 0] = keys, tokens.float()
        index.context.extents.write(self.pool, 0, 0, rows)
        if work is not None:
            work.wait()


def _check(cache: CacheConfig, tokens: int, steps: int, length: int) -> None:
    if tokens >= EXACT_TOKENS:
        raise ConfigError(f"--context = {tokens}: must be below {EXACT_TOKENS}; token numbers lie in float32 rows")
    if not 1 <= steps <= cache.update:
        limit = f"between 1 and cache.update = {cache.update}, so that nothing leaves the window"
        raise ConfigError(f"--queries = {steps}: must be {limit}; 32 is the default")
    if length < 1:
        least = cache.sink + cache.local + steps + 1
        raise ConfigError(f"--context = {tokens}: must be at least {least} (sink, local window, queries); raise it")


def membership(rows: Tensor, n: int) -> Tensor:
    """Which of n positions are among rows [G, entries], where -1 is none: bool [G, n]."""
    found = torch.zeros(rows.shape[0], n + 1, dtype=torch.bool, device=rows.device)
    return found.scatter_(1, torch.where(rows < 0, n, rows).long(), True)[:, :n]
