"""The decoder that is written as TensorRT networks, evaluated in NumPy, against transformers on the same weights."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.builder.tensorrt.network_interpreter import Array, evaluate, rounded
from tests.engine.model.test_logits import ROPE, load_transformers
from tests.support.random_models import ARCHITECTURES, save_random_model

from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import weight_reader
from kvseek.builder.tensorrt.graph import Graph
from kvseek.builder.tensorrt.network import NetworkWriter
from kvseek.core.model_config import ModelConfig
from kvseek.core.tensorrt_api import logger
from kvseek.engine.model.reference import causal_attention

api = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13")

MAX_DIFFERENCE = 1e-3
MAX_POSITIONS = 256
TOKENS, CHUNK = 60, 45  # the second call, of 15 tokens, attends to rows of the first


class Segments:
    """Segments of a checkpoint and the rows of their attention, which is the engine's own."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        checkpoint = open_checkpoint(model)
        self.model: ModelConfig = checkpoint.config
        self.dtype = dtype
        builder, weights = api.Builder(logger(api)), weight_reader(checkpoint, dtype)
        self.decoder = NetworkWriter(api, builder, self.model, MAX_POSITIONS, dtype, weights)
        self.graphs: list[Graph] = []
        self.decoder.write_segments(self.graphs.append)
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, ids: Array, start: int, rows: Array) -> Array:
        """Logits [rows, vocabulary] of a call with the tokens at positions start, start + 1, ..."""
        positions = np.arange(start, start + len(ids), dtype=np.int32)
        found = self.evaluate(self.graphs[0], {"ids": ids, "positions": positions})
        rotation = {name: found.pop(name) for name in ("cos", "sin")}
        for layer, graph in enumerate(self.graphs[1:]):
            inputs = {"attended": self.attend(layer, found), "hidden": found["next_hidden"]}
            inputs |= {"rows": rows} if layer == self.model.num_layers - 1 else rotation
            found = self.evaluate(graph, inputs)
        assert set(found) == {"logits"}
        return found["logits"]

    def evaluate(self, graph: Graph, inputs: dict[str, Array]) -> dict[str, Array]:
        return evaluate(api, graph.network, inputs, graph._kept)

    def attend(self, layer: int, found: dict[str, Array]) -> Array:
        queries, keys, values = (
            torch.from_numpy(found[x]).float().transpose(0, 1) for x in ("queries", "keys", "values")
        )
        if layer in self.rows:
            keys, values = (torch.cat(pair, dim=1) for pair in zip(self.rows[layer], (keys, values), strict=True))
        self.rows[layer] = keys, values
        out = causal_attention(queries.contiguous(), keys, values, self.model.head_dim**-0.5)
        if self.dtype is torch.bfloat16:
            return rounded(out.numpy())
        return out.to(self.dtype).contiguous().numpy()


IDS = np.arange(TOKENS, dtype=np.int32) * 7 % 100


def reference(model: Path, dtype: torch.dtype = torch.float32) -> Array:
    """Logits of transformers, [tokens, vocabulary], float32."""
    with torch.inference_mode():
        logits = load_transformers(model).to(dtype)(torch.from_numpy(IDS)[None].long()).logits[0]
    return logits.float().numpy()


def differences(model: Path, dtype: torch.dtype, expected: Array) -> Array:
    """From the logits of all tokens, of a prompt in two calls: the first one's, and three rows of the second's."""
    segments = Segments(model, dtype)
    first = segments.run(IDS[:CHUNK], 0, np.arange(CHUNK, dtype=np.int32))
    wanted = np.array([14, 0, 3], dtype=np.int32)
    second = segments.run(IDS[CHUNK:], CHUNK, wanted)
    return np.concatenate([first - expected[:CHUNK], second - expected[CHUNK:][wanted]])


def compare(model: Path, dtype: torch.dtype = torch.float32, limit: float = MAX_DIFFERENCE) -> None:
    assert abs(differences(model, dtype, reference(model))).max() <= limit


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_theta": 10000.0, **ROPE[kind]}
    if kind == "longrope":  # EngineConfig refuses a plan that would reach further
        scaling["original_max_position_embeddings"] = MAX_POSITIONS
    compare(save_random_model(tmp_path / "model", "llama", rope_parameters=scaling))


def test_what_the_tiny_models_do_not_show(tmp_path: Path) -> None:
    """Biases of all projections; an epsilon that matters."""
    compare(save_random_model(tmp_path / "model", "llama", attention_bias=True, mlp_bias=True, rms_norm_eps=0.1))


def test_float16(tmp_path: Path) -> None:
    compare(save_random_model(tmp_path / "model", "qwen3"), torch.float16, 3e-2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16(architecture: str, tmp_path: Path) -> None:
    """As near to float32 as transformers' own bfloat16 is: both round weights and every operation's result.

    Roundings are random, so their mean square over thousands of logits is compared, and the largest one less strictly. The
    network computes norms in float32, as transformers does, and attention here too; so neither has roundings of its own.
    """
    model = save_random_model(tmp_path / "model", architecture)
    exact = reference(model)
    usual, found = reference(model, torch.bfloat16) - exact, differences(model, torch.bfloat16, exact)
    assert root(found) <= 1.1 * root(usual)
    assert abs(found).max() <= 2 * abs(usual).max()


def root(values: Array) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def test_whole_network_is_the_segments(tmp_path: Path) -> None:
    """Both forms are one computation: with an attention that gives back its queries they agree to the last bit."""
    segments = Segments(save_random_model(tmp_path / "model", "qwen2"))
    segments.attend = lambda layer, found: found["queries"]  # type: ignore[method-assign]
    ids, positions = np.arange(9, dtype=np.int32), np.arange(30, 39, dtype=np.int32)
    rows = np.array([8], dtype=np.int32)
    whole = segments.decoder.write_whole(lambda graph, layer, queries, keys, values: queries)
    found = evaluate(api, whole.network, {"ids": ids, "positions": positions, "rows": rows})
    assert np.array_equal(found["logits"], segments.run(ids, 30, rows))
    assert tied_constants(whole.network) == 1


def test_segments_are_in_memory_one_at_a_time(tmp_path: Path) -> None:
    segments = Segments(save_random_model(tmp_path / "model", "llama"))
    segments.graphs.clear()
    alive: list[weakref.ref[Graph]] = []

    def consume(graph: Graph) -> None:
        assert [other().network.name for other in alive if other() is not None] == []
        alive.append(weakref.ref(graph))

    segments.decoder.write_segments(consume)
    assert len(alive) == segments.model.num_layers + 1


def tied_constants(network: Any) -> int:
    """Constants of the embedding's shape."""
    layers = [network.get_layer(number) for number in range(network.num_layers)]
    return sum(layer.type.name == "CONSTANT" and tuple(layer.get_output(0).shape) == (384, 192) for layer in layers)
