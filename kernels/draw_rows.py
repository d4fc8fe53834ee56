"""What the kernels for drawing tokens read and write of each request, as in draw.h."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_uint64, c_void_p

from kvseek.core.request import MAX_LOGPROBS

DRAWN, NOT_FINITE = 0, 1  # DrawnToken.status; another one: no token is left


class DrawRow(ctypes.Structure):
    """DrawRow of draw.h."""

    _fields_ = (
        ("seed", c_uint64),
        *((name, c_double) for name in ("inverse_temperature", "top_p")),
        ("least_weight", c_int64),
        *((name, c_void_p) for name in ("bias_ids", "biases", "occurrences", "allowed", "banned", "latest")),
        *((name, c_int32) for name in ("row", "number", "greedy", "top_k", "bias_count", "bans", "likeliest")),
        *((name, c_float) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
    )


class DrawnToken(ctypes.Structure):
    """DrawnToken of draw.h."""

    _fields_ = (
        *((name, c_int32) for name in ("token", "status")),
        *((name, c_float) for name in ("largest", "log_probability")),
        ("ids", c_int32 * MAX_LOGPROBS),
        ("log_probabilities", c_float * MAX_LOGPROBS),
    )


ROW_BYTES, DRAWN_WORDS = ctypes.sizeof(DrawRow), ctypes.sizeof(DrawnToken) // 4
