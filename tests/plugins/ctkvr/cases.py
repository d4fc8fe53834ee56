"""CTkvr in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases, NeedleCase
from tests.plugins.ctkvr.settings import BY_KEYS

CASES = MethodCases(
    paper={
        "centroids": 2048,
        "centroid_divisor": 16,
        "recall_factor": 2.5,
        "top_k": 1024,
        "probes": 4,
        "centred": False,
        "keep_prompt": False,
        "execution": "cpu",
        "update": True,
    },
    sparse={"top_k": 12, "centroids": 16, "probes": 8},
    index={"top_k": 64, "centroids": 64},
    options=(BY_KEYS,),
    on_gpu={
        f"ctkvr-{execution}": {"top_k": 64, "execution": execution, "centroids": 64} for execution in ("cpu", "codes")
    },
    counted=({"centroids": 64, "top_k": 32, "update": False}, BY_KEYS),
    losses={"top_k": 32, "probes": 1, "recall_factor": 1.25, "recent": 32},
    losses_kept={"recent": 1024},
    recall=0.99,
    needle=NeedleCase(margin=17.0),  # half an answer of three
)
