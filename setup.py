"""Which folders are packages: `kvseek`, and below it every other folder with an __init__.py but tests.

All else is in pyproject.toml.
The folders are scanned, so that a new method's folder is never left out of a wheel; pyproject.toml alone can only list
packages that lie inside their parent's folder, and `kvseek.core` lies beside `kvseek`.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PACKAGE = Path("kvseek")
NOT_BELOW = {PACKAGE, Path("tests")}
FOLDERS = sorted({path.parent.relative_to(ROOT) for path in ROOT.glob("[a-z]*/__init__.py")} - NOT_BELOW)
PACKAGES = sorted(path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py"))

setup(
    packages=["kvseek", *(".".join(("kvseek", *package.parts)) for package in PACKAGES)],
    package_dir={"kvseek": "kvseek"} | {f"kvseek.{folder}": str(folder) for folder in FOLDERS},
)
