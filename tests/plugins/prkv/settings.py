"""PRKV's settings in tests of the paper's way, where the defaults differ."""

from __future__ import annotations

from typing import Any

BOXES: dict[str, Any] = {"page_score": "box"}  # pages ranked by their boxes, as in the paper
