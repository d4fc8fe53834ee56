"""What a layer computes besides products, selection and attention, by compiled kernels: all that is the same on both devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.core.rope import Rotation

from .arguments import checked_address
from .reference.delta_net import delta_step

if TYPE_CHECKING:
    from kvseek.core.batch import Batch
    from kvseek.core.model_config import ModelConfig

    from .reference.delta_net import DeltaParameters, DeltaStates


class CompiledOperations(ABC):
    """The compiled operations of one model; TorchOperations of engine/model/reference.py says what each does.

    Tensors are contiguous, on the device and of the engine's dtype, but for rotations. Arithmetic is in float32, rounded once
    where a value is stored.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self._head_sizes = {"heads": model.num_heads, "kv_heads": model.num_kv_heads}
        self._centre = float(model.centred_norms)  # added to the weights of norms

    @abstractmethod
    def _run(self, kernel: str, rows: int, **arguments: float) -> None:
        """Run one of the kernels add_rms_norm, rope_append, rope_prompt and silu_mul on so many rows."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._run(
            "add_rms_norm",
            x.shape[0],
            x=self._address("x", x),
            delta=self._address("delta", delta),
            weight=self._address("weight", weight),
            out=out.data_ptr(),
            hidden=x.shape[1],
            epsilon=self.model.rms_norm_eps,
            centre=self._centre,
        )
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
        return self._rotate(
            "rope_append",
            qkv,
            rotation,
            q_norm,
            k_norm,
            requests=self._address("requests", batch.requests, torch.int32),
            window=self._address("window", window),
            window_rows=window.shape[2],
        )

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
        """See TorchOperations.

        The tokens of a KV head follow each other in `keys` and `values`; the KV heads of both are equally far apart.
        """
        distance, rest = divmod(keys.stride(0), self.model.head_dim)
        if rest or keys.stride() != values.stride():
            raise KernelError(
                f"strides of keys, values = {keys.stride()}, {values.stride()}: must be the same, and a multiple of "
                f"{self.model.head_dim} from one KV head to the next"
            )
        offset = start * self.model.head_dim * qkv.element_size()
        return self._rotate(
            "rope_prompt",
            qkv,
            rotation,
            q_norm,
            k_norm,
            keys=self._address("keys", keys[0]) + offset,
            values=self._address("values", values[0]) + offset,
            distance=distance,
        )

    def _rotate(
        self,
        kernel: str,
        qkv: Tensor,
        rotation: Rotation,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        **targets: int,
    ) -> Tensor:
        queries = qkv.new_empty(qkv.shape[0], self.model.num_heads, self.model.head_dim)
        self._run(
            kernel,
            qkv.shape[0],
            qkv=self._address("qkv", qkv),
            cosines=self._address("cosines", rotation[0], torch.float32),
            sines=self._address("sines", rotation[1], torch.float32),
            q_norm=self._address("q_norm", q_norm),
            k_norm=self._address("k_norm", k_norm),
            queries=queries.data_ptr(),
            epsilon=self.model.rms_norm_eps,
            centre=self._centre,
            numbers=qkv.shape[1],
            **self._head_sizes,
            **targets,
        )
        return queries

    def delta_step(
        self, qkvz: Tensor, ba: Tensor, batch: Batch, parameters: DeltaParameters, states: DeltaStates
    ) -> Tensor:
        return delta_step(qkvz, ba, batch, parameters, states)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._run("silu_mul", rows, gate_up=self._address("gate_up", gate_up), out=out.data_ptr(), intermediate=size)
        return out

    def _address(self, name: str, tensor: Tensor | None, dtype: torch.dtype | None = None) -> int:
        return checked_address(name, tensor, dtype or self.dtype, self.device)
