"""Attention in FP8 of a prompt's queries to the tokens before their window, by cuDNN, on Hopper and later GPUs.

cuDNN reads FP8 at 1.5 times the rate of 16 bits. PyTorch does not offer it, so graphs are built by NVIDIA's frontend of cuDNN.
Queries, keys, values, probabilities and outputs are of e4m3, with three bits of fraction; sums and log-sum-exps are float32.

A number of FP8 is as exact, relative to itself, at any scale, but keys of a head have channels in common that are much larger
than what tells keys apart. So the mean of a prompt's first keys is subtracted from all of them, which changes no softmax
(SageAttention, arXiv 2410.02367, section 4.2). Each channel of keys and values has a scale, a power of two that leaves room for
larger ones than the first; queries have the reciprocal of the keys'. Both follow from the prompt's first tokens, so that a row is
rounded alike however the prompt is read. Numbers beyond the room are clipped, of which the log warns once.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import ConfigError
from kvseek.kernels.cuda.attention.fp8_rows import FP8, round_to_fp8

from .prompt_windows import SHORTEST_BLOCK

LARGEST_EXPONENT = 5  # the first rows' largest number becomes 16 to 32: those behind may be 14 times as large
PROBABILITY_SCALE = 256.0  # of probabilities, at most 1: larger ones of e4m3 are normal numbers down to 2^-14
# Tensors of a graph, by number.
FACTORS = "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"
MADE = "o", "stats", "amax_s", "amax_o"
UIDS = {name: number for number, name in enumerate((*"qkv", *FACTORS, *MADE), start=1)}
REMEDY = "pip install 'kvseek[cuda]', or build without --prefill_precision"

logger = logging.getLogger(__name__)


class Fp8Past:
    """Keys and values of a layer of one prompt, rounded to FP8 as far as queries need them; a prompt of one window has none.

    Parameters
    ----------
    attention : Fp8Attention
        What reads them, and is told of numbers too large for FP8.
    spacing : int
        Tokens from a KV head's rows to the next one's, at least the prompt's: few numbers, as cuDNN compiles for each.

    Attributes
    ----------
    keys, values : Tensor, float8_e4m3fn [G, spacing, D]
    centres : Tensor, the model's dtype [G, D]
        What is subtracted from keys.
    query_scales, value_scales : Tensor, float32 [H, D]
        Queries are multiplied by those of their head, outputs by the others.
    """

    keys: Tensor
    values: Tensor
    centres: Tensor
    query_scales: Tensor
    value_scales: Tensor

    def __init__(
        self, kernels: CudaKernels, attention: Fp8Attention, kv_heads: int, group: int, spacing: int, dim: int
    ) -> None:
        self._kernels, self.attention, self._clipped = kernels, attention, attention.clipped
        self._group, self._shape = group, (kv_heads, spacing, dim)
        self._scales: tuple[Tensor, Tensor] | None = None
        self._rounded = 0  # tokens that are

    def extend(self, keys: Tensor, values: Tensor, stop: int) -> None:
        """Round what is not yet of the tokens before `stop`: keys and values [G, n, D] of the whole prompt, as far as it is read.

        The first call, with at least SHORTEST_BLOCK tokens unless a sparse prompt has a smaller budget, fixes the scales.
        """
        if self._scales is None:
            self._scales = self._scale(keys[:, :SHORTEST_BLOCK], values[:, :SHORTEST_BLOCK])
            self.keys, self.values = torch.empty(2, *self._shape, dtype=FP8, device=self._kernels.device)
        if stop <= self._rounded:
            return
        span, (of_keys, of_values) = slice(self._rounded, stop), self._scales
        round_to_fp8(self._kernels, keys[:, span], self.keys[:, span], self._clipped, self.centres, of_keys)
        round_to_fp8(self._kernels, values[:, span], self.values[:, span], self._clipped, None, of_values)
        self._rounded = stop

    def centred(self, keys: Tensor) -> Tensor:
        """Subtract the centres from keys [G, n, D], in their own dtype: what other parts of the same attention read."""
        return keys - self.centres[:, None]

    def rounded(self, queries: Tensor, filled: int) -> Tensor:
        """Round queries [H, q, D], filled up with what nobody reads: float8_e4m3fn [H, filled, D]."""
        heads, q, dim = queries.shape
        found = torch.empty(filled, heads, dim, dtype=FP8, device=queries.device).transpose(0, 1)
        round_to_fp8(self._kernels, queries, found[:, :q], self._clipped, None, self.query_scales)
        return found

    def rounded_samples(self, queries: Tensor) -> Tensor:
        """Round queries [G, r, D], each of any head that has this KV head: float8_e4m3fn [G, r, D]."""
        found = torch.empty_like(queries, dtype=FP8)
        round_to_fp8(self._kernels, queries, found, self._clipped, None, self.query_scales[:: self._group].contiguous())
        return found

    def rounded_blocks(self, queries: Tensor) -> Tensor:
        """Round blocks of queries [b, H, n, D], of which a token's heads are neighbours and all tokens follow each other."""
        number, heads, size, dim = queries.shape
        tokens = queries.transpose(1, 2).reshape(number * size, heads, dim)
        found = self.rounded(tokens.transpose(0, 1), number * size)
        return found.transpose(0, 1).view(number, size, heads, dim).transpose(1, 2)

    def _scale(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.centres = keys.mean(dim=1, dtype=torch.float32).to(keys.dtype)
        of_keys, of_values = _power_of_two(self.centred(keys)), _power_of_two(values)
        self.query_scales, self.value_scales = (
            scales.reciprocal().repeat_interleave(self._group, dim=0) for scales in (of_keys, of_values)
        )
        return of_keys, of_values


def _power_of_two(rows: Tensor) -> Tensor:
    """Return for rows [G, n, D] the powers of two, float32 [G, D], by which a channel's largest number becomes 16 to 32."""
    _, exponent = torch.frexp(rows.abs().amax(dim=1).float())
    # Of zeros, and of what is no number, any will do.
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), (LARGEST_EXPONENT - exponent).clamp(-100, 100))


class Fp8Attention:
    """Attends by cuDNN to all of the keys that it is given, in FP8. A graph is compiled for each combination of sizes.

    Raises
    ------
    ConfigError
        If the frontend is missing, or cuDNN does not take the sizes that it is first asked for.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import cudnn
        except ImportError:
            raise ConfigError(
                f"prefill_precision = 'fp8': needs the package nvidia-cudnn-frontend, which is missing; {REMEDY}"
            ) from None
        self._cudnn, self._device = cudnn, device
        with torch.cuda.device(device):
            self._handle = cudnn.create_handle()
        # With their work spaces: units of prompts follow each other on one stream.
        self._graphs: dict[tuple[Any, ...], tuple[Any, Tensor]] = {}
        self.clipped, self._warned = torch.zeros(1, dtype=torch.int32, device=device), False
        # What cuDNN multiplies with: 1, and the scale of probabilities and its reciprocal. It also wants to tell the largest
        # probability and output.
        self._one, self._scale, self._descale, self._unread = (
            torch.full((1, 1, 1, 1), value, device=device)
            for value in (1.0, PROBABILITY_SCALE, 1 / PROBABILITY_SCALE, 0.0)
        )

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Attend without a mask, on the current stream.

        Parameters
        ----------
        queries : Tensor, float8_e4m3fn [B, H, q, D]
            A batch that is expanded is not copied.
        keys, values : Tensor, float8_e4m3fn [B, G, n, D]

        Returns
        -------
        Outputs, float8_e4m3fn [B, H, q, D] in the values' scale, and log-sum-exps, float32 [B, H, q].
        """
        batch, heads, q, dim = queries.shape
        # A token's heads are neighbours, as they are in `queries`.
        output = torch.empty(batch, q, heads, dim, dtype=FP8, device=self._device).transpose(1, 2)
        lse = torch.empty(batch, heads, q, 1, dtype=torch.float32, device=self._device)
        tensors = queries, keys, values, output, lse
        key = (scaling, *((tuple(one.shape), one.stride()) for one in tensors))
        if key not in self._graphs:
            self._graphs[key] = self._build(tensors, scaling)
        graph, work = self._graphs[key]
        ones = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), self._one)
        given = {
            "q": queries, "k": keys, "v": values, **ones, "descale_s": self._descale, "scale_s": self._scale,
            "o": output, "stats": lse, "amax_s": self._unread, "amax_o": self._unread,
        }  # fmt: skip
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            self._cudnn.set_stream(handle=self._handle, stream=stream.cuda_stream)
            graph.execute({UIDS[name]: one.data_ptr() for name, one in given.items()}, work.data_ptr(), self._handle)
        return output, lse.squeeze(3)

    def warn_of_clipping(self) -> None:
        """Log once if numbers were clipped; waits for the current stream."""
        if not self._warned and self.clipped.item():
            self._warned = True
            logger.warning(
                "prefill_precision = 'fp8' has clipped queries, keys or values of prompts that are too large for FP8: answers "
                "may be wrong; build without it"
            )

    def _build(self, tensors: tuple[Tensor, ...], scaling: float) -> tuple[Any, Tensor]:
        """Compile a graph for tensors of these shapes; returns it with its work space."""
        cudnn = self._cudnn
        fp8, float32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=fp8, intermediate_data_type=float32, compute_data_type=float32, handle=self._handle
        )

        def given(name: str, one: Tensor, dtype: Any) -> Any:
            dim, stride = list(one.shape), list(one.stride())
            return graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype).set_uid(UIDS[name])

        rows = {name: given(name, one, fp8) for name, one in zip("qkv", tensors, strict=False)}
        factors = {name: given(name, self._one, float32) for name in FACTORS}
        made = graph.sdpa_fp8(**rows, **factors, attn_scale=scaling, generate_stats=True, use_causal_mask=False)
        like = tensors[3], tensors[4], self._one, self._one
        for name, found, one in zip(MADE, made, like, strict=True):
            found.set_output(True).set_uid(UIDS[name]).set_dim(list(one.shape)).set_stride(list(one.stride()))
            found.set_data_type(fp8 if name == "o" else float32)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            (queries, keys), reason = (tuple(one.shape) for one in tensors[:2]), str(error).splitlines()[0]
            raise ConfigError(
                f"prefill_precision = 'fp8': cuDNN refuses queries {queries} with keys {keys} ({reason}); build without it"
            ) from None
        size = max(1, graph.get_workspace_size())
        return graph, torch.empty(size, dtype=torch.uint8, device=self._device)
