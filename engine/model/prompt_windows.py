"""How prompts are cut for attention on a GPU: sizes on which attention, memory and the rows of a layer agree.

engine/model/cuda/attention.py says why there are windows, blocks and queries that are filled up.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvseek.core.config import EngineConfig

SHORTEST_BLOCK = 2048  # keys; also the shortest window
EQUAL_BLOCK = 8192  # keys of an equal block in prompts of up to MOST_EQUAL of them, and in longer ones more
MOST_EQUAL = 32
BLOCKS_TOGETHER = 16  # most that a call reads
FEWEST_QUERIES = 128  # they are filled up to powers of two from this one, and beyond 512 to multiples of QUERY_STEP
QUERY_STEP = 256
LSE_ELEMENTS = 2  # elements of 16 bits in a log-sum-exp
MOST_TOKENS_BESIDE = 8192  # of a prompt that is read between the units of a longer one, and need not wait for its end


class Blocks(NamedTuple):
    """Blocks of `size` tokens, `number` of them one behind the other from the token `start` on."""

    start: int
    number: int
    size: int


def cut_blocks(rows: Tensor, blocks: Blocks) -> Tensor:
    """View some of the rows [G, n, D] as blocks [number, G, size, D]."""
    start, number, size = blocks
    return rows[:, start : start + number * size].view(len(rows), number, size, -1).transpose(0, 1)


def block_tokens(longest: int) -> int:
    """Return the tokens of an equal block of an engine whose prompts have up to `longest` tokens."""
    return max(EQUAL_BLOCK, power_of_two(longest) // MOST_EQUAL)


def past_blocks(past: int, equal: int, queries: int) -> list[Blocks]:
    """Cut `past` tokens, a multiple of SHORTEST_BLOCK, into blocks of `equal` tokens, and what is left into halves of that.

    What is one call depends on the number of queries: few occupy the GPU only with many blocks.
    """
    blocks, start = list[Blocks](), 0
    while left := past - start:
        size = min(equal, floor_power_of_two(left))
        number = min(BLOCKS_TOGETHER, left // size)
        if queries > 2 * QUERY_STEP:
            number = floor_power_of_two(number)
        blocks.append(Blocks(start, number, size))
        start += number * size
    return blocks


def window_tokens(chunk: int) -> int:
    """Return the tokens of a window of an engine whose chunks have `chunk` tokens: a power of two."""
    return max(SHORTEST_BLOCK, floor_power_of_two(chunk))


def windows(start: int, stop: int, size: int) -> list[tuple[int, int, int]]:
    """Cut tokens start .. stop - 1 at multiples of `size`: of each window its first token, and which of these it has."""
    return [(base, max(base, start), min(base + size, stop)) for base in range(start // size * size, stop, size)]


def most_blocks(tokens: int, longest: int) -> int:
    """Return the most blocks, the window with them, that attention of a prompt of `tokens` tokens is merged of."""
    equal = block_tokens(longest)
    return tokens // equal + (equal // SHORTEST_BLOCK).bit_length()


def filled_up(queries: int) -> int:
    """Return the number to which a window's `queries` queries are filled up."""
    if queries > 2 * QUERY_STEP:
        return -(-queries // QUERY_STEP) * QUERY_STEP
    return max(FEWEST_QUERIES, power_of_two(queries))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def floor_power_of_two(number: int) -> int:
    """Return the largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1)


def most_tokens_beside(config: EngineConfig) -> int:
    """Return the most tokens of a prompt that is read between the units of a longer one."""
    return min(config.max_input_len, MOST_TOKENS_BESIDE)


def row_tokens(config: EngineConfig, tokens: int) -> int:
    """Return the tokens from a KV head of a prompt's keys or values in a layer to the next.

    Two numbers for all prompts that are longer than a chunk or window, as cuDNN compiles a plan for each: the smaller one is
    that of prompts which are read beside a longer one, for whose rows there must be memory too.
    """
    chunk, beside = config.prefill_chunk_tokens, most_tokens_beside(config)
    if config.device != "cuda" or tokens <= min(chunk, window_tokens(chunk)):
        return tokens
    return beside if tokens <= beside else max(tokens, config.max_input_len)
