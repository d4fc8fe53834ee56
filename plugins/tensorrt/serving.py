"""Sets the function that attention layers of a TensorRT plan call while the plan is enqueued; each thread has its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Attends: layer number, queries [T, H, D], keys and values [T, G, D], and [T, H, D], which it fills; all of one dtype."""


class Call:
    """The function of one `serving`, and the exception that it raised: TensorRT only reports that a call has failed."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.failure: BaseException | None = None

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Call the function, and keep its exception, of which TensorRT would only report that there was one."""
        try:
            self._attend(layer, queries, keys, values, out)
        except BaseException as error:
            self.failure = error
            raise


class _Calls(threading.local):
    """The open calls of each thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Call] = []


_calls = _Calls()


@contextmanager
def serving(attend: Attend) -> Iterator[None]:
    """Let attention layers that TensorRT enqueues in this thread call `attend`, within the context.

    During the call TensorRT's stream is PyTorch's current stream, and the tensors are views of TensorRT's memory, valid
    until `attend` returns. If contexts are nested, the innermost counts.

    Raises
    ------
    BaseException
        The exception of `attend`, at the end of the context, in place of an error that TensorRT's failure led to.
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
    """Return the call of this thread's innermost `serving`; None outside of any."""
    return _calls.open[-1] if _calls.open else None
