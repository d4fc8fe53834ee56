"""Fields of the CTkvr method, as they stand in `method_config` of an engine directory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from kvseek.core.errors import require
from kvseek.kernels.reference.codes.key_codes import BITS

MOST_CENTROIDS = 2048  # prompt queries that an index is given to build (LAST_QUERIES of plugins/contract.py)
DEFAULT_RECENT = 8192  # our choice: so long a generation is ranked key by key, as lists would lose some of its tokens
EXECUTIONS = ("cpu", "codes")
ROTATION_SEED = 0  # of the codes: any number will do (kernels/reference/codes/rotation.py)

# What the paper sets: section 4.1; of its two numbers of rows the one that its appendix C.2 calls the default (rho = 2560). It
# gives no sizes of the window.
PAPER = {
    "centroids": 2048,
    "centroid_divisor": 16,
    "recall_factor": 2.5,
    "top_k": 1024,
    "probes": 4,
    "centred": False,
    "keep_prompt": False,
    "execution": "cpu",  # section 3.2
    "update": True,  # section 3.1.3
}


@dataclass(frozen=True)
class Config:
    """How many centroids are kept, how long their lists are, and where a step runs (CTkvr paper, sections 3.1 and 4.1).

    Attributes
    ----------
    centroids : int
        C: most centroids of a slot, and room of the ring that new ones enter. Section 4.1: 2048.
    centroid_divisor : int
        A prompt of n retrieval tokens starts with min(centroids, ceil(n / centroid_divisor)) centroids. Section 4.1: 16.
    recall_factor : float
        Places in a centroid's list per selected row: rho = ceil(recall_factor * top_k). Section 4.1: 2.5; 5 here, which gives
        lists as long as 2.5 with 512 rows.
    top_k : int
        rho': rows selected per KV head. Section 4.1: 512 or 1024; 256 here (README).
    probes : int
        C': centroids whose lists a query recalls. Section 4.1: 4; 16 here, which loses fewer answers (README).
    centred : bool
        Subtract the mean of the prompt's centroid queries from queries and centroids before their cosines: our choice
        (README). False is the paper.
    keep_prompt : bool
        Half of the probes, rounded down, go to the nearest of the prompt's own centroids, the others to the nearest of all: our
        choice (README). False is the paper.
    recent : int
        Newest places that are in no prompt list and are recalled by every query; 0, the default, becomes the larger of 8192
        and top_k. The paper is silent: our choice (README).
    execution : str
        How recalled places are ranked, and where: by "codes", estimates from nested key codes in the compute device's memory, so
        that only the selected rows are read over PCIe (our choice); or by their keys ("cpu", section 3.2): with rows in host
        memory on host cores, which attend to them too, with rows on the device by the GPU.
    update : bool
        Dynamic centroid update (section 3.1.3): each step's query and its best rho places replace the oldest centroid.
    """

    centroids: int = 2048
    centroid_divisor: int = 16
    recall_factor: float = 5.0
    top_k: int = 256
    probes: int = 16
    centred: bool = True
    keep_prompt: bool = True
    recent: int = 0
    execution: str = "codes"
    update: bool = True

    def __post_init__(self) -> None:
        limit = f"between 1 and {MOST_CENTROIDS}, the prompt queries that an index sees"
        require(1 <= self.centroids <= MOST_CENTROIDS, "centroids", self.centroids, limit, "2048 is the default")
        require(self.centroid_divisor >= 1, "centroid_divisor", self.centroid_divisor, ">= 1", "16 is the default")
        wide = math.isfinite(self.recall_factor) and self.recall_factor >= 1
        require(
            wide,
            "recall_factor",
            self.recall_factor,
            "finite and >= 1",
            "a list must hold top_k places; 5 is the default",
        )
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1", "256 is the default")
        limit = f"between 1 and centroids = {self.centroids}"
        require(1 <= self.probes <= self.centroids, "probes", self.probes, limit, "16 is the default")
        if self.recent == 0:
            object.__setattr__(self, "recent", max(DEFAULT_RECENT, self.top_k))
        limit = f">= top_k = {self.top_k}, or 0"
        remedy = "a region that grew from a short prompt must recall top_k places; leave it out"
        require(self.recent >= self.top_k, "recent", self.recent, limit, remedy)
        require(
            self.execution in EXECUTIONS, "execution", self.execution, f"one of {EXECUTIONS}", "codes is the default"
        )

    @property
    def bits(self) -> int:
        """Bits of a channel's code that keys are ranked by; 0: they are ranked by themselves. Why 4: README, What it loses."""
        return BITS if self.execution == "codes" else 0

    @property
    def rho(self) -> int:
        """Number of places in a full list: ceil(recall_factor * top_k), in decimal arithmetic (1.1 * 10 is 11, not 12)."""
        return math.ceil(Fraction(str(self.recall_factor)) * self.top_k)

    @property
    def prompt_probes(self) -> int:
        """Number of probes that go to centroids of the prompt, as long as the ring holds so many."""
        return self.probes // 2 if self.keep_prompt else 0

    def prompt_centroids(self, tokens: int, queries: int) -> int:
        """Return the centroids of a prompt with `tokens` retrieval tokens and `queries` known queries; 0 without tokens."""
        return min(queries, self.most_prompt_centroids(tokens))

    def most_prompt_centroids(self, tokens: int) -> int:
        """Return the centroids of a prompt with `tokens` retrieval tokens, if so many of its queries are known."""
        return min(self.centroids, -(-tokens // self.centroid_divisor))

    def list_width(self, most_tokens: int) -> int:
        """Return the number of places in a list of a slot of at most `most_tokens` retrieval tokens: rho, or `most_tokens`."""
        return max(1, min(self.rho, most_tokens))

    def recall_capacity(self, most_tokens: int) -> int:
        """Return the most places per KV head that a query recalls in a slot of at most `most_tokens` retrieval tokens."""
        return max(1, min(most_tokens, self.probes * self.list_width(most_tokens) + self.recent))
