"""Sessions of TensorRT against a module that enforces the order of calls; nothing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tensorrt.fake_tensorrt import Context, DataType, Engine, FakeTensorRt, TensorIOMode, aligned

from kvseek.core.errors import EngineDirectoryError, KernelError
from kvseek.core.streams import SideStream
from kvseek.engine.tensorrt.session import Plan, Session

CPU = torch.device("cpu")
CONTEXTS = (0, 4)


def make_plan(**options: Any) -> tuple[Plan, Engine]:
    engine = Engine(**options)
    api: Any = FakeTensorRt()
    return Plan(api, engine, aligned(1000, dtype=torch.uint8), SideStream(CPU), CONTEXTS), engine


def test_shapes_that_stay_are_not_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph captures a call, TensorRT must have nothing to work out."""
    plan, engine = make_plan()
    context = engine.contexts[0]
    asked: list[tuple[int, ...]] = []
    set_shape = context.set_input_shape
    monkeypatch.setattr(context, "set_input_shape", lambda name, shape: asked.append(shape) or set_shape(name, shape))
    for n in (2, 2, 3, 2):
        plan.run({"x": aligned(n, 4)}, {"y": aligned(n, 3)})
    assert asked == [(2, 4), (3, 4), (2, 4)]
    assert [shapes["x"][0] for _, _, shapes in context.launches] == [2, 2, 3, 2]


WRONG = {
    "names": ({"z": aligned(2, 4)}, {"y": aligned(2, 3)}, r"tensors = \['z'\]: must be \['x'\]"),
    "more": (
        {"x": aligned(2, 4)},
        {"y": aligned(2, 3), "z": aligned(2, 3)},
        r"tensors = \['y', 'z'\]: must be \['y'\]",
    ),
    "dtype": ({"x": aligned(2, 4, dtype=torch.int32)}, {"y": aligned(2, 3)}, r"of x = \(torch.int32"),
    "device": ({"x": torch.zeros(2, 4, device="meta")}, {"y": aligned(2, 3)}, "of x = .*device.*meta"),
    "strides": ({"x": aligned(4, 2).T}, {"y": aligned(4, 3)}, "of x = .*False, 0.: must be .*True, 0"),
    "address": ({"x": aligned(2, 4)}, {"y": aligned(2, 3, beyond=64)}, "of y = .*True, 64.: must be"),
    "rank": (
        {"x": aligned(2, 4, 1)},
        {"y": aligned(2, 3)},
        r"shape of x = \(2, 4, 1\): must lie between \(1, 4\) and \(8, 4\)",
    ),
    "columns": ({"x": aligned(2, 5)}, {"y": aligned(2, 3)}, r"shape of x = \(2, 5\)"),
    "too many": ({"x": aligned(9, 4)}, {"y": aligned(9, 3)}, r"shape of x = \(9, 4\)"),
    "none": ({"x": aligned(0, 4)}, {"y": aligned(0, 3)}, r"shape of x = \(0, 4\)"),
    "output": ({"x": aligned(2, 4)}, {"y": aligned(3, 3)}, r"shape of y = \(3, 3\): must be \(2, 3\), by its inputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_a_plan_cannot_take(case: str) -> None:
    inputs, outputs, message = WRONG[case]
    plan, engine = make_plan()
    with pytest.raises(KernelError, match=f"plan segment_0: .*{message}"):
        plan.run(inputs, outputs)
    assert engine.contexts[0].launches == []


def test_a_context_that_was_not_made() -> None:
    plan, _ = make_plan()
    with pytest.raises(KernelError, match=r"plan segment_0: context = 2: must be one of \[0, 4\]"):
        plan.run({"x": aligned(2, 4)}, {"y": aligned(2, 3)}, 2)


@pytest.mark.parametrize("method", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_what_tensorrt_refuses_is_an_error(method: str) -> None:
    plan, _ = make_plan(refuses=(method,))
    with pytest.raises(
        KernelError, match=r"plan segment_0 cannot .* with tensorrt_rtx 1\.7\.1: it gave no reason; see docs"
    ):
        plan.run({"x": aligned(2, 4)}, {"y": aligned(2, 3)})


def test_a_type_that_the_builder_does_not_write() -> None:
    engine, api = Engine(), FakeTensorRt()
    engine.tensors["x"] = (TensorIOMode.INPUT, DataType.UINT8, (-1, 4))
    given: Any = api
    with pytest.raises(KernelError, match="type of x = UINT8: must be one of FLOAT, BF16, HALF, INT32"):
        Plan(given, engine, aligned(1000, dtype=torch.uint8), SideStream(CPU), CONTEXTS)


def test_plans_share_one_block(tmp_path: Path) -> None:
    """Calls run one after the other: the block is as large as the plan that needs the most."""
    engines = {b"one": Engine("a", 700), b"two": Engine("b", 5000), b"three": Engine("c", 0)}
    files = []
    for number, content in enumerate(engines):
        files.append(tmp_path / f"{number}.plan")
        files[-1].write_bytes(content)
    api: Any = FakeTensorRt(engines)
    session = Session(api, files, CPU, CONTEXTS)
    assert [plan._engine.name for plan in session.plans] == ["a", "b", "c"]
    assert session.memory.nbytes == 5000
    given = {context.memory for engine in engines.values() for context in engine.contexts}
    assert given == {(session.memory.data_ptr(), 5000)}
    assert [len(engine.contexts) for engine in engines.values()] == [2, 2, 2]


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    api: Any = FakeTensorRt({b"one": Engine()})
    (tmp_path / "empty").touch()
    (tmp_path / "other").write_bytes(b"other")
    for name in ("empty", "absent"):
        with pytest.raises(EngineDirectoryError, match=f"cannot read .*{name}: .*build the engine again"):
            Session(api, [tmp_path / name], CPU, CONTEXTS)
    with pytest.raises(KernelError, match=r"other: tensorrt_rtx 1\.7\.1: not a plan of this GPU; a plan runs on"):
        Session(api, [tmp_path / "other"], CPU, CONTEXTS)


def test_the_real_module_has_what_is_used(tmp_path: Path) -> None:
    """Names of TensorRT for RTX, and that it takes a mapped file; without a driver no plan loads."""
    api = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13")
    for stand_in, real in ((Engine, api.ICudaEngine), (Context, api.IExecutionContext)):
        used = [name for name, member in vars(stand_in).items() if callable(member) and not name.startswith("_")]
        assert used
        assert {name for name in used if not hasattr(real, name)} <= {"names"}  # the stand-in's own
    assert hasattr(api.ExecutionContextAllocationStrategy, "USER_MANAGED")
    (tmp_path / "plan").write_bytes(b"no plan" * 100)
    with pytest.raises(KernelError, match=r"plan: tensorrt_rtx .*; a plan runs on the kind of GPU"):
        Session(api, [tmp_path / "plan"], CPU, CONTEXTS)
