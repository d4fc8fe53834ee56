"""The examples of docs/python.md run as they stand there, and print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT

from kvseek import engine_cache

BLOCKS = re.compile(r"^```python\n(.*?)^```\n(?:```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.model
@pytest.mark.slow
def test_the_examples_print_what_they_say(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(engine_cache, "default_cache_dir", lambda: tmp_path)  # not the folder of whoever runs the tests
    blocks = BLOCKS.findall((ROOT / "docs/python.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 8
    names: dict[str, Any] = {}
    for code, printed in blocks:
        exec(compile(code, "docs/python.md", "exec"), names)
        assert capsys.readouterr().out == printed, code
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1  # an engine is built once
