"""Evaluates a TensorRT network in NumPy, layer by layer as it was written: what is checked is the network that is built.

Only the layers that the builder writes are known. Strong typing is enforced here too: operands of different types, and a
result whose type or shape is not what TensorRT inferred, are errors.

NumPy has no bfloat16. Its values are float32 here, of a type of its own that keeps them apart, and every layer's result is
rounded to what bfloat16 holds; a matrix product sums in float32 before that, as tensor cores do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


class BFloat16(np.ndarray):  # type: ignore[type-arg]
    """float32 values that bfloat16 holds."""


TYPES = {"FLOAT": np.float32, "BF16": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64}
PAIRWISE = {"SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "DIV": np.divide}


def rounded(values: Array) -> BFloat16:
    """Round float32 values to bfloat16, to nearest and ties to even; PyTorch does the rounding."""
    exact = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return exact.bfloat16().float().numpy().view(BFloat16)


def evaluate(api: Any, network: Any, inputs: dict[str, Array], kept: Sequence[Any] = ()) -> dict[str, Array]:
    """Outputs of a network by name.

    Parameters
    ----------
    api : module
        The one that the network comes from.
    inputs : dict
        An array for each of the network's inputs, and no other.
    kept : sequence of Tensor
        What the network's constants were made of, in order: TensorRT shows nobody those in bfloat16. Not needed without.
    """
    declared = [network.get_input(number) for number in range(network.num_inputs)]
    assert {tensor.name for tensor in declared} == set(inputs)
    for tensor in declared:
        check(tensor, inputs[tensor.name])
    values, memory = dict(inputs), iter(kept)
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        kind = layer.type.name  # before the class is set: IActivationLayer has another `type`
        layer_class, operation = LAYERS[kind]
        layer.__class__ = getattr(api, layer_class)  # get_layer gives the base class, which has no parameters
        operands = [layer.get_input(index) for index in range(layer.num_inputs)]
        arrays = [values[operand.name] if operand is not None else None for operand in operands]
        if kind == "CONSTANT" and kept:
            arrays = [next(memory)]
        with np.errstate(over="ignore"):
            result = np.asarray(operation(layer, *arrays))
        if layer.get_output(0).dtype.name == "BF16":
            result = rounded(result)
        check(layer.get_output(0), result)
        values[layer.get_output(0).name] = result
    assert next(memory, None) is None, "the network has other constants"
    return {network.get_output(n).name: values[network.get_output(n).name] for n in range(network.num_outputs)}


def check(tensor: Any, value: Array) -> None:
    """Fail unless the value has the tensor's type and shape."""
    assert value.dtype == TYPES[tensor.dtype.name], tensor.name
    assert isinstance(value, BFloat16) == (tensor.dtype.name == "BF16"), tensor.name
    shape = tuple(tensor.shape)
    assert len(shape) == value.ndim, tensor.name
    assert all(size in (-1, found) for size, found in zip(shape, value.shape, strict=True)), (tensor.name, value.shape)


def constant(layer: Any, memory: torch.Tensor | None = None) -> Array:
    found, sizes = layer.weights, tuple(layer.shape)
    if isinstance(found, np.ndarray):
        assert memory is None or np.array_equal(found, memory.flatten().numpy())
        return np.array(found).reshape(sizes)
    assert memory is not None, "bfloat16 needs `kept`"
    assert (found.dtype.name, found.size, memory.dtype) == ("BF16", memory.numel(), torch.bfloat16)
    return memory.float().numpy().reshape(sizes)


def gather(layer: Any, table: Array, indices: Array) -> Array:
    assert layer.mode.name == "DEFAULT"
    assert layer.num_elementwise_dims == 0
    assert indices.min() >= 0  # NumPy would count from the end
    return table.take(indices, axis=layer.axis)


def elementwise(layer: Any, a: Array, b: Array) -> Array:
    assert a.dtype == b.dtype
    assert a.ndim == b.ndim
    return PAIRWISE[layer.op.name](a, b)


def unary(layer: Any, x: Array) -> Array:
    assert layer.op.name == "SQRT"
    return np.sqrt(x)


def activation(layer: Any, x: Array) -> Array:
    assert layer.type.name == "SIGMOID"
    one = x.dtype.type(1)
    return one / (one + np.exp(-x))


def reduce(layer: Any, x: Array) -> Array:
    assert layer.op.name == "AVG"
    axes = tuple(axis for axis in range(x.ndim) if layer.axes >> axis & 1)
    return x.mean(axis=axes, keepdims=layer.keep_dims)


def matrix_multiply(layer: Any, a: Array, b: Array) -> Array:
    assert a.dtype == b.dtype
    operands = []
    for operand, operation in ((a, layer.op0.name), (b, layer.op1.name)):
        assert operation in ("NONE", "TRANSPOSE")
        operands.append(operand.swapaxes(-1, -2) if operation == "TRANSPOSE" else operand)
    return np.matmul(*operands)


def shuffle(layer: Any, x: Array) -> Array:
    assert list(layer.first_transpose)[: x.ndim] == list(range(x.ndim))
    sizes = list(layer.reshape_dims)
    assert list(layer.second_transpose)[: len(sizes)] == list(range(len(sizes)))
    if layer.zero_is_placeholder:
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def shape(layer: Any, x: Array) -> Array:
    return np.array(x.shape, dtype=np.int64)


def slice_(layer: Any, x: Array, start: Array | None = None, sizes: Array | None = None) -> Array:
    assert start is None
    assert layer.mode.name == "STRICT_BOUNDS"
    assert all(step == 1 for step in layer.stride)
    extents = layer.shape if sizes is None else sizes.tolist()
    ranges = [slice(first, first + extent) for first, extent in zip(layer.start, extents, strict=True)]
    part = x[tuple(ranges)]
    assert part.shape == tuple(extents)  # NumPy would cut short what reaches beyond the end
    return part


def concatenation(layer: Any, *parts: Array) -> Array:
    assert len({part.dtype for part in parts}) == 1
    return np.concatenate(parts, axis=layer.axis)


def cast(layer: Any, x: Array) -> Array:
    return x.astype(TYPES[layer.to_type.name])


LAYERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "CONSTANT": ("IConstantLayer", constant),
    "GATHER": ("IGatherLayer", gather),
    "ELEMENTWISE": ("IElementWiseLayer", elementwise),
    "UNARY": ("IUnaryLayer", unary),
    "ACTIVATION": ("IActivationLayer", activation),
    "REDUCE": ("IReduceLayer", reduce),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", matrix_multiply),
    "SHUFFLE": ("IShuffleLayer", shuffle),
    "SHAPE": ("IShapeLayer", shape),
    "SLICE": ("ISliceLayer", slice_),
    "CONCATENATION": ("IConcatenationLayer", concatenation),
    "CAST": ("ICastLayer", cast),
}
