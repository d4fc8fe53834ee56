"""Calls layer.cpp: all that a layer computes on the CPU besides products, selection and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.core.rope import Rotation
from kvseek.kernels.structs import c_struct

if TYPE_CHECKING:
    from kvseek.core.batch import Batch
    from kvseek.core.config import ModelConfig
    from kvseek.core.cpu_library import CpuLibrary

AddRmsNormArguments = c_struct("kernels/cpu/layer/layer.cpp", "AddRmsNormArguments")
RopeAppendArguments = c_struct("kernels/cpu/layer/layer.cpp", "RopeAppendArguments")
RopePromptArguments = c_struct("kernels/cpu/layer/layer.cpp", "RopePromptArguments")
SiluMulArguments = c_struct("kernels/cpu/layer/layer.cpp", "SiluMulArguments")


class NativeOperations:
    """The compiled operations of one model on the CPU; LayerOperations of engine/model/reference/operations.py.

    Tensors are contiguous and of the engine's dtype, but for rotations. Arithmetic is in float32, rounded once where a value is
    stored. To the bit, a row's results depend neither on the other rows nor on the number of threads.

    Parameters
    ----------
    dtype : torch.dtype
        float32 or bfloat16.
    """

    def __init__(self, library: CpuLibrary, model: ModelConfig, dtype: torch.dtype) -> None:
        self._dtype, self._bfloat16, self._epsilon = dtype, dtype is torch.bfloat16, model.rms_norm_eps
        self._heads, self._kv_heads, self._dim = model.num_heads, model.num_kv_heads, model.head_dim
        self._add_rms_norm = library.function("kvseek_add_rms_norm", AddRmsNormArguments)
        self._rope_append = library.function("kvseek_rope_append", RopeAppendArguments)
        self._rope_prompt = library.function("kvseek_rope_prompt", RopePromptArguments)
        self._silu_mul = library.function("kvseek_silu_mul", SiluMulArguments)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See LayerOperations."""
        out = torch.empty_like(x)
        rows, hidden = x.shape
        arguments = AddRmsNormArguments(
            x=self._address("x", x),
            delta=self._address("delta", delta),
            weight=self._address("weight", weight),
            out=out.data_ptr(),
            rows=rows,
            hidden=hidden,
            bfloat16=self._bfloat16,
            threads=torch.get_num_threads(),
            epsilon=self._epsilon,
        )
        self._add_rms_norm(arguments)
        return out

    def rope_append(
        self,
        qkv: Tensor,
        batch: Batch,
        rotation: Rotation,
        window: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        """See LayerOperations."""
        size = qkv.shape[0]
        queries = torch.empty((size, self._heads, self._dim), dtype=self._dtype)
        arguments = RopeAppendArguments(
            qkv=self._address("qkv", qkv),
            requests=self._address("requests", batch.requests, torch.int32),
            cosines=self._address("cosines", rotation[0], torch.float32),
            sines=self._address("sines", rotation[1], torch.float32),
            q_norm=self._address("q_norm", q_norm),
            k_norm=self._address("k_norm", k_norm),
            queries=queries.data_ptr(),
            window=self._address("window", window),
            batch=size,
            heads=self._heads,
            kv_heads=self._kv_heads,
            dim=self._dim,
            window_rows=window.shape[2],
            bfloat16=self._bfloat16,
            threads=torch.get_num_threads(),
            epsilon=self._epsilon,
        )
        self._rope_append(arguments)
        return queries

    def rope_prompt(
        self,
        qkv: Tensor,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        start: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        """See LayerOperations."""
        rows, offset = qkv.shape[0], start * self._dim * qkv.element_size()
        queries = torch.empty((rows, self._heads, self._dim), dtype=self._dtype)
        arguments = RopePromptArguments(
            qkv=self._address("qkv", qkv),
            cosines=self._address("cosines", rotation[0], torch.float32),
            sines=self._address("sines", rotation[1], torch.float32),
            q_norm=self._address("q_norm", q_norm),
            k_norm=self._address("k_norm", k_norm),
            queries=queries.data_ptr(),
            keys=self._address("keys", keys) + offset,
            values=self._address("values", values) + offset,
            rows=rows,
            tokens=keys.shape[1],
            heads=self._heads,
            kv_heads=self._kv_heads,
            dim=self._dim,
            bfloat16=self._bfloat16,
            threads=torch.get_num_threads(),
            epsilon=self._epsilon,
        )
        self._rope_prompt(arguments)
        return queries

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See LayerOperations."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, size), dtype=self._dtype)
        arguments = SiluMulArguments(
            gate_up=self._address("gate_up", gate_up),
            out=out.data_ptr(),
            rows=rows,
            intermediate=size,
            bfloat16=self._bfloat16,
            threads=torch.get_num_threads(),
        )
        self._silu_mul(arguments)
        return out

    def _address(self, name: str, tensor: Tensor | None, dtype: torch.dtype | None = None) -> int:
        """Return the address of a tensor's data, 0 for None; raises KernelError if the kernels cannot read the tensor."""
        if tensor is None:
            return 0
        wanted = dtype or self._dtype
        if tensor.dtype is not wanted or not tensor.is_cpu or not tensor.is_contiguous():
            raise KernelError(
                f"{name}: {tensor.dtype} on {tensor.device}, strides {tensor.stride()}: must be contiguous {wanted} on the "
                "CPU; convert it before the call"
            )
        return tensor.data_ptr()
