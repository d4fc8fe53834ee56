"""PRKV in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases, NeedleCase
from tests.plugins.prkv.settings import BOXES

CASES = MethodCases(
    paper={
        "top_k": 1024,
        "static_share": 0.25,
        "page": 32,
        "page_score": "box",
        "box_radius": 1.0,
        "window_queries": 64,
        "update_interval": 128,
        "update_queries": 64,
        "cache.local": 64,
    },
    sparse={"top_k": 32, "page": 8, "window_queries": 8, "update_interval": 16, "update_queries": 8},
    index={"top_k": 64, "page": 8},
    everything={"top_k": 8192, "page": 16},  # on a GPU at most 512 pages
    options=(BOXES,),
    on_gpu={"prkv": {"top_k": 128, **BOXES}, "prkv_codes": {"top_k": 128}},
    counted=({"cache_steps": 0, "page": 16, **BOXES}, {"page": 32}),
    recall=0.90,
    needle=NeedleCase(margin=17.0),  # half an answer of three
    refused=(
        ({"top_k": 44}, "top_k = 44: must be a positive multiple of page = 8"),
        ({"page": 24}, "page = 24: must be one of (8, 16, 32, 64, 128)"),
        ({"page_score": "key"}, "page_score = 'key': must be one of ('box', 'codes')"),
        ({"static_share": 1.5}, "static_share = 1.5: must be in [0, 1]"),
        ({"box_radius": -0.1}, "box_radius = -0.1: must be in [0, 1]"),
        ({"update_interval": 31}, "update_interval = 31: must be >= update_queries = 32"),
        ({"update_pages": 0}, "update_pages = 0"),
        ({"cache_steps": 9}, "cache_steps = 9: must be between 0 and 8"),
    ),
)
