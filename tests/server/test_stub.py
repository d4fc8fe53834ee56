"""The program that runs Triton's Python models, which reads the arrays of NumPy 1 and of NumPy 2.

That a real one does is what every test of a real server shows: tests/server/whole.
"""

from __future__ import annotations

import os
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvseek.server.errors import ServerError
from kvseek.server.triton import stub
from kvseek.server.triton.find import STUB


def wheels_stub(version: str) -> Path:
    return Path(
        str(distribution(stub.WHEEL).locate_file(f"pytriton/tritonserver/python_backend_stubs/{version}/{STUB}"))
    )


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_five_operands_differ_with_numpy_2(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = wheels_stub(version).read_bytes()
    monkeypatch.setattr(np, "__version__", "2.4.6")
    stub.copy_stub(wheels_stub(version), tmp_path / STUB)
    changed = (tmp_path / STUB).read_bytes()
    assert len(changed) == len(original)
    differing = [place for place, pair in enumerate(zip(original, changed, strict=True)) if pair[0] != pair[1]]
    assert len(differing) == 5
    assert {(original[place], changed[place]) for place in differing} == {(0x20, 0x28)}
    for place in differing:  # movslq 0x20(%rax),%rax or mov 0x20(%rax),%eax
        assert original[place - 3 : place] == b"\x48\x63\x40" or original[place - 2 : place] == b"\x8b\x40"
    assert os.access(tmp_path / STUB, os.X_OK)


def test_numpy_1_takes_the_stub_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "1.26.4")
    stub.copy_stub(wheels_stub("3.11"), tmp_path / STUB)
    assert (tmp_path / STUB).read_bytes() == wheels_stub("3.11").read_bytes()


def test_no_other_program_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.4.6")
    (tmp_path / "other").write_bytes(wheels_stub("3.11").read_bytes() + b"\0")
    with pytest.raises(ServerError, match=r"must be the one of nvidia-pytriton 0\.7\.0.*numpy = 2\.4\.6.*pip install"):
        stub.copy_stub(tmp_path / "other", tmp_path / STUB)
    assert not (tmp_path / STUB).exists()


def test_a_model_does_not_start_with_a_stub_that_misreads_arrays() -> None:
    class Misread:
        def __init__(self, name: str, value: np.ndarray) -> None:
            self.value = value

        def as_numpy(self) -> np.ndarray:
            return np.full_like(self.value, self.value[0])

        @staticmethod
        def from_dlpack(name: str, tensor: Misread) -> Misread:
            return tensor

    with pytest.raises(ServerError, match=r"reads \[1, 1\] for \[1, 2\]; must be < 2.*pip install 'numpy<2'"):
        stub.require_readable_arrays(SimpleNamespace(Tensor=Misread))
