"""The decoder on a GPU. One decode step is a fixed sequence of launches, so that a CUDA graph can hold it (docs/gpu.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.cuda import CudaKernels
from kvseek.engine.cache.host_cache.device_cache import DeviceCache
from kvseek.plugins.batch import Batch
from kvseek.plugins.contract import DeviceIndex

from .attention import causal_attention_device
from .graphed_decoder import GraphedDecoder
from .graphs import StepResult
from .layer import Layer
from .layer_kernels import Rotation
from .prefill import attend_pieces, pieces_of
from .torch_decoder import Decoder, Stream
from .weight_only_kernels import weight_only_kernels

Marker = Callable[[str], None]
# What `run_layers` tells its marker, in order; those between the first and the last once a layer.
STAGES = ("begin", "norm", "qkv", "rope", "select", "attend", "o", "mlp_norm", "gate_up", "silu", "down", "head")


class DeviceDecoder(GraphedDecoder, Decoder):
    """Runs prompts and decode steps on a GPU with PyTorch and kvseek's kernels.

    Parameters
    ----------
    weights : dict of str to Tensor
        As engine/model/weights.py loads them, on the cache's device and in its dtype.
    hot_rows : bool
        In layers whose rows lie in host memory, keep those of each slot's last step on the device
        (plugins/attention/device.py).
    graphs : bool
        Capture decode steps as CUDA graphs, each when its batch size first comes; False launches kernel by kernel.

    Raises
    ------
    ConfigError
        If max_batch_size exceeds the largest bucket.
    KernelError
        If the kernels do not support a shape of the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: dict[str, Tensor],
        cache: DeviceCache,
        indexes: Sequence[DeviceIndex],
        kernels: CudaKernels,
        *,
        hot_rows: bool = True,
        graphs: bool = True,
    ) -> None:
        Decoder.__init__(self, config, weights, cache, indexes, None, weight_only_kernels(config, kernels))
        self._start_steps(kernels, hot_rows, graphs)

    def _embed(self, ids: Sequence[int]) -> Tensor:
        return F.embedding(self._to_device(ids, torch.int64), self.embed)

    def _rotation(self, start: int, stop: int) -> Rotation:
        return self.ops.rotation(start, stop)

    def prefill_chunk(self, number: int, prompt: Stream, start: int, stop: int, keys: Tensor, values: Tensor) -> Tensor:
        """See LayerwiseDecoder."""
        layer, x = self.layers[number], prompt.residual[start:stop]
        qkv = layer.qkv(self.ops.add_rms_norm(x, None, layer.attention_norm))
        rotation = self._rotation_of(prompt, start, stop)
        q = self.ops.rope_prompt(qkv, rotation, keys, values, start, layer.q_norm, layer.k_norm).transpose(0, 1)
        pieces = pieces_of(prompt.borders, start, stop)
        out = attend_pieces(causal_attention_device, q, keys, values, self.scaling, pieces)
        attended = layer.o(out.flatten(1))
        normed = self.ops.add_rms_norm(x, attended, layer.mlp_norm)
        x += layer.down(self.ops.silu_mul(layer.gate_up(normed)))
        return q

    @torch.inference_mode()
    def run_layers(self, batch: Batch, marker: Marker | None = None) -> StepResult:
        """Launch a decode step on the current stream, kernel by kernel; reads nothing back.

        Parameters
        ----------
        marker : callable, optional
            Called with the name of each stage (STAGES) when its kernels have been launched.
        """
        mark = marker or _no_marker
        x, rotation = self.ops.step_begin(batch, self.embed)
        mark("begin")
        delta: Tensor | None = None
        for number, layer in enumerate(self.layers):
            delta = self._run_layer(number, layer, batch, x, delta, rotation, mark)
        logits = F.linear(self.ops.add_rms_norm(x, delta, self.norm), self.lm_head)
        result = StepResult(logits, self.ops.argmax(logits))
        mark("head")
        return result

    def _run_layer(
        self,
        number: int,
        layer: Layer,
        batch: Batch,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        mark: Marker,
    ) -> Tensor:
        """One layer of a decode step. Adds `delta` and the attention's output to x [batch, hidden]; returns the MLP's."""
        normed = self.ops.add_rms_norm(x, delta, layer.attention_norm)
        mark("norm")
        qkv = layer.qkv(normed)
        mark("qkv")
        window = self.cache.window[number]
        queries = self.ops.rope_append(qkv, batch, rotation, window, layer.q_norm, layer.k_norm)
        mark("rope")
        index = self.indexes[number]
        selection = index.launch_select(queries, batch)
        mark("select")
        out = index.launch_attend(queries, batch, window, selection, self.attentions[number])
        mark("attend")
        attended = layer.o(out.flatten(1))
        mark("o")
        normed = self.ops.add_rms_norm(x, attended, layer.mlp_norm)
        mark("mlp_norm")
        gate_up = layer.gate_up(normed)
        mark("gate_up")
        activated = self.ops.silu_mul(gate_up)
        mark("silu")
        down = layer.down(activated)
        mark("down")
        return down


def _no_marker(stage: str) -> None:
    """Nobody listens."""
