"""Exact top-k in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases

CASES = MethodCases(sparse={"top_k": 12}, index={"top_k": 64}, on_gpu={"flat": {"top_k": 12}})
