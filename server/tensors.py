"""Triton request objects to NumPy arrays."""

from __future__ import annotations

from typing import Any

from .translation import Tensors


def read_tensors(request: Any) -> Tensors:
    """All tensors of a Python-backend request by name; absent optional inputs are absent here."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
