"""Dense attention in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases, NeedleCase

# The README of the needle tasks reports 100 for dense attention on all of them but niah_multivalue, where it has 97.9.
CASES = MethodCases(
    sparse={},
    everything={},
    on_gpu={"full": {}},
    needle=NeedleCase(margin=3.0, most_attended=1.0),
)
