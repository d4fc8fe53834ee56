"""Makes sure that bfloat16 matrix products run on this processor before a model depends on them.

Some virtual machines advertise AMX and let programs request it, and then answer its instructions with SIGILL. oneDNN, which
multiplies bfloat16 matrices for PyTorch, believes the advertisement, and the signal ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from functools import cache

import torch

ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"  # environment variable that oneDNN reads when it is first used
WITHOUT_AMX = "AVX512_CORE_BF16"
SIZE = 64

logger = logging.getLogger(__name__)


@cache
def usable() -> bool:
    """Whether bfloat16 products work in this process. Where AMX does not work, this first keeps oneDNN from using it.

    A product is tried in a forked child. Call this before the first matrix product of any dtype, because oneDNN decides once
    per process.
    """
    if _product_works():
        return True
    if ONEDNN_LIMIT not in os.environ:
        os.environ[ONEDNN_LIMIT] = WITHOUT_AMX
        logger.info("AMX does not work on this machine though it is advertised: %s=%s set", ONEDNN_LIMIT, WITHOUT_AMX)
    return _product_works()


def has_amx() -> bool:
    """Whether oneDNN multiplies bfloat16 by AMX, which is several times as fast as all else that processors have."""
    return usable() and torch.cpu._is_amx_tile_supported() and "AMX" in os.environ.get(ONEDNN_LIMIT, "AMX").upper()


def _product_works() -> bool:
    child = os.fork()
    if child == 0:  # threads of the parent do not exist here, so nothing may wait for them
        faulthandler.disable()
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        torch.set_num_threads(1)
        ones = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)
        os._exit(0 if float((ones @ ones)[0, 0]) == SIZE else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
