"""Launches layer.cu: all that a layer computes besides products, selection and attention.

Every function launches on the current stream, can be captured in a CUDA graph, allocates the tensors that it returns and
reads nothing back. Tensors are contiguous, on the GPU and of the engine's dtype unless said otherwise. Arithmetic is in
float32, rounded once where a value is stored.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.model_config import ModelConfig
from kvseek.core.rope import Rotation, frequency_sets, pair_factors
from kvseek.kernels.layer import CompiledOperations
from kvseek.kernels.structs import c_struct

if TYPE_CHECKING:
    from kvseek.core.batch import Batch
    from kvseek.core.cuda import CudaKernels
    from kvseek.core.model_config import DeltaNetConfig
    from kvseek.kernels.reference.delta_net import DeltaParameters, DeltaStates

# As in layer.cu.
NORM_THREADS = 512
NORM_PIECES = 4
BEGIN_THREADS = 256
ROPE_WARPS = 4
APPEND_THREADS = 128
SILU_THREADS = 256
DELTA_THREADS, DELTA_ROWS = 512, 32  # as in delta_net.cu
ARGMAX_THREADS = 256

PIECE = 8  # numbers that a thread loads at once
WARP = 32
ALIGNMENT = 16  # bytes: alignment of tensors that a kernel reads in pieces
MAX_HIDDEN = NORM_THREADS * NORM_PIECES * PIECE
MAX_ARGMAX_BLOCKS = 64  # per request: one piece a thread for a vocabulary of 128K

OPERATIONS = {
    "add_rms_norm": c_struct("kernels/cuda/layer/layer.cu", "AddRmsNormArguments"),
    "rope_append": c_struct("kernels/cuda/layer/layer.cu", "RopeAppendArguments"),
    "rope_prompt": c_struct("kernels/cuda/layer/layer.cu", "RopePromptArguments"),
    "silu_mul": c_struct("kernels/cuda/layer/layer.cu", "SiluMulArguments"),
}
StepBeginArguments = c_struct("kernels/cuda/layer/layer.cu", "StepBeginArguments")
DeltaStepArguments = c_struct("kernels/cuda/layer/delta_net.cu", "DeltaStepArguments")
AppendArguments = c_struct("kernels/cuda/layer/layer.cu", "AppendArguments")
ArgmaxArguments = c_struct("kernels/cuda/layer/layer.cu", "ArgmaxArguments")


class LayerKernels(CompiledOperations):
    """The kernels of layer.cu for one model on one GPU: the operations of its layers, and the ends of a decode step.

    Parameters
    ----------
    max_batch : int
        Most requests of a decode step.

    Raises
    ------
    ConfigError
        As `check_sizes`.
    """

    def __init__(
        self, kernels: CudaKernels, model: ModelConfig, dtype: torch.dtype, device: torch.device, max_batch: int
    ) -> None:
        check_sizes(model)
        super().__init__(model, dtype, device)
        self._kernels, self._max_batch = kernels, max_batch
        sets, self._factor = frequency_sets(model)
        self._frequencies = sets.to(device)
        self._factors = pair_factors(self._frequencies, self._factor)
        # Scratch memory of the argmax kernel, which leaves it zero for the next launch.
        self._best = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(max_batch, dtype=torch.int32, device=device)

    def step_begin(self, batch: Batch, embed: Tensor, first: int = 0) -> tuple[Tensor, Rotation]:
        """Compute the embeddings [batch, hidden] of the requests' tokens, from embed [vocabulary, hidden], and their rotation.

        The rows of `embed` are those of tokens `first`, first + 1, …; the embeddings of other tokens are zeros.
        """
        x = embed.new_empty(batch.size, embed.shape[1])
        cosines = torch.empty(batch.size, self.model.head_dim // 2, device=self.device)
        sines = torch.empty_like(cosines)
        arguments = StepBeginArguments(
            requests=self._address("requests", batch.requests, torch.int32),
            latest=self._address("latest", batch.latest, torch.int32),
            embed=self._address("embed", embed),
            frequencies=self._address("frequencies", self._frequencies, torch.float32),
            x=x.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            hidden=embed.shape[1],
            factor=self._factor,
            short_reach=self.model.short_reach,
            first_token=first,
            tokens=embed.shape[0],
        )
        self._launch("kvseek_step_begin", (batch.size, 1, 1), BEGIN_THREADS, arguments)
        return x, (cosines, sines)

    def rotation(self, start: int, stop: int, length: int) -> Rotation:
        """Compute the rotation of positions start .. stop - 1 of a prompt of `length` tokens, as `step_begin` does."""
        own = int(length > self.model.short_reach)
        angles = torch.outer(torch.arange(start, stop, device=self.device).float(), self._frequencies[own])
        return angles.cos() * self._factors[own], angles.sin() * self._factors[own]

    def add(self, x: Tensor, delta: Tensor) -> None:
        """Add `delta` to x [rows, hidden] in place."""
        x += delta

    def delta_step(
        self, qkvz: Tensor, ba: Tensor, batch: Batch, parameters: DeltaParameters, states: DeltaStates
    ) -> Tensor:
        config = parameters.config
        columns = -(-config.value_head_dim // WARP) * WARP
        segments = DELTA_THREADS // columns
        out = qkvz.new_empty(batch.size, config.values)
        arguments = DeltaStepArguments(
            qkvz=self._address("qkvz", qkvz),
            ba=self._address("ba", ba),
            requests=self._address("requests", batch.requests, torch.int32),
            weight=self._address("conv", parameters.conv),
            a_log=self._address("a_log", parameters.a_log, torch.float32),
            dt=self._address("dt", parameters.dt, torch.float32),
            norm=self._address("norm", parameters.norm),
            conv=self._address("states.conv", states.conv),
            recurrent=self._address("states.recurrent", states.recurrent, torch.float32),
            out=out.data_ptr(),
            key_heads=config.num_key_heads,
            value_heads=config.num_value_heads,
            key_dim=config.key_head_dim,
            value_dim=config.value_head_dim,
            kernel=config.conv_kernel,
            columns=columns,
            rows=-(-config.key_head_dim // segments),
            epsilon=parameters.epsilon,
        )
        self._launch("kvseek_delta_step", (config.num_value_heads, batch.size, 1), segments * columns, arguments)
        return out

    def append(self, keys: Tensor, values: Tensor, batch: Batch, window: Tensor) -> None:
        """Write keys, which are rotated already, and values [batch, G, D] to a layer's window, as `rope_append` does."""
        shape = (batch.size, self.model.num_kv_heads, self.model.head_dim)
        for name, tensor in (("keys", keys), ("values", values)):
            found = (tuple(tensor.shape), tensor.data_ptr() % ALIGNMENT)
            if found != (shape, 0):
                raise KernelError(
                    f"append: shape of {name}, bytes beyond a multiple of {ALIGNMENT} = {found}: must be {(shape, 0)}; "
                    "give one row of whole tensors per request"
                )
        arguments = AppendArguments(
            keys=self._address("keys", keys),
            values=self._address("values", values),
            requests=self._address("requests", batch.requests, torch.int32),
            window=self._address("window", window),
            kv_heads=self.model.num_kv_heads,
            window_rows=window.shape[2],
        )
        self._launch("kvseek_append", (batch.size, 1, 1), APPEND_THREADS, arguments)

    def argmax(self, logits: Tensor, step: Batch | None = None) -> Tensor:
        """Find the index of each row's largest logit, int32 [batch], in logits [batch, vocabulary].

        Of equal logits the lowest index is taken; -1 stands where the largest logit is not finite. If `step` has `latest`, the
        tokens go there as well.
        """
        batch, vocabulary = logits.shape
        if batch > self._max_batch:
            raise KernelError(
                f"argmax: batch = {batch}: must be <= {self._max_batch}, what the kernels were set up for"
            )
        tokens = torch.empty(batch, dtype=torch.int32, device=self.device)
        arguments = ArgmaxArguments(
            logits=self._address("logits", logits),
            best=self._best.data_ptr(),
            arrived=self._arrived.data_ptr(),
            tokens=tokens.data_ptr(),
            requests=0 if step is None else self._address("requests", step.requests, torch.int32),
            latest=0 if step is None else self._address("latest", step.latest, torch.int32),
            vocabulary=vocabulary,
        )
        blocks = min(MAX_ARGMAX_BLOCKS, -(-vocabulary // (PIECE * ARGMAX_THREADS)))
        self._launch("kvseek_argmax", (blocks, batch, 1), ARGMAX_THREADS, arguments)
        return tokens

    def _run(self, kernel: str, rows: int, **arguments: float) -> None:
        given = OPERATIONS[kernel](**arguments)
        if kernel == "add_rms_norm":
            blocks, threads = 1, norm_threads(given.hidden)
        elif kernel == "silu_mul":
            blocks, threads = -(-given.intermediate // (PIECE * SILU_THREADS)), SILU_THREADS
        else:
            blocks, threads = -(-(given.heads + 2 * given.kv_heads) // ROPE_WARPS), ROPE_WARPS * WARP
        self._launch(f"kvseek_{kernel}", (rows, blocks, 1), threads, given)

    def _launch(self, name: str, grid: tuple[int, int, int], threads: int, arguments: ctypes.Structure) -> None:
        self._kernels.launch(name, grid, threads, arguments, overlap=True)  # all of them follow overlap.cuh


def norm_threads(hidden: int) -> int:
    """Return the threads of a block that normalises a row of `hidden` numbers: whole warps."""
    return min(NORM_THREADS, -(-hidden // (PIECE * WARP)) * WARP)


def check_sizes(model: ModelConfig) -> None:
    """Raise ConfigError unless the kernels support the model's sizes: multiples of PIECE, hidden_size up to MAX_HIDDEN."""
    for name, value in {"hidden_size": model.hidden_size, **model.mlp_sizes}.items():
        if value % PIECE:
            raise ConfigError(f"{name} = {value}: must be a multiple of {PIECE} on a GPU; build with --device cpu")
    if model.delta_net is not None:
        _check_states(model.delta_net)
    if model.hidden_size > MAX_HIDDEN:
        raise ConfigError(
            f"hidden_size = {model.hidden_size}: must be <= {MAX_HIDDEN} on a GPU; build with --device cpu"
        )


def _check_states(config: DeltaNetConfig) -> None:
    """Raise ConfigError unless a block's threads hold the state of a head, and products can read the heads' outputs."""
    if config.values % PIECE:
        raise ConfigError(
            f"delta_net: num_value_heads * value_head_dim = {config.values}: must be a multiple of {PIECE} on a GPU; build with "
            "--device cpu"
        )
    columns = -(-config.value_head_dim // WARP) * WARP
    if columns > DELTA_THREADS or config.key_head_dim > DELTA_THREADS // columns * DELTA_ROWS:
        raise ConfigError(
            f"delta_net: key_head_dim, value_head_dim = {config.key_head_dim}, {config.value_head_dim}: must have at most "
            f"{DELTA_THREADS * DELTA_ROWS} numbers together on a GPU, as 128 x 128 have; build with --device cpu"
        )
