"""Runs TensorRT plans on PyTorch's tensors and streams. Nothing here waits for the device.

This relies on features that `tensorrt` 10.13 and `tensorrt_rtx` 1.7 share: contexts without memory of their own
(USER_MANAGED), which `set_device_memory` gives them; calls by tensor names; and that a CUDA graph may capture a call whose
context ran with the same shapes before and is used for nothing else.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvseek.core.errors import EngineDirectoryError, KernelError
from kvseek.core.streams import SideStream, on_default_stream, stream_handle
from kvseek.core.tensorrt_api import TYPE_NAMES, logger, why

ALIGNMENT = 256  # bytes: the alignment that TensorRT demands of tensors and of its work space
OUTSIDE_OF_GRAPHS = 0  # number of the context for calls that no graph captures
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


@dataclass(frozen=True)
class Port:
    """An input or output of a plan.

    Attributes
    ----------
    smallest, largest : tuple of int
        Shapes that the plan's profile admits; () for outputs, whose shapes follow.
    """

    name: str
    dtype: torch.dtype
    smallest: tuple[int, ...] = ()
    largest: tuple[int, ...] = ()

    def admits(self, shape: Sequence[int]) -> bool:
        """Whether an input may have this shape."""
        sizes = zip(self.smallest, shape, self.largest, strict=True)
        return len(shape) == len(self.smallest) and all(low <= size <= high for low, size, high in sizes)


class _Context:
    """An execution context, and the shapes last set for its inputs.

    A shape that has not changed is not set again: setting it could make TensorRT prepare the launch anew, which must not
    happen in a captured call.
    """

    def __init__(self, execution: Any) -> None:
        self.execution = execution
        self._shapes: dict[str, tuple[int, ...]] = {}

    def set_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Set the shape of an input, if it has changed; returns whether TensorRT accepts it."""
        if self._shapes.get(name) == shape:
            return True
        self._shapes.pop(name, None)
        if not self.execution.set_input_shape(name, shape):
            return False
        self._shapes[name] = shape
        return True


class Plan:
    """A deserialised plan and its execution contexts.

    Parameters
    ----------
    memory : Tensor, uint8
        Work space of the contexts. Several plans may share it, because their calls run one after the other.
    side : SideStream
        Stream for calls while the default stream is current, on which TensorRT would make the host wait.
    contexts : sequence of int
        Numbers of the contexts to make. A captured call needs a context of its own, which `run` has used once before.

    Raises
    ------
    KernelError
        If TensorRT cannot make a context, or the plan has a tensor of a dtype that the builder does not use.
    """

    def __init__(self, api: ModuleType, engine: Any, memory: Tensor, side: SideStream, contexts: Sequence[int]) -> None:
        self._api, self._engine, self._memory, self._side = api, engine, memory, side
        self.inputs, self.outputs = self._ports("INPUT"), self._ports("OUTPUT")
        self._contexts = {number: self._create_context() for number in contexts}

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], context: int = OUTSIDE_OF_GRAPHS
    ) -> None:
        """Launch the plan on the current stream; a CUDA graph may capture it.

        Parameters
        ----------
        inputs, outputs : mapping of str to Tensor
            A tensor for each of the plan's inputs and outputs: contiguous, on the work space's device, at an address that is a
            multiple of 256. Outputs are overwritten.
        context : int
            Number of the context that runs the plan.

        Raises
        ------
        KernelError
            If the plan cannot take a tensor, there is no such context, or TensorRT cannot launch the plan.
        """
        if context not in self._contexts:
            numbers = sorted(self._contexts)
            raise KernelError(
                f"plan {self._engine.name}: context = {context}: must be one of {numbers}; load with more"
            )
        own = self._contexts[context]
        for ports, tensors in ((self.inputs, inputs), (self.outputs, outputs)):
            self._check(ports, tensors)
        self._set_shapes(own, inputs, outputs)
        for name, tensor in (*inputs.items(), *outputs.items()):
            self._demand(own.execution.set_tensor_address(name, tensor.data_ptr()), f"take the address of {name}")
        if on_default_stream(self._memory.device):
            self._side.run(lambda: self._enqueue(own.execution)).wait()
        else:
            self._enqueue(own.execution)

    def _ports(self, mode: str) -> dict[str, Port]:
        engine, ports = self._engine, {}
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            if engine.get_tensor_mode(name).name != mode:
                continue
            kind = engine.get_tensor_dtype(name).name
            if kind not in TYPES:
                raise KernelError(
                    f"plan {engine.name}: type of {name} = {kind}: must be one of {', '.join(TYPES)}; build it again"
                )
            shapes: list[tuple[int, ...]] = []
            if mode == "INPUT":  # the only profile has the smallest, best and largest shape
                shapes = [tuple(shape) for shape in engine.get_tensor_profile_shape(name, 0)][::2]
            ports[name] = Port(name, TYPES[kind], *shapes)
        return ports

    def _create_context(self) -> _Context:
        context = self._engine.create_execution_context(self._api.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise self._failed("make an execution context")
        context.set_device_memory(self._memory.data_ptr(), self._memory.nbytes)
        return _Context(context)

    def _check(self, ports: Mapping[str, Port], tensors: Mapping[str, Tensor]) -> None:
        if set(tensors) != set(ports):
            raise KernelError(
                f"plan {self._engine.name}: tensors = {sorted(tensors)}: must be {sorted(ports)}; build the engine again"
            )
        for name, tensor in tensors.items():
            found = (tensor.dtype, tensor.device, tensor.is_contiguous(), tensor.data_ptr() % ALIGNMENT)
            wanted = (ports[name].dtype, self._memory.device, True, 0)
            if found != wanted:
                raise KernelError(
                    f"plan {self._engine.name}: type, device, contiguity and bytes beyond a multiple of {ALIGNMENT} of {name} = "
                    f"{found}: must be {wanted}; convert or copy it before the call"
                )

    def _set_shapes(self, context: _Context, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        for name, tensor in inputs.items():
            shape, port = tuple(tensor.shape), self.inputs[name]
            if not port.admits(shape):
                raise KernelError(
                    f"plan {self._engine.name}: shape of {name} = {shape}: must lie between {port.smallest} and {port.largest}, "
                    "the limits that it was built for; build the engine with limits that hold it"
                )
            self._demand(context.set_shape(name, shape), f"take shape {shape} of {name}")
        for name, tensor in outputs.items():
            shape, wanted = tuple(tensor.shape), tuple(context.execution.get_tensor_shape(name))
            if shape != wanted:
                raise KernelError(
                    f"plan {self._engine.name}: shape of {name} = {shape}: must be {wanted}, by its inputs; give such a tensor"
                )

    def _enqueue(self, context: Any) -> None:
        self._demand(context.execute_async_v3(stream_handle(self._memory.device)), "run")

    def _demand(self, done: bool, what: str) -> None:
        if not done:
            raise self._failed(what)

    def _failed(self, what: str) -> KernelError:
        return KernelError(
            f"plan {self._engine.name} cannot {what} with {why(self._api)}; see docs/tensorrt.md for what has run where"
        )


class Session:
    """The plans of an engine: their weights on the device, and one block of work space for all of their contexts.

    Parameters
    ----------
    files : sequence of Path
        Files of plans that this version of TensorRT built.
    contexts : sequence of int
        Numbers of the contexts that every plan gets.

    Attributes
    ----------
    plans : list of Plan
    memory : Tensor, uint8
        The work space that all contexts share.

    Raises
    ------
    EngineDirectoryError
        If a file cannot be read.
    KernelError
        If TensorRT cannot create its runtime, or cannot load a plan.
    """

    def __init__(self, api: ModuleType, files: Sequence[Path], device: torch.device, contexts: Sequence[int]) -> None:
        self._api = api
        try:
            self._runtime = api.Runtime(logger(api))  # kept: the plans refer to it
        except (TypeError, RuntimeError) as error:  # TypeError: raised by the bindings for a null pointer
            raise KernelError(f"cannot begin to run plans with {why(api)} ({error}); check GPU and driver") from None
        engines = [self._deserialise(file) for file in files]
        most = max(engine.device_memory_size_v2 for engine in engines)
        self.memory = torch.empty(max(most, ALIGNMENT), dtype=torch.uint8, device=device)
        side = SideStream(device)
        self.plans = [Plan(api, engine, self.memory, side, contexts) for engine in engines]

    def _deserialise(self, file: Path) -> Any:
        try:
            # Mapped, not read, so that the weights, possibly gigabytes, go from the file to the device without a copy.
            with file.open("rb") as plan, mmap.mmap(plan.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                engine: Any = self._runtime.deserialize_cuda_engine(mapped)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise EngineDirectoryError(f"cannot read {file}: {error}; build the engine again") from None
        if engine is None:
            raise KernelError(
                f"{file}: {why(self._api)}; a plan runs on the kind of GPU that it was built for: build the engine again for "
                "this one (docs/tensorrt.md)"
            )
        return engine
