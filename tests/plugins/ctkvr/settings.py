"""CTkvr's settings in tests of the paper's way, where the defaults differ."""

from __future__ import annotations

from typing import Any

BY_KEYS: dict[str, Any] = {"execution": "cpu", "recall_factor": 2.5}  # places ranked by their keys, lists of the paper
