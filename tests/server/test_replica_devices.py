"""Which GPUs each replica sees: groups of their own, one GPU for each rank of the engine."""

from __future__ import annotations

import pytest

from kvseek.server.errors import ServerError
from kvseek.server.replicas import _devices

VISIBLE = "CUDA_VISIBLE_DEVICES"


def test_replicas_of_several_ranks_have_disjoint_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    assert [_devices("cuda", number, 2)[VISIBLE] for number in range(2)] == ["0,1", "2,3"]
    assert [_devices("cuda", number, 1)[VISIBLE] for number in range(2)] == ["0", "1"]
    monkeypatch.setenv(VISIBLE, "4,5,6,7")
    assert [_devices("cuda", number, 2)[VISIBLE] for number in range(2)] == ["4,5", "6,7"]
    assert _devices("cpu", 1, 2) == {}


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,6")
    with pytest.raises(
        ServerError, match="replica 1 has no 2 GPUs of its own, CUDA_VISIBLE_DEVICES names 3; start fewer"
    ):
        _devices("cuda", 1, 2)
    with pytest.raises(ServerError, match="replica 3 has no GPU of its own, CUDA_VISIBLE_DEVICES names 3; start fewer"):
        _devices("cuda", 3, 1)
