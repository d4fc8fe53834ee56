"""tensorrt_llm_bls without a server: what it asks of tensorrt_llm, and how long it holds what it gets."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvseek.model_repository
from kvseek.engine.errors import RequestError
from kvseek.server.doorbell import Rings
from kvseek.server.ended_iterators import EndedIterators


class Sender:
    """A response sender whose client leaves when it has been asked about it `patience` times."""

    def __init__(self, patience: int = 1000) -> None:
        self.patience, self.sent = patience, []

    def is_cancelled(self) -> bool:
        self.patience -= 1
        return self.patience < 0

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.append((response, flags))


class Responses:
    """The backend's iterator over the responses to one inner request, of which `inner.left` are to come."""

    def __init__(self, inner: SimpleNamespace) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.inner.left:
            raise StopIteration
        self.inner.left -= 1
        reason = "" if self.inner.left else "length"
        tensors = [Tensor("output_ids", np.ones((1, 1, 1), np.int32)), Tensor("finish_reason", np.array([[reason]]))]
        return SimpleNamespace(has_error=lambda: False, output_tensors=lambda: tensors)


class Tensor:
    def __init__(self, name: str, value: Any) -> None:
        self.name, self.as_numpy = lambda: name, lambda: value


class TextRequest:
    """Gives nothing to send, and fails at response number `fails_at`."""

    ended = False

    def __init__(self, fails_at: int = -1) -> None:
        self.pushed, self.fails_at = 0, fails_at

    def token_tensors(self) -> dict[str, Any]:
        return {"input_ids": np.ones((1, 4), np.int32)}

    def push(self, outputs: dict[str, Any]) -> list[Any]:
        assert outputs["output_ids"].shape == (1, 1, 1)
        self.pushed += 1
        if self.pushed == self.fails_at:
            raise RequestError("text_input: not today")
        return []


class Backend(ModuleType):
    """Stands for triton_python_backend_utils; `inner` records the requests to tensorrt_llm."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = Tensor

    def __init__(self) -> None:
        super().__init__("triton_python_backend_utils")
        self.inner: list[SimpleNamespace] = []

    def InferenceRequest(self, inputs: list[Tensor], **_: Any) -> Any:
        stop = "stop" in [tensor.name() for tensor in inputs]
        inner = SimpleNamespace(stop=stop, left=1 if stop else 10)
        responses = Responses(inner)
        inner.iterator = weakref.ref(responses)
        self.inner.append(inner)
        return SimpleNamespace(exec=lambda decoupled: responses)

    def held(self) -> list[bool]:
        """Of every inner request, whether something still refers to its iterator."""
        gc.collect()
        return [inner.iterator() is not None for inner in self.inner]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    backend = Backend()
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    return backend


@pytest.fixture
def model(backend: Backend) -> Any:
    (folder,) = kvseek.model_repository.__path__
    spec = importlib.util.spec_from_file_location("bls_model", Path(folder) / "tensorrt_llm_bls/1/model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.iterators = EndedIterators()
    model.doorbell = SimpleNamespace(name="bell", expecting=lambda _: contextlib.nullcontext(all_sent()))
    return model


def all_sent() -> Rings:
    rings = Rings()
    rings.add(100, os.getpid())
    return rings


def test_an_answer_lets_go_of_its_iterator_at_its_end(model: Any, backend: Backend) -> None:
    request = TextRequest()
    model.answer(Sender(), request)
    assert (request.pushed, backend.inner[0].left) == (10, 0)
    assert backend.held() == [False]


def test_a_client_that_left_before_the_beginning_costs_nothing(model: Any, backend: Backend) -> None:
    model.answer(Sender(patience=0), TextRequest())
    assert backend.inner == []


def test_iterators_of_a_cancelled_answer_are_held_until_another_client_is_asked_about(
    model: Any, backend: Backend
) -> None:
    """A sender that knows that its client has left says nothing about what the backend still holds."""
    request = TextRequest()
    model.answer(Sender(patience=4), request)
    assert [inner.stop for inner in backend.inner] == [False, True]
    assert [inner.left for inner in backend.inner] == [0, 0], "both are used up"
    assert request.pushed == 4
    assert backend.held() == [True, True]
    assert not model.iterators.is_cancelled(Sender())
    assert backend.held() == [False, False]


def test_an_answer_that_fails_is_stopped_and_used_up(model: Any, backend: Backend) -> None:
    request = TextRequest(fails_at=3)
    with pytest.raises(RequestError, match="not today"):
        model.answer(Sender(), request)
    assert [(inner.stop, inner.left) for inner in backend.inner] == [(False, 0), (True, 0)]
    assert request.pushed == 3


def test_a_failure_does_not_keep_its_sender(model: Any) -> None:
    """The backend frees what it has of a request with its sender: not only when garbage is collected."""
    sender = Sender()
    reference = weakref.ref(sender)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(RequestError):
            model.answer(sender, TextRequest(fails_at=1))
        del sender
        assert reference() is None
    finally:
        gc.enable()


def test_what_ends_during_the_question_is_held() -> None:
    """The backend may have taken the question before the iterator's end."""
    iterators = EndedIterators()
    early, late = [Responses(SimpleNamespace(left=0))], [Responses(SimpleNamespace(left=0))]
    references = [weakref.ref(early[0]), weakref.ref(late[0])]

    class Slow(Sender):
        def is_cancelled(self) -> bool:
            iterators.keep(late.pop())
            return False

    iterators.keep(early.pop())
    assert not iterators.is_cancelled(Slow())
    gc.collect()
    assert [reference() is not None for reference in references] == [False, True]
