"""Enqueueing the attention plugin without TensorRT or a GPU: memory of the host stands in for that of a device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tensorrt_stand_ins import DataType, PluginTensorDesc, stand_in_tensorrt
from torch import Tensor

from kvseek.core.errors import CapacityError, KernelError
from kvseek.plugins.tensorrt.fields import AttentionFields
from kvseek.plugins.tensorrt.plugin import register, serving
from kvseek.plugins.tensorrt.tensors import ELEMENTS

API = stand_in_tensorrt()
STREAM = 0xC0FFEE
TOKENS, HEADS, KV_HEADS, DIM = 5, 4, 2, 8


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Device memory and streams of the host; gives the handles of the streams that are current, the innermost last."""
    current: list[int] = []

    def as_tensor(memory: Any, device: str) -> Tensor:
        assert device == "cuda"
        described = SimpleNamespace(__array_interface__=memory.__cuda_array_interface__)
        return torch.from_numpy(np.asarray(described))

    @contextlib.contextmanager
    def enter(stream: int) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    return current


def make(layer: int = 3, phase: str = "RUNTIME", dtype: str = "bfloat16") -> Any:
    packed = AttentionFields(layer, HEADS, KV_HEADS, DIM, dtype).packed(API)
    return register(API).create_plugin("attention", packed.collection, API.TensorRTPhase[phase])


def tensors(dtype: str = "bfloat16") -> list[Tensor]:
    """Queries, keys, values and where the result goes."""
    torch.manual_seed(3)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(TOKENS, count, DIM).to(ELEMENTS[dtype].torch) for count in heads]


def enqueue(plugin: Any, own: list[Tensor]) -> None:
    """Call it as TensorRT does: descriptions, addresses and the handle of a stream."""
    kind = DataType[ELEMENTS[plugin.fields.dtype].tensorrt]
    found = [PluginTensorDesc(tuple(tensor.shape), kind) for tensor in own]
    addresses = [tensor.data_ptr() for tensor in own]
    assert plugin.enqueue(found[:3], found[3:], addresses[:3], addresses[3:], 0, STREAM) is None


def test_another_thread_does_not_serve() -> None:
    own, found = tensors(), []

    def run() -> None:
        with pytest.raises(KernelError, match="outside of serving"):
            enqueue(make(), own)
        found.append("refused")

    with serving(ignore):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == ["refused"]


def test_a_builder_may_time_it() -> None:
    """TensorRT times layers while it builds: nothing serves then, and what is in the buffers has no meaning."""
    own = tensors()
    before = [tensor.clone() for tensor in own]
    enqueue(make(phase="BUILD").clone().attach_to_context(None), own)
    assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))


def test_the_innermost_serves() -> None:
    called: list[str] = []

    def note(name: str) -> Any:
        return lambda layer, *tensors: called.append(f"{name} {layer}")

    with serving(note("outer")):
        enqueue(make(0), tensors())
        with serving(note("inner")):
            enqueue(make(1), tensors())
        enqueue(make(2), tensors())
    assert called == ["outer 0", "inner 1", "outer 2"]


def full(layer: int, *tensors: Tensor) -> None:
    raise CapacityError("no rows are left")


def ignore(layer: int, *tensors: Tensor) -> None:
    pass


def swallow(plugin: Any) -> None:
    """What the bindings make of an exception: a message on the standard error, and a bare failure."""
    with contextlib.suppress(CapacityError):
        enqueue(plugin, tensors())


def fail(plugin: Any) -> None:
    """What an engine makes of the failure."""
    swallow(plugin)
    raise KernelError("execution failed")


def test_what_attention_raises_is_not_lost(streams: list[int]) -> None:
    with pytest.raises(CapacityError, match="no rows are left"), serving(full):
        swallow(make())
    with pytest.raises(CapacityError, match="no rows are left") as caught, serving(full):
        fail(make())
    assert isinstance(caught.value.__cause__, KernelError)
    with pytest.raises(CapacityError), serving(full):
        enqueue(make(), tensors())
    with pytest.raises(KernelError, match="outside of serving"):
        enqueue(make(), tensors())


def test_other_errors_pass(streams: list[int]) -> None:
    with pytest.raises(KernelError, match="execution failed"), serving(ignore):
        raise KernelError("execution failed")


def test_an_inner_failure_is_not_the_outer_ones() -> None:
    with serving(ignore):
        with pytest.raises(CapacityError), serving(full):
            swallow(make())
        enqueue(make(), tensors())
