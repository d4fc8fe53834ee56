"""CTkvr in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases, NeedleCase

CASES = MethodCases(
    sparse={"top_k": 12, "centroids": 16},
    index={"top_k": 64, "centroids": 64},
    options=({"execution": "cpu"},),
    on_gpu={
        f"ctkvr-{execution}": {"top_k": 64, "execution": execution, "centroids": 64}
        for execution in ("cpu", "uva", "codes")
    },
    counted=({"centroids": 64, "top_k": 32, "update": False}, {"execution": "uva"}),
    losses={"top_k": 32, "probes": 1, "recall_factor": 1.25, "recent": 32},
    losses_kept={"recent": 1024},
    recall=0.99,
    needle=NeedleCase(margin=17.0),  # half an answer of three
)
