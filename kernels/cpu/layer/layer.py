"""Calls layer.cpp: all that a layer computes on the CPU besides products, selection and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvseek.kernels.layer import CompiledOperations
from kvseek.kernels.structs import c_struct

if TYPE_CHECKING:
    from kvseek.core.config import ModelConfig
    from kvseek.core.cpu_library import CpuLibrary

ARGUMENTS = {
    "add_rms_norm": c_struct("kernels/cpu/layer/layer.cpp", "AddRmsNormArguments"),
    "rope_append": c_struct("kernels/cpu/layer/layer.cpp", "RopeAppendArguments"),
    "rope_prompt": c_struct("kernels/cpu/layer/layer.cpp", "RopePromptArguments"),
    "silu_mul": c_struct("kernels/cpu/layer/layer.cpp", "SiluMulArguments"),
}


class NativeOperations(CompiledOperations):
    """The compiled operations of one model on the CPU.

    To the bit, a row's results depend neither on the other rows nor on the number of threads.

    Parameters
    ----------
    dtype : torch.dtype
        float32 or bfloat16.
    """

    def __init__(self, library: CpuLibrary, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(model, dtype, torch.device("cpu"))
        self._head_sizes["dim"] = model.head_dim
        self._functions = {name: library.function(f"kvseek_{name}", kind) for name, kind in ARGUMENTS.items()}

    def _run(self, kernel: str, rows: int, **arguments: float) -> None:
        bfloat16, threads = self.dtype is torch.bfloat16, torch.get_num_threads()
        self._functions[kernel](ARGUMENTS[kernel](rows=rows, bfloat16=bfloat16, threads=threads, **arguments))
