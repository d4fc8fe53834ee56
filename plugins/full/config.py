"""Fields of the full method: none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Dense attention has nothing to configure."""
