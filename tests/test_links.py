"""Links between the documents: the file is there, and has the heading that a link names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.conftest import ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/*.md", "plugins/*/README.md", "kernels/**/README.md", "bench/**/*.md")
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
