"""Arguments of the kernels that differ with what pages are scored by: fields in the order of select.cuh and update.cu."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

Fields = tuple[tuple[str, type], ...]


def select_fields(summaries: Sequence[str], numbers: Fields) -> Fields:
    """Fields of SelectArguments, with pointers to summaries of pages and with numbers that belong to these."""
    return (
        *((name, c_void_p) for name in ("queries", "requests", "table", *summaries, "static_rows", "scores")),
        *((name, c_void_p) for name in ("normalisers", "finished", "picked", "recent", "rows")),
        *((name, c_int32) for name in ("kv_heads", "max_extents", "top_k", "window_queries")),
        ("scaling", c_float),
        *numbers,
    )


def publish_fields(computed: Sequence[str], summaries: Sequence[str], numbers: Fields = ()) -> Fields:
    """Fields of PublishArguments, with pointers to summaries that an update has computed, and to those that it changes."""
    return (
        *((name, c_void_p) for name in ("pool", "table", "leaving", "entering", "entered", "left", *computed)),
        *((name, c_void_p) for name in ("count", *summaries, "frames", "static_rows", "homes", "tokens")),
        ("extent_stride", c_int64),
        *((name, c_int32) for name in ("kv_heads", "pairs", "most_static")),
        *numbers,
    )
