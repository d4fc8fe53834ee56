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
    recall=0.99,
    needle=NeedleCase(margin=17.0),  # half an answer of three
    refused=(
        ({"centroids": 2049}, "centroids = 2049: must be between 1 and 2048"),
        ({"centroids": 0}, "centroids = 0"),
        ({"centroid_divisor": 0}, "centroid_divisor = 0: must be >= 1"),
        ({"recall_factor": 0.5}, "recall_factor = 0.5: must be finite and >= 1"),
        ({"recall_factor": float("inf")}, "recall_factor = inf"),
        ({"top_k": 0}, "top_k = 0: must be >= 1"),
        ({"probes": 0}, "probes = 0: must be between 1 and centroids = 2048"),
        ({"probes": 5, "centroids": 4}, "probes = 5"),
        ({"top_k": 2000, "recent": 1024}, "recent = 1024: must be >= top_k = 2000"),
        ({"recent": -1}, "recent = -1"),
        ({"execution": "gpu"}, "execution = 'gpu': must be one of"),
    ),
)
