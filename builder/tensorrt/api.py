"""What the builder uses of TensorRT's Python API, which `tensorrt` and `tensorrt_rtx` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from kvseek.core.tensorrt_api import Logging, import_tensorrt


class ITensor(Protocol):
    """A tensor of a network; dimensions that profiles set are -1."""

    name: str

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...

    def set_dimension_name(self, index: int, name: str) -> None: ...

    def get_dimension_name(self, index: int) -> str: ...


class ILayer(Protocol):
    """A layer of a network."""

    name: str

    def get_output(self, index: int) -> ITensor: ...

    def set_input(self, index: int, tensor: ITensor) -> None: ...


class Network(Protocol):
    """INetworkDefinition. Its methods return None if TensorRT refuses the arguments; the logger is told why."""

    name: str
    num_inputs: int
    num_outputs: int

    def get_input(self, index: int) -> ITensor: ...

    def get_output(self, index: int) -> ITensor: ...

    def add_input(self, name: str, dtype: Any, shape: Sequence[int]) -> ITensor | None: ...

    def mark_output(self, tensor: ITensor) -> None: ...

    def add_constant(self, shape: Sequence[int], weights: Any) -> ILayer | None: ...

    def add_gather(self, input: ITensor, indices: ITensor, axis: int) -> ILayer | None: ...

    def add_elementwise(self, input1: ITensor, input2: ITensor, op: Any) -> ILayer | None: ...

    def add_unary(self, input: ITensor, op: Any) -> ILayer | None: ...

    def add_activation(self, input: ITensor, type: Any) -> ILayer | None: ...

    def add_reduce(self, input: ITensor, op: Any, axes: int, keep_dims: bool) -> ILayer | None: ...

    def add_matrix_multiply(self, input0: ITensor, op0: Any, input1: ITensor, op1: Any) -> ILayer | None: ...

    def add_shuffle(self, input: ITensor) -> Any: ...

    def add_shape(self, input: ITensor) -> ILayer | None: ...

    def add_slice(
        self, input: ITensor, start: Sequence[int], shape: Sequence[int], stride: Sequence[int]
    ) -> ILayer | None: ...

    def add_concatenation(self, inputs: Sequence[ITensor]) -> Any: ...

    def add_cast(self, input: ITensor, to_type: Any) -> ILayer | None: ...


class TensorRt(Logging, Protocol):
    """The module `tensorrt` or `tensorrt_rtx`: its enumerations, and the classes that a build begins with."""

    DataType: Any
    ElementWiseOperation: Any
    UnaryOperation: Any
    ActivationType: Any
    ReduceOperation: Any
    MatrixOperation: Any
    NetworkDefinitionCreationFlag: Any
    BuilderFlag: Any
    ProfilingVerbosity: Any
    Builder: Any
    Weights: Any


def load_tensorrt(name: str) -> TensorRt:
    """The module `tensorrt` or `tensorrt_rtx`, for building; raises as `import_tensorrt` of core/tensorrt_api.py."""
    return cast(TensorRt, import_tensorrt(name))
