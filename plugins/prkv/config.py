"""Fields of the PRKV method, as they stand in `method_config` of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import require

PAGE_SCORES = ("box", "codes")

# What the paper sets: section 5.1; the score is that of its section 4.1, and 1024 the budget of sections 5.1 and 5.2.
PAPER = {
    "top_k": 1024,
    "static_share": 0.25,
    "page": 32,
    "page_score": "box",
    "box_radius": 1.0,
    "window_queries": 64,
    "update_interval": 128,
    "update_queries": 64,
    "cache.local": 64,
}


@dataclass(frozen=True)
class Config:
    """Numbers of rows, the choice of pages, and the renewal of the static set.

    Attributes
    ----------
    top_k : int
        Rows of a KV head that a step attends to: static rows and rows of selected pages. A multiple of `page`.
    static_share : float
        Share of `top_k` that is static, rounded down to whole pages. The paper's experiments have 0.25 (section 5.1);
        more was better where it was measured (README).
    page : int
        Rows of a page: a power of two from 8 to 128. The paper has 32 (section 4.2); a quarter of that loses far
        fewer answers (README).
    page_score : str
        What ranks pages. "box": the box that encloses a page's keys, and pages of the tokens that are not static, as in the
        paper. "codes": the softmax weight of its rows that are not static, as codes of 2 bits a channel of every row estimate it;
        pages are then the same tokens for ever, the index takes D / 4 + 2 bytes a row whatever the page is, and loses far fewer
        answers (README).
    box_radius : float
        Weight in the score of a box: q·centre + box_radius · Σ |q_c| · half-width of the box. With 1 the score is the paper's
        upper bound of the page's keys, which no key comes close to; with less it is an estimate and no bound, which was better
        (README).
    window_queries : int
        Last queries of a prompt that choose its static set; `cache.local` should be at least as much, and is 256 by default.
    update_interval : int
        Decode steps from one choice of the static set to the next; at least `update_queries`. The paper has 128.
    update_queries : int
        Queries of the last decode steps that choose a static set anew. The paper has 64.
    update_pages : int
        With "codes", rows may become static that are on one of the pages which steps selected since the last update; of so many
        pages of a KV head at most, those selected most often.
    cache_steps : int
        Number of each request's last steps whose selected rows a GPU keeps on the device, if the row pool is not there.
    """

    top_k: int = 1024
    static_share: float = 0.5
    page: int = 8
    page_score: str = "codes"
    box_radius: float = 0.25
    window_queries: int = 64
    update_interval: int = 80
    update_queries: int = 32
    update_pages: int = 2048
    cache_steps: int = 1

    def __post_init__(self) -> None:
        sizes = tuple(2**i for i in range(3, 8))
        require(
            self.page in sizes, "page", self.page, f"one of {sizes}", f"pages divide extents of {EXTENT_TOKENS} rows"
        )
        fits = self.top_k >= self.page and self.top_k % self.page == 0
        limit = f"a positive multiple of page = {self.page}"
        require(fits, "top_k", self.top_k, limit, "1024 is the default")
        share = self.static_share
        require(0 <= share <= 1, "static_share", share, "in [0, 1]", "0.5 is the default")
        fits = self.page_score in PAGE_SCORES
        require(fits, "page_score", self.page_score, f"one of {PAGE_SCORES}", '"codes" is the default')
        require(0 <= self.box_radius <= 1, "box_radius", self.box_radius, "in [0, 1]", "0.25 is the default")
        require(self.window_queries >= 1, "window_queries", self.window_queries, ">= 1", "64 is the default")
        require(self.update_queries >= 1, "update_queries", self.update_queries, ">= 1", "32 is the default")
        limit = f">= update_queries = {self.update_queries}"
        fits = self.update_interval >= self.update_queries
        require(fits, "update_interval", self.update_interval, limit, "an update looks at decode steps alone")
        require(self.update_pages >= 1, "update_pages", self.update_pages, ">= 1", "2048 is the default")
        require(0 <= self.cache_steps <= 8, "cache_steps", self.cache_steps, "between 0 and 8", "1 is the default")

    @property
    def most_static(self) -> int:
        """Number of static rows of a KV head, as soon as a region has so many."""
        return int(self.top_k * self.static_share) // self.page * self.page
