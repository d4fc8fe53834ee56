"""What the attention layers of a TensorRT plan call while the plan is enqueued: a function, given thread by thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Attends: layer number, queries [T, H, D], keys and values [T, G, D], and [T, H, D], which it fills; all of one dtype."""


class Call:
    """What one `serving` is for, and what went wrong in it: TensorRT's API only says that something did."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.failure: BaseException | None = None

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Call the function, and keep what it raises, which TensorRT would turn into a bare failure."""
        try:
            self._attend(layer, queries, keys, values, out)
        except BaseException as error:
            self.failure = error
            raise


class _Calls(threading.local):
    """The thread's calls, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Call] = []


_calls = _Calls()


@contextmanager
def serving(attend: Attend) -> Iterator[None]:
    """Within the context, attention layers that TensorRT enqueues in this thread call `attend`.

    They do so with TensorRT's stream as PyTorch's current one, and with tensors over TensorRT's memory, which are valid
    until `attend` returns. Contexts nest: the innermost counts.

    Raises
    ------
    BaseException
        What `attend` raised, at the end of the context, in place of an error that TensorRT's failure led to.
    """
    call = Call(attend)
    _calls.open.append(call)
    try:
        yield
    except Exception as error:
        if call.failure is None or call.failure is error:
            raise
        raise call.failure from error
    finally:
        _calls.open.pop()
    if call.failure is not None:
        raise call.failure


def current_call() -> Call | None:
    """The innermost `serving` of this thread; None outside of all."""
    return _calls.open[-1] if _calls.open else None
