"""What the kernels for drawing tokens read and write of each request."""

from __future__ import annotations

import ctypes
from typing import Any

from kvseek.kernels.structs import c_struct

DRAWN, NOT_FINITE = 0, 1  # DrawnToken.status; another one: no token is left

DrawRow: Any = c_struct("kernels/draw.h", "DrawRow")  # Any, because the engine asks its fields for their offsets
DrawnToken = c_struct("kernels/draw.h", "DrawnToken")

ROW_BYTES, DRAWN_WORDS = ctypes.sizeof(DrawRow), ctypes.sizeof(DrawnToken) // 4
