"""Which folders are packages: each with an __init__.py, below the namespace package kvseek. All else is in pyproject.toml.

A scan, so that a new method's folder is never left out of a wheel; pyproject.toml alone can only list packages that lie in
a folder of their namespace's name.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
FOLDERS = sorted(
    path.parent.relative_to(ROOT) for path in ROOT.glob("[a-z]*/__init__.py") if path.parent.name != "tests"
)
PACKAGES = sorted(path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py"))

setup(
    packages=[".".join(("kvseek", *package.parts)) for package in PACKAGES],
    package_dir={f"kvseek.{folder}": str(folder) for folder in FOLDERS},
)
