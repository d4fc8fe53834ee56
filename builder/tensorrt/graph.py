"""A TensorRT network under construction: the few operations that a decoder is made of, over dynamically many tokens.

Networks are strongly typed: an operation computes in the type of its operands, and a change of type is a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.core.tensorrt_api import TYPE_NAMES, why

# Classes of `tensorrt` and `tensorrt_rtx`, neither of which is imported here. A network's methods return None if TensorRT refuses
# the arguments; the logger is told why.
TensorRt = Any
ITensor = Any
ILayer = Any
Network = Any
WeightSource = Callable[[str], Tensor]
"""Gives a weight of builder/checkpoints/weights.py by its name, in the engine's dtype, on the CPU."""


class Graph:
    """Writes layers into a network, and keeps alive the weights and plugins whose memory the network refers to.

    Parameters
    ----------
    dtype : torch.dtype
        Of weights and activations: float32, bfloat16 or float16.
    weights : callable
        Source of the weights.
    """

    def __init__(self, api: TensorRt, network: Network, dtype: torch.dtype, weights: WeightSource) -> None:
        self.api, self.network, self.dtype = api, network, dtype
        self._source = weights
        self._kept: list[object] = []
        self._weights: dict[str, ITensor] = {}

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int], dimension: str) -> ITensor:
        """Add an input whose first dimension, -1, is called `dimension`: inputs with the same name have the same size."""
        tensor = self.network.add_input(name, self._type(dtype), tuple(shape))
        if tensor is None:
            raise self._refused(f"input {name} {tuple(shape)}")
        tensor.set_dimension_name(0, dimension)
        return tensor

    def output(self, tensor: ITensor, name: str) -> None:
        """Mark a tensor as an output of the network."""
        tensor.name = name
        self.network.mark_output(tensor)

    def constant(self, values: Tensor, name: str) -> ITensor:
        """A constant of any of TYPE_NAMES' types."""
        kept = values.detach().contiguous()
        self._kept.append(kept)  # TensorRT copies no weights: it reads them when the plan is built
        weights = self.api.Weights(self._type(kept.dtype), kept.data_ptr(), kept.numel())
        return self._named(self.network.add_constant(tuple(kept.shape), weights), name)

    def weight(self, name: str, shape: Sequence[int] | None = None) -> ITensor:
        """A weight in the graph's dtype, reshaped if `shape` is given; used twice, it is one constant."""
        if name not in self._weights:
            values = self.weight_values(name)
            self._weights[name] = self.constant(values if shape is None else values.reshape(tuple(shape)), name)
        return self._weights[name]

    def weight_values(self, name: str) -> Tensor:
        """Values of a weight in the graph's dtype, for constants that are made of several."""
        return self._source(name).to(self.dtype)

    def gather(self, table: ITensor, indices: ITensor, name: str) -> ITensor:
        """Rows of a table: [n, ...] and [tokens] to [tokens, ...]."""
        return self._named(self.network.add_gather(table, indices, 0), name)

    def linear(self, x: ITensor, weight: ITensor, name: str) -> ITensor:
        """Multiply x [tokens, n] with the transpose of a weight [m, n]: [tokens, m]."""
        plain, transposed = self.api.MatrixOperation.NONE, self.api.MatrixOperation.TRANSPOSE
        return self._named(self.network.add_matrix_multiply(x, plain, weight, transposed), name)

    def add(self, a: ITensor, b: ITensor, name: str) -> ITensor:
        """a + b of equal ranks, broadcast along dimensions of size 1; so are the other operations on pairs."""
        return self._pairwise(a, b, "SUM", name)

    def subtract(self, a: ITensor, b: ITensor, name: str) -> ITensor:
        """a - b."""
        return self._pairwise(a, b, "SUB", name)

    def multiply(self, a: ITensor, b: ITensor, name: str) -> ITensor:
        """a * b, element by element."""
        return self._pairwise(a, b, "PROD", name)

    def silu(self, x: ITensor, name: str) -> ITensor:
        """x * sigmoid(x)."""
        gate = self._named(self.network.add_activation(x, self.api.ActivationType.SIGMOID), f"{name}.sigmoid")
        return self.multiply(x, gate, name)

    def rms_norm(self, x: ITensor, weight: ITensor, epsilon: float, name: str) -> ITensor:
        """Normalise the last dimension to a mean square of 1 and scale it, in float32; the result is in x's dtype.

        Parameters
        ----------
        weight : ITensor
            float32 of x's rank, broadcast.
        """
        rank = len(x.shape)
        wide = self.cast(x, torch.float32, f"{name}.widen")
        squares = self.multiply(wide, wide, f"{name}.squares")
        average = self.api.ReduceOperation.AVG
        mean = self._named(self.network.add_reduce(squares, average, 1 << (rank - 1), True), f"{name}.mean")
        floor = self.constant(torch.full((1,) * rank, epsilon), f"{name}.epsilon")
        lifted = self.add(mean, floor, f"{name}.lifted")
        root = self._named(self.network.add_unary(lifted, self.api.UnaryOperation.SQRT), f"{name}.root")
        unit = self._pairwise(wide, root, "DIV", f"{name}.unit")
        return self.cast(self.multiply(unit, weight, f"{name}.scaled"), self.dtype, name)

    def reshape(self, x: ITensor, shape: Sequence[int], name: str) -> ITensor:
        """Reshape all dimensions but the first, which holds the tokens: `shape` is that of the others."""
        layer = self.network.add_shuffle(x)
        if layer is None:
            raise self._refused(name)
        layer.reshape_dims = (0, *shape)  # 0 keeps the dimension
        return self._named(layer, name)

    def part(self, x: ITensor, axis: int, start: int, size: int, name: str) -> ITensor:
        """Elements start .. start + size - 1 of an axis other than the first; as many tokens as x has."""
        rest = list(x.shape[1:])
        rest[axis - 1] = size
        starts = [start if dimension == axis else 0 for dimension in range(len(rest) + 1)]
        others = self.constant(torch.tensor(rest, dtype=torch.int64), f"{name}.others")
        sizes = self.join((self._tokens(x, f"{name}.tokens"), others), 0, f"{name}.size")
        layer = self.network.add_slice(x, starts, (0, *rest), (1,) * len(starts))
        if layer is None:
            raise self._refused(name)
        layer.set_input(2, sizes)  # takes the place of the shape above, where the number of tokens cannot be written
        return self._named(layer, name)

    def join(self, parts: Sequence[ITensor], axis: int, name: str) -> ITensor:
        """Concatenate along an axis."""
        layer = self.network.add_concatenation(list(parts))
        if layer is None:
            raise self._refused(name)
        layer.axis = axis
        return self._named(layer, name)

    def cast(self, x: ITensor, dtype: torch.dtype, name: str) -> ITensor:
        """Convert to `dtype`; a tensor of that type is returned as it is."""
        if x.dtype == self._type(dtype):
            return x
        return self._named(self.network.add_cast(x, self._type(dtype)), name)

    def plugin(self, inputs: Sequence[ITensor], plugin: object, name: str) -> ITensor:
        """The one output of a plugin's layer, an IPluginV3; raises KernelError if TensorRT has no plugin layers."""
        add = getattr(self.network, "add_plugin_v3", None)
        if add is None:
            raise KernelError(
                f"layer {name} of network {self.network.name!r}: {self.api.__name__} {self.api.__version__} has no plugin "
                "layers; build with --tensorrt.module tensorrt, or with --tensorrt.form segments"
            )
        self._kept.append(plugin)
        return self._named(add(list(inputs), [], plugin), name)

    def _tokens(self, x: ITensor, name: str) -> ITensor:
        """Size of the first dimension, int64 [1]."""
        shape = self._named(self.network.add_shape(x), f"{name}.shape")
        return self._named(self.network.add_slice(shape, (0,), (1,), (1,)), name)

    def _pairwise(self, a: ITensor, b: ITensor, operation: str, name: str) -> ITensor:
        member = getattr(self.api.ElementWiseOperation, operation)
        return self._named(self.network.add_elementwise(a, b, member), name)

    def _type(self, dtype: torch.dtype) -> object:
        return getattr(self.api.DataType, TYPE_NAMES[dtype])

    def _named(self, layer: ILayer | None, name: str) -> ITensor:
        if layer is None:
            raise self._refused(name)
        layer.name = name
        tensor = layer.get_output(0)
        try:
            len(tensor.shape)  # TensorRT infers it now: here an operand that does not fit is known by its layer
        except (RuntimeError, ValueError):
            raise self._refused(name) from None
        return tensor

    def _refused(self, what: str) -> KernelError:
        return KernelError(
            f"layer {what} of network {self.network.name!r} is refused by {why(self.api)}; install a version that "
            "docs/tensorrt.md names"
        )
