"""Fields of the nested method, as they stand in `method_config` of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require


@dataclass(frozen=True)
class Config:
    """How many rows are retrieved, and among how many candidates.

    Attributes
    ----------
    top_k : int
        Rows retrieved per KV head.
    candidates : int
        Candidates for each row that is retrieved: 2 bits of every key's code find them, 4 bits choose among them.
    rotation_seed : int
        Seed of the signs of the randomised Hadamard transform.
    """

    top_k: int = 100
    candidates: int = 8
    rotation_seed: int = 0

    def __post_init__(self) -> None:
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1", "100 is the default")
        require(self.candidates >= 1, "candidates", self.candidates, ">= 1", "8 is the default")
        in_range = 0 <= self.rotation_seed < 2**63
        require(in_range, "rotation_seed", self.rotation_seed, "in [0, 2**63)", "any such number will do")

    def candidate_count(self, tokens: int) -> int:
        """Return the number of keys that the last ranking chooses from in a retrieval region of `tokens` tokens."""
        return min(tokens, self.candidates * self.top_k)
