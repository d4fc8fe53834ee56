"""Fields of the nested method, as they stand in `method_config` of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.config import require
from kvseek.plugins.shared.group import require_group_reduce


@dataclass(frozen=True)
class Config:
    """How many rows are retrieved, and with how many bits of the codes they are looked for.

    Attributes
    ----------
    top_k : int
        Rows retrieved per KV head.
    group_reduce : str
        "mean", "max" or "softmax_mean": how the query heads of a KV head agree on the rows (plugins/shared/group.py).
    first_bits : int
        Bits of each channel's code that are read of every key: 2, which finds candidates that 4 bits rank again, or 4, which rank
        all keys at once.
    candidates : int
        Candidates that 2 bits find for each row that is retrieved. Of no effect with first_bits 4.
    rotation_seed : int
        Seed of the signs of the randomised Hadamard transform.
    """

    top_k: int = 100
    group_reduce: str = "softmax_mean"
    first_bits: int = 2
    candidates: int = 8
    rotation_seed: int = 0

    def __post_init__(self) -> None:
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1", "100 is the default")
        require_group_reduce(self.group_reduce)
        two_or_four = self.first_bits in (2, 4)
        require(
            two_or_four, "first_bits", self.first_bits, "2 or 4", "2 is the default, 4 reads twice as much of every key"
        )
        require(self.candidates >= 1, "candidates", self.candidates, ">= 1", "8 is the default")
        in_range = 0 <= self.rotation_seed < 2**63
        require(in_range, "rotation_seed", self.rotation_seed, "in [0, 2**63)", "any such number will do")

    def candidate_count(self, tokens: int) -> int:
        """Return the number of keys that the last ranking chooses from in a retrieval region of `tokens` tokens."""
        return tokens if self.first_bits == 4 else min(tokens, self.candidates * self.top_k)
