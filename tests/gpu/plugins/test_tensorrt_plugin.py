"""The attention plugin on device memory: addresses and a raw stream's handle in, the engine's attention out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tensorrt_stand_ins import DataType, PluginTensorDesc, stand_in_tensorrt
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.engine.model.library_attention import causal_attention_device
from kvseek.plugins.tensorrt.fields import AttentionFields
from kvseek.plugins.tensorrt.plugin import register, serving
from kvseek.plugins.tensorrt.tensors import ELEMENTS, device_tensor

pytestmark = pytest.mark.gpu

API = stand_in_tensorrt()
HEADS, KV_HEADS, DIM = 8, 2, 64
TOKENS = 300


class Layer:
    """A plugin of a layer and device memory for it, called as TensorRT calls it."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        packed = AttentionFields(7, HEADS, KV_HEADS, DIM, dtype).packed(API)
        self.plugin: Any = register(API).create_plugin("attention", packed.collection, API.TensorRTPhase.RUNTIME)
        heads, element = (HEADS, KV_HEADS, KV_HEADS, HEADS), ELEMENTS[dtype]
        self.tensors = [torch.empty(TOKENS, count, DIM, dtype=element.torch, device=device) for count in heads]
        self.descriptions = [PluginTensorDesc(tuple(x.shape), DataType[element.tensorrt]) for x in self.tensors]
        self.fill(1)

    def fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        for tensor in self.tensors[:3]:
            tensor.copy_(torch.randn(tensor.shape))
        self.tensors[3].fill_(-9)

    def enqueue(self, stream: int) -> None:
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        own = self.descriptions
        self.plugin.enqueue(own[:3], own[3:], addresses[:3], addresses[3:], 0, stream)

    def expected(self) -> Tensor:
        return attention(*self.tensors[:3])


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The torch runtime's attention of a prompt, [T, H, D]."""
    parts = (x.transpose(0, 1).contiguous() for x in (queries, keys, values))
    return causal_attention_device(*parts, scaling=DIM**-0.5)


def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    assert layer == 7
    out.copy_(attention(queries, keys, values))


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_attention_of_the_engine(dtype: str, device: torch.device) -> None:
    layer, stream = Layer(dtype, device), torch.cuda.Stream(device)
    expected = layer.expected()
    torch.cuda.synchronize(device)
    seen: list[int] = []

    def noting(number: int, *tensors: Tensor) -> None:
        seen.append(torch.cuda.current_stream(device).cuda_stream)
        assert [x.data_ptr() for x in tensors] == [x.data_ptr() for x in layer.tensors]
        assert {x.device for x in tensors} == {device}
        attend(number, *tensors)

    before = torch.cuda.current_stream(device)
    with serving(noting):
        layer.enqueue(stream.cuda_stream)
    assert seen == [stream.cuda_stream]
    assert torch.cuda.current_stream(device) == before
    stream.synchronize()
    assert torch.equal(layer.tensors[3], expected)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_in_a_cuda_graph(dtype: str, device: torch.device) -> None:
    """Captured once and replayed with other inputs in the same memory."""
    layer, stream = Layer(dtype, device), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with serving(attend):
        layer.enqueue(stream.cuda_stream)  # what libraries set up at first must not be captured
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        layer.tensors[3].fill_(-9)
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=stream):
            layer.enqueue(stream.cuda_stream)
    torch.cuda.synchronize(device)
    assert (layer.tensors[3] == -9).all(), "capturing runs nothing"
    for seed in (2, 3):
        layer.fill(seed)
        expected = layer.expected()
        torch.cuda.synchronize(device)
        graph.replay()
        torch.cuda.synchronize(device)
        assert torch.equal(layer.tensors[3], expected)


def test_memory_of_the_device(device: torch.device) -> None:
    memory = torch.arange(24, dtype=torch.float32, device=device)
    view = device_tensor(memory.data_ptr(), (2, 3, 4), "float32")
    assert view.device == device
    assert torch.equal(view, memory.view(2, 3, 4))
    view[1, 2, 3] = -1
    assert memory[23].item() == -1


def test_outside_of_serving(device: torch.device) -> None:
    layer = Layer("bfloat16", device)
    with pytest.raises(KernelError, match="attention of layer 7 is enqueued outside of serving"):
        layer.enqueue(torch.cuda.current_stream(device).cuda_stream)
    assert (layer.tensors[3] == -9).all()
