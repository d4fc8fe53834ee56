"""Engine directories with TensorRT plans, how they load, and sessions against a module that runs nothing and enforces order."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.random_models import save_random_model
from torch import Tensor

from kvseek.builder.tensorrt.plans import limits_of
from kvseek.core.config import EngineConfig, TensorRtConfig
from kvseek.core.errors import EngineDirectoryError, KernelError
from kvseek.core.model_config import ModelConfig
from kvseek.core.streams import SideStream
from kvseek.engine.cache.memory_layout import Footprint
from kvseek.engine.loading import memory
from kvseek.engine.loading.indexes import IndexMaker
from kvseek.engine.loading.runtime import load_runtime
from kvseek.engine.tensorrt.plan_files import PLANS_FILE, check_version, read_plan_index
from kvseek.engine.tensorrt.session import Plan, Session

ALIGNMENT = 256
PROFILE = {"smallest": 1, "best": 2, "largest": 8}


class DataType(enum.Enum):
    FLOAT = 0
    BF16 = 1
    INT32 = 2
    UINT8 = 3


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class Strategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


class ILogger:
    Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3)

    def __init__(self) -> None:
        pass


class Context:
    """An execution context: wants memory, then shapes, then addresses, then a launch, and forgets no shape in between."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.memory: tuple[int, int] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.launches: list[tuple[int, dict[str, int], dict[str, tuple[int, ...]]]] = []

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        self.memory = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.engine.tensors[name][0] is TensorIOMode.INPUT
        self.shapes[name] = shape
        return "set_input_shape" not in self.engine.refuses

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        assert set(self.shapes) == set(self.engine.names(TensorIOMode.INPUT)), "shapes of outputs follow from inputs"
        return (self.shapes["x"][0], *self.engine.tensors[name][2][1:])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory
        assert memory % ALIGNMENT == 0
        self.addresses[name] = memory
        return "set_tensor_address" not in self.engine.refuses

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert self.memory is not None, "a context of its user's memory has none yet"
        assert set(self.shapes) == set(self.engine.names(TensorIOMode.INPUT))
        assert set(self.addresses) == set(self.engine.tensors)
        self.launches.append((stream_handle, dict(self.addresses), dict(self.shapes)))
        return "execute_async_v3" not in self.engine.refuses


class Engine:
    """A plan with input x [n, 4] and output y [n, 3], in float32. `refuses` names methods that fail."""

    def __init__(self, name: str = "segment_0", memory: int = 1000, refuses: tuple[str, ...] = ()) -> None:
        self.name, self.device_memory_size_v2, self.refuses = name, memory, refuses
        self.tensors: dict[str, tuple[TensorIOMode, DataType, tuple[int, ...]]] = {
            "x": (TensorIOMode.INPUT, DataType.FLOAT, (-1, 4)),
            "y": (TensorIOMode.OUTPUT, DataType.FLOAT, (-1, 3)),
        }
        self.contexts: list[Context] = []

    def names(self, mode: TensorIOMode) -> list[str]:
        return [name for name, (own, _, _) in self.tensors.items() if own is mode]

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self.tensors[name][0]

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.tensors[name][1]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        assert self.tensors[name][0] is TensorIOMode.INPUT, "profiles are about inputs"
        assert profile_index == 0
        return [[size, *self.tensors[name][2][1:]] for size in PROFILE.values()]

    def create_execution_context(self, strategy: Strategy) -> Context | None:
        assert strategy is Strategy.USER_MANAGED
        if "create_execution_context" in self.refuses:
            return None
        self.contexts.append(Context(self))
        return self.contexts[-1]


class FakeTensorRt:
    """The module. Its runtime takes the engines of `engines` for the contents of files, by their bytes."""

    ILogger, ExecutionContextAllocationStrategy = ILogger, Strategy

    def __init__(self, engines: dict[bytes, Engine] | None = None, name: str = "tensorrt_rtx") -> None:
        self.__name__, self.__version__ = name, "1.7.1"
        self.engines = engines or {}
        self.loggers: list[Any] = []

    def Runtime(self, logger: Any) -> FakeTensorRt:
        self.loggers.append(logger)
        return self

    def deserialize_cuda_engine(self, serialized: Any) -> Engine | None:
        engine = self.engines.get(bytes(serialized))
        if engine is None:
            self.loggers[-1].log(ILogger.Severity.ERROR, "not a plan of this GPU")
        return engine


def aligned(*shape: int, dtype: torch.dtype = torch.float32, beyond: int = 0) -> Tensor:
    """A tensor `beyond` bytes after an address that suits TensorRT; memory of the CPU rarely is at one."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros(size + 2 * ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT + beyond
    return memory[start : start + size].view(dtype).view(shape)


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


MODEL = ModelConfig("llama", 384, 96, 160, 3, 6, 2, 32, 1e-6, 1e4, 1024)
FORMS = {"engine": "tensorrt", "segments": "tensorrt_rtx"}


def make_config(form: str) -> EngineConfig:
    settings = TensorRtConfig(FORMS[form], form)
    sizes = {"max_batch_size": 3, "max_seq_len": 300, "max_input_len": 200, "prefill_chunk_tokens": 50}
    return EngineConfig(MODEL, "full", device="cuda", runtime="tensorrt", tensorrt=settings, **sizes)


def write(directory: Path, config: EngineConfig, **changes: Any) -> EngineConfig:
    """An index as the builder writes it, with changes, and files that a fake TensorRT takes for plans."""
    if config.tensorrt.form == "engine":
        files = ["rank0.engine"]
    else:
        files = [f"rank0/segment-{number:05}-of-00004.plan" for number in range(4)]
    most = {"engine": 200, "segments": 50}[config.tensorrt.form]
    document = {
        "module": config.tensorrt.module,
        "version": "1.7.1",
        "form": config.tensorrt.form,
        "dtype": config.dtype,
        "max_seq_len": config.max_seq_len,
        "limits": {"tokens": sizes(4, most), "rows": sizes(4, 4)},
        "segments": [{"file": file, "inputs": {}, "outputs": {}} for file in files],
    }
    for file in files:
        path = directory / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file.encode())
    (directory / PLANS_FILE).write_text(json.dumps(document | changes), encoding="utf-8")
    return config


def sizes(optimum: int, maximum: int, minimum: int = 1) -> dict[str, int]:
    return {"minimum": minimum, "optimum": optimum, "maximum": maximum}


@pytest.mark.parametrize("form", FORMS)
def test_an_index(form: str, tmp_path: Path) -> None:
    index = read_plan_index(tmp_path, write(tmp_path, make_config(form)))
    assert (index.module, index.form, index.version) == (FORMS[form], form, "1.7.1")
    assert index.limits.tokens.maximum == {"engine": 200, "segments": 50}[form]
    assert len(index.segments) == {"engine": 1, "segments": 4}[form]


WRONG_INDEX: dict[str, tuple[dict[str, Any], str]] = {
    "module": ({"module": "tensorrt"}, "module = 'tensorrt': must be 'tensorrt_rtx', by the engine's configuration"),
    "form": ({"form": "engine"}, "form = 'engine': must be 'segments'"),
    "dtype": ({"dtype": "float16"}, "dtype = 'float16': must be 'float32'"),
    "positions": ({"max_seq_len": 299}, "max_seq_len = 299: must be 300"),
    "plans": ({"segments": []}, "number of segments = 0: must be 4"),
    "chunk": (
        {"limits": {"tokens": sizes(4, 49), "rows": sizes(4, 4)}},
        r"limits.tokens = \(1, 49\): must hold 1 to 50",
    ),
    "bucket": ({"limits": {"tokens": sizes(3, 50), "rows": sizes(3, 3)}}, r"limits.rows = \(1, 3\): must hold 1 to 4"),
    "one": ({"limits": {"tokens": sizes(4, 50, 2), "rows": sizes(4, 4)}}, r"limits.tokens = \(2, 50\): must hold 1 to"),
    "order": (
        {"limits": {"tokens": sizes(51, 50), "rows": sizes(4, 4)}},
        r"is corrupt \(sizes = \(1, 51, 50\): must be 1 <= minimum <= optimum <= maximum",
    ),
    "key": ({"rank": 0}, "is corrupt .*unknown key 'rank'"),
    "type": ({"version": 10}, r"is corrupt \(.*version = 10: must be str"),
}


@pytest.mark.parametrize("case", WRONG_INDEX)
def test_an_index_of_something_else(case: str, tmp_path: Path) -> None:
    changes, message = WRONG_INDEX[case]
    config = write(tmp_path, make_config("segments"), **changes)
    with pytest.raises(EngineDirectoryError, match=f"rank0.plans.json:? ?.*{message}.*; build the engine again"):
        read_plan_index(tmp_path, config)


def test_a_prompt_of_one_call_needs_room_for_all_of_it(tmp_path: Path) -> None:
    limits = {"tokens": sizes(4, 199), "rows": sizes(4, 4)}
    config = write(tmp_path, make_config("engine"), limits=limits)
    with pytest.raises(EngineDirectoryError, match=r"limits.tokens = \(1, 199\): must hold 1 to 200"):
        read_plan_index(tmp_path, config)


def test_the_builders_limits_hold_the_largest_bucket() -> None:
    """Three requests run in a step of four."""
    found = limits_of(make_config("segments"))
    assert (found.tokens.maximum, found.rows.maximum) == (50, 4)


@pytest.mark.parametrize("text", ["", "[]", '["module"]', "[{}]", "3", '{"module": '])
def test_an_index_that_is_garbled(text: str, tmp_path: Path) -> None:
    config = write(tmp_path, make_config("segments"))
    (tmp_path / PLANS_FILE).write_text(text)
    with pytest.raises(EngineDirectoryError, match=r"rank0.plans.json is corrupt \(.*\); build the engine again"):
        read_plan_index(tmp_path, config)


def test_files_that_are_missing(tmp_path: Path) -> None:
    config = write(tmp_path, make_config("segments"))
    (tmp_path / "rank0/segment-00002-of-00004.plan").unlink()
    with pytest.raises(
        EngineDirectoryError, match=r"segment-00002-of-00004.plan is missing; build the engine again, or copy"
    ):
        read_plan_index(tmp_path, config)
    (tmp_path / PLANS_FILE).unlink()
    with pytest.raises(EngineDirectoryError, match=r"rank0.plans.json is missing; build the engine again, or copy"):
        read_plan_index(tmp_path, config)


def test_another_version_of_tensorrt(tmp_path: Path) -> None:
    index = read_plan_index(tmp_path, write(tmp_path, make_config("segments"), version="1.7.0"))
    api: Any = FakeTensorRt()
    message = (
        r"version = '1\.7\.0': must be '1\.7\.1', .* pip install tensorrt-rtx-cu13==1\.7\.0, or build the engine again"
    )
    with pytest.raises(EngineDirectoryError, match=message):
        check_version(index, api)


def test_a_module_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path, make_config("engine"))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(KernelError, match=r"cannot import tensorrt: .*pip install tensorrt-cu13"):
        load_runtime(tmp_path, config, CPU)


def test_plans_leave_less_room_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch knows nothing of the plans' weights, which are gone from what is free; their work space it has allocated."""
    config = make_config("segments")
    for name, value in (("mem_get_info", (9 << 30, 0)), ("memory_allocated", 5000), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    monkeypatch.setattr(memory, "make_without_rows", lambda *arguments: None)
    kernels: Any = type("Kernels", (), {"device": CPU})
    maker = IndexMaker(config, {}, None, kernels)
    rows = {}
    for name, footprint in {
        "none": Footprint(0),
        "torch": Footprint(1000),
        "plans": Footprint(1000, outside=1000, plan_work=3000),
    }.items():
        rows[name] = memory.divide_device_memory(maker, footprint).device_row_bytes
    assert rows["none"] - rows["torch"] == 1000
    assert rows["none"] - rows["plans"] == 3000


def test_an_index_that_the_builder_wrote(tmp_path: Path) -> None:
    """Three requests, so a bucket of four: what `kvseek build` writes is read, and is of the installed TensorRT."""
    api = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13")
    from kvseek.builder.checkpoints.open import open_checkpoint
    from kvseek.builder.checkpoints.weights import weight_reader
    from kvseek.builder.tensorrt.plans import write_plans

    checkpoint = open_checkpoint(save_random_model(tmp_path / "model", "qwen3"))
    config = dataclasses.replace(make_config("segments"), model=checkpoint.config)
    (tmp_path / "engine").mkdir()
    write_plans(api, config, weight_reader(checkpoint, torch.float32), tmp_path / "engine")
    index = read_plan_index(tmp_path / "engine", config)
    check_version(index, api)
    assert [set(entry.outputs) for entry in index.segments][-1] == {"logits"}
