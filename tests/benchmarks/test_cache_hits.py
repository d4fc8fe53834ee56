"""The benchmark of rows kept on the device, on stand-ins for what needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.benchmarks.bench_stand_ins import Event, FakeIndex, FakeStep, fake_needs
from torch import Tensor

from kvseek.benchmarks import device_cache_hits, device_contestants, device_setup, shapes
from kvseek.core import cuda
from kvseek.core.config import ModelConfig
from kvseek.engine import graphs, loading
from kvseek.plugins.selection import DeviceSelection

SHAPE = ModelConfig("llama", 100, 64, 96, 2, 4, 2, 16, 1e-5, 1e4, 512)
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


class FakeAttention:
    """Counts rows that the step before had, as the kernel does, for selections in any order."""

    def __init__(self, hot: bool) -> None:
        self.hot_rows = object() if hot else None
        self.counters: Tensor | None = None
        self.before: Tensor | None = None

    def forget(self, slot: int) -> None:
        self.before = None

    def launch(
        self,
        queries: Tensor,
        batch: Any,
        window: Tensor,
        pointer: int,
        stride: int,
        selection: DeviceSelection,
        on_host: bool,
    ) -> Tensor:
        if batch.requests[0, 8]:
            return queries
        assert self.counters is not None
        rows = selection.rows[0]
        found = 0
        if self.hot_rows is not None and self.before is not None:
            found = int((rows[..., :, None] == self.before[..., None, :]).any(-1).sum())
        self.counters += torch.tensor([found, rows.numel() - found])
        self.before = rows
        return queries


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapped(indexes: list[Any]) -> list[FakeIndex]:
        fakes = [FakeIndex(index) for index in indexes]
        for fake in fakes:
            fake.bind(fake.inner.rows)
        return fakes

    def attentions(
        config: Any, kernels: Any, indexes: list[Any], table: Tensor, dtype: Any, hot_from: int
    ) -> list[FakeAttention]:
        assert hot_from in (0, device_cache_hits.LAYERS)
        return [FakeAttention(hot_from == 0 and config.method == "pariskv") for _ in indexes]

    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(cuda, "cuda_device", lambda: CPU)
    monkeypatch.setattr(graphs, "DecodeStep", FakeStep)
    monkeypatch.setattr(loading, "device_indexes", wrapped)
    monkeypatch.setattr(loading, "needs_cpu_library", lambda config: False)
    monkeypatch.setattr(device_setup, "measured_needs", fake_needs)
    monkeypatch.setattr(device_setup.Bench, "kernels", lambda self, variant: None)
    monkeypatch.setattr("kvseek.engine.graphed_decoder.make_attentions", attentions)
    gpu = {"name": "stand-in", "memory_bytes": 1, "multiprocessors": 1, "cuda": "0"}
    monkeypatch.setattr(device_cache_hits, "describe_gpu", lambda device: gpu)
    monkeypatch.setattr(device_contestants, "timing_event", lambda in_graph=False: Event())
    monkeypatch.setattr(device_contestants, "elapsed_seconds", lambda start, end: (end.at - start.at) * 1e-6)
    monkeypatch.setattr(device_cache_hits, "stage_stream", lambda device: None)
    for name in ("set_device", "synchronize", "empty_cache", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 4 << 30))


def test_rows_found_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results" / "hits.json"
    flags = ["--shape", "tiny", "--context", "4096", "--budget", "60", "--steps", "12", "--output", str(output)]
    assert device_cache_hits.main([*flags, "--methods", "pariskv,clusterkv:cache_steps=0"]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    hot, cold, other = document["results"]
    names = ["pariskv hot", "pariskv", "clusterkv:cache_steps=0"]
    assert [entry["name"] for entry in (hot, cold, other)] == names
    assert 0.2 < hot["hit_rate"] < 1, "neighbouring steps look for the same topic"
    assert cold["hit_rate"] == other["hit_rate"] == 0
    for entry in (hot, cold, other):
        assert entry["samples"] == pytest.approx([1e-6] * 12)
        assert entry["speed_up"] == pytest.approx(1)
    assert document["methods"]["pariskv"]["settings"]["top_k"] == 60
    printed = capsys.readouterr().out
    assert all(text in printed for text in (*names, "60 rows", "found on the device")), printed


def test_speed_ups_are_over_the_same_method_without_a_cache() -> None:
    def entry(method: str, hits: float, median: float) -> dict[str, Any]:
        return {"method": method, "hit_rate": hits, "layer_seconds": {"median": median}}

    results = [entry("a", 0.6, 10e-6), entry("a", 0.0, 25e-6), entry("b", 0.0, 7e-6)]
    device_cache_hits.add_speed_ups(results)
    assert [one["speed_up"] for one in results] == pytest.approx([2.5, 1, 1])


BAD = {
    "context": (["--methods", "pariskv", "--context", "100"], "--context = 100: must be between 4096 and"),
    "steps": (["--methods", "pariskv", "--steps", "241"], "--steps = 241: must be between 1 and 240"),
    "dense": (["--methods", "full"], "full: unknown key 'top_k'"),
    "memory": (["--methods", "pariskv", "--shape", "tiny", "--host_gib", "0.0001"], "rows in host memory exceed"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, message = BAD[case]
    assert device_cache_hits.main(flags) == 1
    assert message in capsys.readouterr().err
