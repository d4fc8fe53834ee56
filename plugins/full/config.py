"""Fields of the method `full`: none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Dense attention has nothing to set."""
