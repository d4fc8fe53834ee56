"""Fields of the PRKV method, as they stand in `method_config` of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.config import EXTENT_TOKENS, require

PAGE_SCORES = ("box", "codes")
SHARE_RULES = ("fixed", "auto")
UPDATE_SCOPES = ("all", "selected")

# What the paper sets: section 5.1; the score is that of its section 4.1, and 1024 the budget of sections 5.1 and 5.2.
PAPER = {
    "top_k": 1024,
    "static_share": 0.25,
    "page": 32,
    "page_score": "box",
    "box_radius": 1.0,
    "window_queries": 64,
    "update_interval": 128,
    "update_scope": "all",  # algorithm 1
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
    share_rule : str
        "fixed": `static_share` holds everywhere. "auto": each layer finds the share for a prompt, from the overlap of the keys
        that the first and the last query of the observation window attend to (paper, appendix G); `static_share` then only
        holds for prompts of at most `top_k` retrieval tokens, for which the overlap says nothing.
    page : int
        Rows of a page: a power of two from 8 to 128. The paper has 32 (section 4.2); a quarter of that loses far
        fewer answers (README).
    page_score : str
        What ranks pages. "box": the box that encloses a page's keys, as in the paper. "codes": the softmax weight of its rows, as
        codes of 2 bits a channel of every row estimate it; the index then takes D / 4 + 2 bytes a row whatever the page is, and
        loses far fewer answers (README).
    box_radius : float
        Weight in the score of a box: q·centre + box_radius · Σ |q_c| · half-width of the box. With 1 the score is the paper's
        upper bound of the page's keys, which no key comes close to; with less it is an estimate and no bound, which was better
        (README).
    window_queries : int
        Queries of the observation window; `cache.local` should be at least as much, and is 256 by default.
    update_interval : int
        Decode steps from one choice of the static set to the next; at least `window_queries`.
    update_scope : str
        Rows that may become static at an update: "all", or those of the pages that were "selected" most often since the
        last update.
    update_pages : int
        With "selected", at most so many pages of a KV head.
    cache_steps : int
        Number of each request's last steps whose selected rows a GPU keeps on the device, if the row pool is not there.
    """

    top_k: int = 1024
    static_share: float = 0.5
    share_rule: str = "fixed"
    page: int = 8
    page_score: str = "codes"
    box_radius: float = 0.25
    window_queries: int = 64
    update_interval: int = 128
    update_scope: str = "selected"
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
        fits = self.share_rule in SHARE_RULES
        require(fits, "share_rule", self.share_rule, f"one of {SHARE_RULES}", '"fixed" is the default')
        fits = self.page_score in PAGE_SCORES
        require(fits, "page_score", self.page_score, f"one of {PAGE_SCORES}", '"codes" is the default')
        require(0 <= self.box_radius <= 1, "box_radius", self.box_radius, "in [0, 1]", "0.25 is the default")
        require(self.window_queries >= 1, "window_queries", self.window_queries, ">= 1", "64 is the default")
        limit = f">= window_queries = {self.window_queries}"
        fits = self.update_interval >= self.window_queries
        require(fits, "update_interval", self.update_interval, limit, "an update looks at decode steps alone")
        fits = self.update_scope in UPDATE_SCOPES
        require(fits, "update_scope", self.update_scope, f"one of {UPDATE_SCOPES}", '"selected" is the default')
        require(self.update_pages >= 1, "update_pages", self.update_pages, ">= 1", "2048 is the default")
        require(0 <= self.cache_steps <= 8, "cache_steps", self.cache_steps, "between 0 and 8", "1 is the default")

    @property
    def automatic(self) -> bool:
        """Whether the static share is chosen for each layer and prompt."""
        return self.share_rule == "auto"

    @property
    def fixed_static(self) -> int:
        """Number of static rows that `static_share` gives."""
        return int(self.top_k * self.static_share) // self.page * self.page

    @property
    def most_static(self) -> int:
        """Most static rows of a KV head."""
        return self.top_k if self.automatic else self.fixed_static
