"""Memory that an engine needs beside weights, index, windows and rows, in bytes (docs/gpu.md).

They describe the GPU's runtime. For the CPU they are estimates, and high ones: copies that a GPU makes ahead of time are made one
after the other there.
"""

from __future__ import annotations

import torch

from kvseek.core.batch import buckets_for
from kvseek.core.config import EXTENT_TOKENS, STATE_BLOCK, EngineConfig
from kvseek.core.model_config import ModelConfig
from kvseek.core.weight_only import NONE
from kvseek.engine.cache.cache import COPIES_IN_FLIGHT
from kvseek.engine.cache.reuse import reuses_prefixes
from kvseek.engine.cache.row_storage import ROUNDED_AT_ONCE, STAGED_EXTENTS
from kvseek.engine.model.block_sparse import sparse_bytes
from kvseek.engine.model.prompt_windows import (
    BLOCKS_TOGETHER,
    LSE_ELEMENTS,
    filled_up,
    most_blocks,
    most_tokens_beside,
    row_tokens,
    window_tokens,
)
from kvseek.engine.model.reference import MASKED_QUERIES
from kvseek.kernels.reference.delta_net import GROUPS
from kvseek.plugins.contract import LAST_QUERIES
from kvseek.plugins.registry import method_traits

# For memory that cannot be counted: cuBLAS work spaces (32 MiB a stream on Hopper), graphs, blocks that the allocator splits;
# on the CPU the process itself with PyTorch, and a weight on its way to oneDNN's layout.
RESERVE_BYTES = 1 << 30
TOKEN_BYTES = 8  # id and position of a prompt's token, as a plan takes them
LOGITS_BYTES = 4  # a logit, as a plan returns it
SCORE_BYTES = 4  # of a token, in a draw


def prefill_bytes(config: EngineConfig, dtype: torch.dtype, tokens: int) -> int:
    """Return the most bytes that the prefill of a prompt of `tokens` tokens allocates, without the work space of plans."""
    chunk, plans = min(config.prefill_chunk_tokens, tokens), config.runtime == "tensorrt"
    elements = _plans_prefill(config, tokens, chunk) if plans else _torch_prefill(config, dtype, tokens, chunk)
    queries = config.model.num_heads * config.model.head_dim
    elements += 2 * min(LAST_QUERIES, tokens) * queries
    if reuses_prefixes(config):
        elements += _prefix_elements(config, tokens)
    # Behind the last of a layer's tokens (row_tokens).
    elements += 2 * config.model.num_kv_heads * config.model.head_dim * (row_tokens(config, tokens) - tokens)
    if dtype is torch.float32:
        elements += 2 * tokens * queries  # keys and values of every query head (library_attention.py)
        if config.model.window_layers:  # scores of a block, before and after their softmax
            seen = min(tokens, MASKED_QUERIES + (config.model.sliding_window or 0))
            elements += 3 * MASKED_QUERIES * seen * config.model.num_heads
    sparse = sparse_bytes(config, dtype, tokens, chunk) if config.prefill_attention == "block_sparse" else 0
    return elements * dtype.itemsize + TOKEN_BYTES * tokens * plans + sparse + _fp8_bytes(config, tokens)


def _fp8_bytes(config: EngineConfig, tokens: int) -> int:
    """Count the bytes of a layer's keys and values in FP8."""
    tokens = row_tokens(config, tokens)
    return 2 * tokens * config.model.num_kv_heads * config.model.head_dim * (config.prefill_precision == "fp8")


def _torch_prefill(config: EngineConfig, dtype: torch.dtype, tokens: int, chunk: int) -> int:
    """Count the elements that a prefill by PyTorch holds: residual stream, a layer's rows, and the activations of a chunk."""
    model = config.model
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 3 * queries + 2 * keys + 2 * model.hidden_size  # qkv, rotated queries, output; norm and projection
    attention += 3 * queries * model.gated_attention  # gates, their sigmoids, what is multiplied
    states = _state_bytes(config, dtype, chunk) // dtype.itemsize
    mlp = _mlp_elements(model) + 2 * model.hidden_size
    elements = tokens * (model.hidden_size + _row_elements(keys)) + max(
        chunk * attention + _attention_elements(config, tokens, chunk), chunk * mlp, states
    )
    if config.weight_only_precision != NONE:  # the largest matrix, dequantised
        widest, experts = 2 * max(model.mlp_sizes.values()), model.experts
        if experts is not None and config.device == "cuda":  # those of a layer together
            widest = max(widest, 2 * experts.intermediate_size * experts.num_experts)
        of_states = 0 if model.delta_net is None else model.delta_net.channels + model.delta_net.values
        elements += model.hidden_size * max(widest, (1 + model.gated_attention) * queries + 2 * keys, of_states)
    return elements


def _state_bytes(config: EngineConfig, dtype: torch.dtype, chunk: int) -> int:
    """Count the bytes that a Gated DeltaNet layer holds for a chunk, most of which are float32; 0 without such layers.

    A pack may have as many prompts as the batch, each with a block that its tokens do not fill. Only one group of blocks is being
    solved at a time.
    """
    states = config.model.delta_net
    if states is None:
        return 0
    heads, keys, values = states.num_value_heads, states.key_head_dim, states.value_head_dim
    prompts, group = min(config.max_batch_size, chunk), GROUPS[config.device]
    rows = chunk + max(2, prompts) * (STATE_BLOCK - 1)  # one prompt may begin and end within blocks
    convolved = 5 * states.channels * chunk  # inputs, three sums, what silu gives
    each = (
        2 * heads * (2 * keys + values) + 3 * states.values
    )  # those of heads, and in blocks; outputs, joined and in order
    solved = 2 * heads * (3 * keys + values + 3 * STATE_BLOCK) * group * STATE_BLOCK
    kept = (prompts + 2 * group) * states.values * keys  # states of prompts, and those that a group reads and writes
    most = max(convolved, 2 * states.channels * chunk + each * rows + solved + kept)
    narrow = 2 * config.model.hidden_size + states.channels + 2 * states.values
    return narrow * chunk * dtype.itemsize + most * torch.float32.itemsize


def _mlp_elements(model: ModelConfig) -> int:
    """Count the elements of a token within the widest MLP, or the experts that it passes: inputs, gates and ups, outputs, sum."""
    experts = model.experts
    if experts is None:
        return 3 * model.intermediate_size
    each = 3 * experts.intermediate_size + 2 * model.hidden_size
    mixed = (
        experts.num_experts_per_tok * each + 2 * model.hidden_size + 3 * experts.num_experts
    )  # logits, probabilities, places
    shared = 3 * (experts.shared_intermediate_size or 0) + 4 * model.hidden_size
    return max(mixed + shared, 3 * model.mlp_sizes.get("intermediate_size", 0))


def _plans_prefill(config: EngineConfig, tokens: int, chunk: int) -> int:
    """Count the elements that a prefill by plans holds outside of them: tensors between plans, rows, attention's output."""
    model = config.model
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if config.tensorrt.form == "engine":  # in one call: only attention is outside of the plan
        return tokens * (_row_elements(keys) + queries)
    kept = model.hidden_size + queries + model.head_dim  # residual stream, attended, cosines and sines
    made = 3 * queries + 2 * keys + model.hidden_size  # a plan's outputs; attention's output and its contiguous copy
    return tokens * (_row_elements(keys) + kept) + chunk * made + _attention_elements(config, tokens, chunk)


def _attention_elements(config: EngineConfig, tokens: int, chunk: int) -> int:
    """Count the elements that a window's attention holds: queries, keys and values that are filled up, outputs, log-sum-exps."""
    if config.device != "cuda":
        return 0
    blocks, model = most_blocks(tokens, config.max_input_len), config.model
    heads = (blocks + 2 + min(blocks, BLOCKS_TOGETHER)) * model.num_heads + 2 * model.num_kv_heads
    queries = filled_up(min(chunk, window_tokens(config.prefill_chunk_tokens)))
    return queries * (heads * model.head_dim + blocks * model.num_heads * LSE_ELEMENTS)


def _prefix_elements(config: EngineConfig, tokens: int) -> int:
    """Count the elements that reading a prefix adds: keys and values of the next layer, and extents on their way there."""
    keys = config.model.num_kv_heads * config.model.head_dim
    staged = min(tokens, 2 * STAGED_EXTENTS * EXTENT_TOKENS)  # one lot is filled while the kernels of the last one run
    return (tokens + staged) * 2 * keys


def _row_elements(keys: int) -> int:
    """Count the elements per token of a layer's keys and values, and of the copies that wait for the host."""
    return (1 + COPIES_IN_FLIGHT) * 2 * keys


def decode_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes that decode steps hold: logits of all buckets, one layer's activations in the largest, eviction, draws."""
    model = config.model
    sizes = buckets_for(config.max_batch_size) if config.device == "cuda" else (config.max_batch_size,)
    layer = ((2 + 2 * model.gated_attention) * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if model.delta_net is not None:
        layer = max(layer, model.delta_net.channels + 2 * model.delta_net.values)
    if config.runtime == "tensorrt":  # residual stream in and out, cosines and sines, logits as the plan gives them
        layer += 2 * model.hidden_size + model.head_dim + LOGITS_BYTES // dtype.itemsize * model.vocab_size
    else:
        layer += 4 * model.hidden_size + _mlp_elements(model)
    # Keys and values of the evicted rows, and a copy of the keys.
    eviction = 3 * len(model.row_layers) * model.num_kv_heads * config.cache.update * model.head_dim
    logits = sum(sizes) * model.vocab_size
    cold = (
        config.device == "cuda" and method_traits(config).verifies_drafts
    )  # with hot rows; the other memory is shared
    if (
        config.cache.cached_prefill == "sparse" or cold
    ):  # steps that read prompts or verify drafts have logits of their own
        logits *= 2
    # Scores of a draw, and for requests with penalties how often each token has occurred.
    draws = sizes[-1] * model.vocab_size * 2 * SCORE_BYTES if config.device == "cuda" else 0
    return (logits + sizes[-1] * layer + eviction) * dtype.itemsize + draws


def waiting_bytes(config: EngineConfig, dtype: torch.dtype, tokens: int) -> int:
    """Return the bytes that a prompt, or a pack, of `tokens` tokens keeps between its units, while a unit of another one runs."""
    model = config.model
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if config.runtime == "tensorrt":
        if config.tensorrt.form == "engine":
            return 0  # a prompt is one unit, so nothing is kept between units
        return _plans_prefill(config, tokens, 0) * dtype.itemsize + TOKEN_BYTES * tokens
    last = min(tokens, max(LAST_QUERIES, config.prefill_chunk_tokens))  # of a layer's queries, for its index
    elements = tokens * (model.hidden_size + _row_elements(keys)) + last * queries
    elements += 2 * keys * (row_tokens(config, tokens) - tokens)
    elements_bytes = elements * dtype.itemsize + _fp8_bytes(config, tokens)
    return elements_bytes + tokens * model.head_dim * torch.float32.itemsize  # cosines and sines


def work_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the whole work space, for prompts of up to max_input_len tokens.

    One prompt is read at a time, while one of each other kind waits (engine/schedule/reading.py): the longest is longer than
    those of the others.
    """
    pack, beside = min(config.prefill_chunk_tokens, config.max_input_len), most_tokens_beside(config)
    prefills = prefill_bytes(config, dtype, config.max_input_len) + waiting_bytes(config, dtype, pack)
    if beside < config.max_input_len:
        prefills += waiting_bytes(config, dtype, beside)
        prefills += _prefix_elements(config, beside) * dtype.itemsize if reuses_prefixes(config) else 0
    # Rows that are rounded, of a prompt and of an eviction, beside each other.
    rounding = 2 * ROUNDED_AT_ONCE * (torch.float32.itemsize + torch.int8.itemsize)
    return RESERVE_BYTES + prefills + decode_bytes(config, dtype) + rounding * (config.cache.row_dtype == "int8")
