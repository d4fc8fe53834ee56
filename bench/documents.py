"""Write the tables and pictures of measured figures into the documents, from the files of bench/results.

    make tables                                 # or: python -m kvseek.bench.documents
    python -m kvseek.bench.documents --check    # writes nothing; status 1 if a document would change

In a document a table stands between `<!-- table: NAME -->` and `<!-- end -->`; the modules of tables/ have the names, and
what each shows. Below its cells stand its result files, with machine and commit; those of the summary stand below the tables that
it sums up. A new table is a function there and two such lines.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvseek.bench.charts import load, steps
from kvseek.bench.output import markdown
from kvseek.bench.tables import answers, cpu, losses, papers, prompts, ranks, served, summary
from kvseek.bench.tables import steps as gpu_steps
from kvseek.bench.tables.results import FOLDER, ROOT, Results, TableError
from kvseek.bench.tables.summary import SUMMARY
from kvseek.core.command_line import tells_errors

DOCUMENTS = ("README.md", "docs/*.md", "plugins/*/README.md", "bench/**/README.md")
BLOCK = re.compile(r"^<!-- table: (?P<name>[^\n]*) -->\n(?P<old>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^<!-- (?:table:.*|end) -->$", re.MULTILINE)
ROOMS = (summary, gpu_steps, prompts, answers, losses, ranks, cpu, served, papers)
TABLES = {name: table for room in ROOMS for name, table in room.TABLES.items()}
STEPS = ("methods-h200", "decode-512k-h200")
LOAD = "load-cpu-smollm2"


def _steps(results: Results) -> str:
    return steps.draw(steps.chart([results.folder / f"{name}.json" for name in STEPS if results(name)]))


def _load(results: Results) -> str:
    return load.draw(results(LOAD), f"{LOAD}.json")


PICTURES: Mapping[str, Callable[[Results], str]] = {"docs/decode-step.svg": _steps, "docs/load.svg": _load}


def sources(results: Results, folder: Path) -> str:
    """The files that `results` have been read from, with links from `folder`; those of one machine and commit together."""
    origins: dict[str, list[str]] = {}
    for name, document in results.read.items():
        link = Path(os.path.relpath(FOLDER / f"{name}.json", folder)).as_posix()
        origins.setdefault(origin(document), []).append(f"[{name}]({link})")
    return "Result files: " + "; ".join(f"{', '.join(files)} ({where})" for where, files in origins.items()) + "."


def origin(document: dict[str, Any]) -> str:
    """Where a result is from: machines and code.

    A file tells the commit of the checkout that measured. Where the code was committed only later, the entry "code" tells it.
    """
    machines = document.get("machines") or [document["machine"]]
    found = dict.fromkeys(_machine(machine, document) for machine in machines)
    commits = dict.fromkeys(str(machine["commit"])[:7] for machine in machines)
    return f"{', '.join(found)}; commit {document.get('code') or ', '.join(commits)}"


def _machine(machine: dict[str, Any], document: dict[str, Any]) -> str:
    gpu = machine.get("gpu") or document.get("gpu")
    count = document.get("gpus", 1)
    if gpu:
        return f"{count} × {gpu['name']}" if count > 1 else str(gpu["name"])
    used, cores = machine["threads"], machine["cores"]
    return f"{cores if used == cores else f'{used} of {cores}'} cores of {machine['cpu']}"


def table(name: str, document: Path, results_folder: Path = FOLDER) -> str:
    """What stands between the marks of a table in a document; raises TableError for a name that there is not."""
    if name not in TABLES:
        raise TableError(f"{document}: table: {name}: must be one of {', '.join(TABLES)}")
    results = Results(results_folder)
    lines = markdown(list(TABLES[name](results)))
    return f"{lines}\n" if name == SUMMARY else f"{lines}\n\n{sources(results, document.parent)}\n"


def written(text: str, document: Path, results_folder: Path = FOLDER) -> str:
    """A document's text with its tables as the result files have them; raises TableError for marks that do not fit."""
    new = BLOCK.sub(
        lambda found: f"<!-- table: {found['name']} -->\n{table(found['name'], document, results_folder)}<!-- end -->",
        text,
    )
    if any(MARK.search(block["old"]) for block in BLOCK.finditer(text)) or len(MARK.findall(text)) != 2 * len(
        BLOCK.findall(text)
    ):
        raise TableError(f"{document}: a line <!-- table: NAME --> must be followed by a line <!-- end --> of its own")
    return new


def outputs() -> Iterator[tuple[Path, str]]:
    """Documents and pictures, and what they are to be."""
    for pattern in DOCUMENTS:
        for document in sorted(ROOT.glob(pattern)):
            yield document, written(document.read_text(encoding="utf-8"), document)
    for name, paint in PICTURES.items():
        yield ROOT / name, paint(Results())


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Write what differs, and print its name; returns 0, or 1 after an error or, with --check, if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if anything would change")
    check = parser.parse_args(argv).check
    changed = [
        (path, text) for path, text in outputs() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in changed:
        if check:
            print(f"{path.relative_to(ROOT)} differs from its result files: run make tables", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return int(check and bool(changed))


if __name__ == "__main__":
    raise SystemExit(main())
