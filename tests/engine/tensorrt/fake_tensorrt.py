"""A TensorRT module that runs nothing: it records calls, and refuses what the documentation of TensorRT forbids."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256
PROFILE = {"smallest": 1, "best": 2, "largest": 8}


class DataType(enum.Enum):
    FLOAT = 0
    BF16 = 1
    INT32 = 2
    UINT8 = 3


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class Strategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


class ILogger:
    Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3)

    def __init__(self) -> None:
        pass


class Context:
    """An execution context: wants memory, then shapes, then addresses, then a launch, and forgets no shape in between."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.memory: tuple[int, int] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.launches: list[tuple[int, dict[str, int], dict[str, tuple[int, ...]]]] = []

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        self.memory = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.engine.tensors[name][0] is TensorIOMode.INPUT
        self.shapes[name] = shape
        return "set_input_shape" not in self.engine.refuses

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        assert set(self.shapes) == set(self.engine.names(TensorIOMode.INPUT)), "shapes of outputs follow from inputs"
        return (self.shapes["x"][0], *self.engine.tensors[name][2][1:])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory
        assert memory % ALIGNMENT == 0
        self.addresses[name] = memory
        return "set_tensor_address" not in self.engine.refuses

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert self.memory is not None, "a context of its user's memory has none yet"
        assert set(self.shapes) == set(self.engine.names(TensorIOMode.INPUT))
        assert set(self.addresses) == set(self.engine.tensors)
        self.launches.append((stream_handle, dict(self.addresses), dict(self.shapes)))
        return "execute_async_v3" not in self.engine.refuses


class Engine:
    """A plan with input x [n, 4] and output y [n, 3], in float32. `refuses` names methods that fail."""

    def __init__(self, name: str = "segment_0", memory: int = 1000, refuses: tuple[str, ...] = ()) -> None:
        self.name, self.device_memory_size_v2, self.refuses = name, memory, refuses
        self.tensors: dict[str, tuple[TensorIOMode, DataType, tuple[int, ...]]] = {
            "x": (TensorIOMode.INPUT, DataType.FLOAT, (-1, 4)),
            "y": (TensorIOMode.OUTPUT, DataType.FLOAT, (-1, 3)),
        }
        self.contexts: list[Context] = []

    def names(self, mode: TensorIOMode) -> list[str]:
        return [name for name, (own, _, _) in self.tensors.items() if own is mode]

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self.tensors[name][0]

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.tensors[name][1]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        assert self.tensors[name][0] is TensorIOMode.INPUT, "profiles are about inputs"
        assert profile_index == 0
        return [[size, *self.tensors[name][2][1:]] for size in PROFILE.values()]

    def create_execution_context(self, strategy: Strategy) -> Context | None:
        assert strategy is Strategy.USER_MANAGED
        if "create_execution_context" in self.refuses:
            return None
        self.contexts.append(Context(self))
        return self.contexts[-1]


class FakeTensorRt:
    """The module. Its runtime takes the engines of `engines` for the contents of files, by their bytes."""

    ILogger, ExecutionContextAllocationStrategy = ILogger, Strategy

    def __init__(self, engines: dict[bytes, Engine] | None = None, name: str = "tensorrt_rtx") -> None:
        self.__name__, self.__version__ = name, "1.7.1"
        self.engines = engines or {}
        self.loggers: list[Any] = []

    def Runtime(self, logger: Any) -> FakeTensorRt:
        self.loggers.append(logger)
        return self

    def deserialize_cuda_engine(self, serialized: Any) -> Engine | None:
        engine = self.engines.get(bytes(serialized))
        if engine is None:
            self.loggers[-1].log(ILogger.Severity.ERROR, "not a plan of this GPU")
        return engine


def aligned(*shape: int, dtype: torch.dtype = torch.float32, beyond: int = 0) -> Tensor:
    """A tensor `beyond` bytes after an address that suits TensorRT; memory of the CPU rarely is at one."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros(size + 2 * ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT + beyond
    return memory[start : start + size].view(dtype).view(shape)
