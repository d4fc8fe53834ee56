"""What documents say of the tree holds: links, and the examples of docs/python.md; and they stay short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT

from kvseek import engine_cache

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/*.md", "plugins/**/README.md", "kernels/**/README.md", "bench/**/*.md")
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md"  # its links led to the documents of their time
]


def anchors(path: Path) -> set[str]:
    """Of a document's headings, as GitHub names them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in LINK.findall(CODE.sub("", document.read_text(encoding="utf-8"))):
        if not re.match(r"https?:|mailto:", link):
            name, _, anchor = link.partition("#")
            target = (document.parent / name).resolve() if name else document
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                broken.append(link)
    assert broken == []


MOST_WORDS = {  # of all documents of a pattern together, as `wc -w` counts them
    "README.md": 1_300,
    "docs/*.md": 40_000,
    "plugins/*/README.md": 7_500,
    "plugins/peers/*/README.md": 1_500,
    "kernels/**/README.md": 2_800,
    "bench/**/README.md": 3_800,
}


@pytest.mark.parametrize("pattern", MOST_WORDS)
def test_documents_are_short_enough_to_be_read(pattern: str) -> None:
    words = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").split()) for path in ROOT.glob(pattern)
    }
    most = MOST_WORDS[pattern]
    assert 0 < sum(words.values()) <= most, f"{pattern}: {sum(words.values())} words, must be at most {most}: {words}"


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
