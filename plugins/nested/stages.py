"""Stages at which the nested method loses rows: too low a 2-bit estimate to be a candidate, or too low a 4-bit estimate."""

from __future__ import annotations

from functools import partial

from kvseek.plugins.measurements.stages import candidate_stages

from .reference import ReferenceIndex

stages = partial(candidate_stages, ReferenceIndex, "scan")
