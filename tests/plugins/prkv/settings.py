"""PRKV's settings in tests of the paper's way, where the defaults differ, and in tests of updates."""

from __future__ import annotations

from typing import Any

BOXES: dict[str, Any] = {"page_score": "box"}  # pages ranked by their boxes, as in the paper
UPDATES = (
    "--prkv.update_queries",
    "8",
    "--prkv.update_interval",
    "16",
    "--prkv.window_queries",
    "8",
)  # several in an answer
