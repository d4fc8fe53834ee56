"""Makes the program of the wheel nvidia-pytriton that runs a Python model, the stub, read the arrays of NumPy 2.

The stub was built with pybind11 2.10, which knows the structs of NumPy 1. It reads one field that NumPy 2 has moved: the bytes
of an item, in NumPy's struct of a dtype. With NumPy 2 it would read the low half of the dtype's flags there, which is 0 for
numbers, and so repeat a tensor's first item and send outputs without content. Nothing else that the stub uses has moved, and
NumPy 2 keeps `numpy.core.multiarray._ARRAY_API` for pybind11 of that time.
Sources: `PyArrayDescr_Proxy` in pybind11 2.10's numpy.h, `_PyArray_Descr` in NumPy 2's ndarraytypes.h, tag r24.10 of Triton's
python_backend. Stubs of Triton 2.52 (24.11) and later read both layouts.

Five instructions of the stub read the field. In the copy that is run, they read it where NumPy 2 has it: their operand, one byte,
is another one. The stubs are known by their SHA-256, so that no other program is ever changed, and each model tests what its
stub reads when it starts (`require_readable_arrays`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from kvseek.server.errors import ServerError

WHEEL = "nvidia-pytriton"
ITEM_SIZE = 0x28  # where NumPy 2's struct of a dtype has the bytes of an item; NumPy 1 has them at 0x20
OPERANDS = {  # by a stub's SHA-256: where the file has the operands of the five instructions
    "a302adf6396501ac139da06f965aea1bf61929c99bf799f6b8797e071cd268f4": (0xA4BFC, 0xA4E41, 0xA55B4, 0xA5819, 0xAB24B),
    "41a7758c6f44520b846e90a5bf8b063f99aee01698c3e32113ce352fe8369921": (0xA6C74, 0xA6E90, 0xA7664, 0xA78A9, 0xACA2B),
    "7b701b4b4bc01ca7af0350eaffa4f2aed92f02b465b3494a265059e4d3ca6cf8": (0xA6C74, 0xA6E90, 0xA7664, 0xA78A9, 0xACA2B),
}  # of nvidia-pytriton 0.7.0 for x86-64: Python 3.11, 3.12 and 3.13


def copy_stub(source: Path, target: Path) -> None:
    """Write an executable copy of the stub `source` that reads arrays of the NumPy that is installed.

    Raises
    ------
    ServerError
        If NumPy is not 1, and `source` is none of the stubs that are known.
    """
    program = bytearray(source.read_bytes())
    if not np.__version__.startswith("1."):
        operands = OPERANDS.get(hashlib.sha256(program).hexdigest())
        if operands is None:
            raise ServerError(
                f"{source}: must be the one of {WHEEL} 0.7.0 for x86-64, which kvseek can make read arrays of numpy = "
                f"{np.__version__}; run: pip install --no-deps {WHEEL}==0.7.0, or on Python 3.12 or older: "
                "pip install 'numpy<2'"
            )
        for operand in operands:
            program[operand] = ITEM_SIZE
    target.write_bytes(program)
    target.chmod(0o755)


def require_readable_arrays(triton: Any) -> None:
    """Raise ServerError if the stub that runs this process misreads NumPy's arrays; `triton` is triton_python_backend_utils."""
    sent = np.array([1, 2], dtype=np.int32)
    copy = triton.Tensor.from_dlpack("copy", triton.Tensor("sent", sent))
    read = copy.as_numpy()  # an array that the stub makes, as it does for an input
    if read.tolist() != sent.tolist():
        raise ServerError(
            f"numpy = {np.__version__}: Triton's Python backend reads {read.tolist()} for {sent.tolist()}; must be < 2 for "
            f"Triton before 2.52, unless it is that of {WHEEL} and kvseek starts it; run: pip install 'numpy<2', or use "
            "a later Triton"
        )
