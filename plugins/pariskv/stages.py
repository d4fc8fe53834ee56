"""Stages at which ParisKV loses rows: too few votes to become a candidate, or a 4-bit estimate that is too low."""

from __future__ import annotations

from functools import partial

from kvseek.plugins.measurements.stages import candidate_stages

from .reference import ReferenceIndex

stages = partial(candidate_stages, ReferenceIndex, "votes")
