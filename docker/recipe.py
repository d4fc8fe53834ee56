"""What the Dockerfile says about one of its targets, for docker/check_install.py and the tests."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser

INSTALLER = "/source/docker/install.py"


@dataclass(frozen=True)
class Step:
    """A RUN instruction that calls the installer.

    Attributes
    ----------
    command : str
        Without its mounts.
    files : list of (str, str)
        What it sees: path in the checkout, path below /source.
    """

    command: str
    files: list[tuple[str, str]]


@dataclass(frozen=True)
class Recipe:
    """A target of a Dockerfile: its instructions (name, value) in order, and the files of stage `source`."""

    instructions: list[tuple[str, str]]
    sources: list[tuple[str, str]]

    @classmethod
    def read(cls, dockerfile: Path, target: str) -> Recipe:
        """Read a target; raises KeyError if the file has no such stage."""
        stages = read_stages(dockerfile)
        copied = []
        for name, value in stages["source"]:
            if name == "COPY":
                *paths, folder = value.split()
                many = folder.endswith("/")  # a folder to copy into, else the copy's own name
                copied += [(path, (folder + Path(path).name if many else folder).lstrip("/")) for path in paths]
        return cls(stages[target], copied)

    def values(self, name: str) -> list[str]:
        """Values of all instructions of that name."""
        return [value for found, value in self.instructions if found == name]

    @property
    def install_steps(self) -> list[Step]:
        """What installs the project."""
        return [self._step(value) for value in self.values("RUN") if INSTALLER in value]

    def _step(self, value: str) -> Step:
        mounts = re.findall(r"--mount=(\S+)", value)
        files: list[tuple[str, str]] = []
        for mount in mounts:
            options = dict(pair.split("=") for pair in mount.split(",") if "=" in pair)
            if options.get("from") == "source":
                files += self.sources
            else:
                files.append((options["source"], options["target"].removeprefix("/source/")))
        return Step(re.sub(r"--mount=\S+\s*", "", value).strip(), files)

    @property
    def command(self) -> list[str]:
        """ENTRYPOINT and CMD."""
        (entry,), (arguments,) = self.values("ENTRYPOINT"), self.values("CMD")
        return [*json.loads(entry), *json.loads(arguments)]

    @property
    def healthcheck(self) -> list[str]:
        """Command of HEALTHCHECK."""
        (value,) = self.values("HEALTHCHECK")
        command: list[str] = json.loads(value.partition("CMD")[2])
        return command

    @property
    def healthcheck_options(self) -> dict[str, str]:
        """Options of HEALTHCHECK, such as {"--interval": "10s"}."""
        (value,) = self.values("HEALTHCHECK")
        return dict(option.split("=") for option in shlex.split(value.partition("CMD")[0]))


def read_stages(dockerfile: Path) -> dict[str, list[tuple[str, str]]]:
    """Instructions of every stage, its FROM included, by the stage's name."""
    stages: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for entry in DockerfileParser(str(dockerfile)).structure:
        if entry["instruction"] == "COMMENT":
            continue
        if entry["instruction"] == "FROM":
            name = entry["value"].split()[-1]
        stages.setdefault(name, []).append((entry["instruction"], entry["value"]))
    return stages
