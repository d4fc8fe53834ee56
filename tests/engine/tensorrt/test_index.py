"""Engine directories with TensorRT plans: what their index says, how they load, what memory they are given."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tensorrt.fake_tensorrt import FakeTensorRt
from tests.support.random_models import save_random_model

from kvseek.builder.tensorrt.plans import limits_of
from kvseek.core.config import EngineConfig, ModelConfig, TensorRtConfig
from kvseek.core.errors import EngineDirectoryError, KernelError
from kvseek.engine.cache.memory_layout import Footprint
from kvseek.engine.loading import memory
from kvseek.engine.loading.indexes import IndexMaker
from kvseek.engine.loading.runtime import load_runtime
from kvseek.engine.tensorrt.plan_files import PLANS_FILE, check_version, read_plan_index

CPU = torch.device("cpu")
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


WRONG: dict[str, tuple[dict[str, Any], str]] = {
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


@pytest.mark.parametrize("case", WRONG)
def test_an_index_of_something_else(case: str, tmp_path: Path) -> None:
    changes, message = WRONG[case]
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
