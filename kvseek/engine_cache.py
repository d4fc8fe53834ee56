"""Finds the engine directory for a user's name of a model: an existing one, or one that is built once into a cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvseek.builder.compile.shared import cache_folder
from kvseek.core.config import CONFIG_FILE
from kvseek.core.errors import ConfigError, EngineDirectoryError
from kvseek.core.manifest import MANIFEST_FILE, read_manifest

if TYPE_CHECKING:
    from kvseek.builder.options import BuildOptions

DEFAULT_METHOD = "nested"
DIGEST_CHARACTERS = 16  # characters of the digest in a folder's name
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # organisation/model, as on the Hugging Face hub


@dataclass(frozen=True)
class EngineSource:
    """Source of an LLM's engine: an engine directory, or an entry of the cache.

    Attributes
    ----------
    directory : Path
        The engine directory.
    options : BuildOptions or None
        Options to build an entry of the cache with; None if the user named an engine directory.
    """

    directory: Path
    options: BuildOptions | None = None

    def build(self) -> None:
        """Build the entry of the cache, unless it is intact; progress goes to stderr. Raises as `build_engine` does.

        Processes that build the same entry take turns, so that the second process finds the engine that the first has built.
        """
        from kvseek.builder.build import build_engine

        assert self.options is not None
        with _locked(self.directory):
            if self.directory.is_dir() and not (self.directory / MANIFEST_FILE).is_file():
                shutil.rmtree(self.directory)  # left over by a cleaner of caches; the builder would not replace it
            build_engine(self.options)


def engine_source(
    model: str | os.PathLike[str],
    options: dict[str, Any],
    cache_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> EngineSource:
    """Find or build the engine of a model.

    Parameters
    ----------
    model : str or path
        An engine directory, a checkpoint, or a name on the Hugging Face hub whose files are in Hugging Face's cache.
    options : dict of str to Any
        Build options that were given, by the names of `kvseek build`'s flags (builder/options.py).
    cache_dir : path, optional
        Folder of built engines; None: ``$XDG_CACHE_HOME/kvseek/engines``, or ``~/.cache/kvseek/engines``.
    quiet : bool
        Print no progress of building.

    Raises
    ------
    ConfigError
        If there is no such model, the builder does not support it, or an option is unknown, out of range, or
        given for an engine directory, which has its own.
    KernelError
        If the kernels cannot be compiled.
    """
    path = Path(model).expanduser()
    if _is_engine_directory(path):
        given = options | ({} if cache_dir is None else {"cache_dir": str(cache_dir)})
        if given:
            name, value = next(iter(given.items()))
            raise ConfigError(
                f"{name} = {value!r}: must be left out with an engine directory, which was built with options of its own "
                f"(kvseek build --inspect {path}); or give the checkpoint instead of {str(path)!r}"
            )
        return EngineSource(path)
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    return _cached_engine(str(model), _checkpoint(str(model), path), options | {"quiet": quiet}, folder)


def default_cache_dir() -> Path:
    """Return the folder for engines that Python programs build."""
    return cache_folder() / "engines"


def _is_engine_directory(path: Path) -> bool:
    """Whether kvseek wrote a directory, complete or not."""
    if (path / MANIFEST_FILE).is_file():
        return True
    try:
        document = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the builder says what is wrong with it
    return isinstance(document, dict) and "format_version" in document


def _checkpoint(model: str, path: Path) -> Path:
    """Find the path of a checkpoint, which may be a snapshot in Hugging Face's cache; raises ConfigError."""
    if path.exists() or not HUB_NAME.fullmatch(model):
        return path  # of one that does not exist the builder says so
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(str(snapshot_download(model, local_files_only=True)))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            f"model = {model!r}: is neither a path nor a model in Hugging Face's cache, {constants.HF_HUB_CACHE}; "
            f"download it with `hf download {model}`, or give the path of a checkpoint"
        ) from None


def _cached_engine(model: str, checkpoint: Path, given: Mapping[str, Any], folder: Path) -> EngineSource:
    """Return the cache's entry for a checkpoint and options; builds it if it is not there."""
    from kvseek.builder.build import engine_fingerprint
    from kvseek.builder.options import build_options

    values = {"method": DEFAULT_METHOD, **given, "model": checkpoint, "output_dir": folder}
    if "tokenizer" in values:
        values["tokenizer"] = Path(values["tokenizer"]).expanduser()
    options = build_options(values)
    fingerprint = engine_fingerprint(options)
    # The fingerprint compares files by name, size and time. These may be equal for two models, but their paths differ.
    digest = hashlib.sha256(f"{checkpoint.resolve()}\0{fingerprint}".encode()).hexdigest()[:DIGEST_CHARACTERS]
    name = f"{Path(model).name or 'model'}-{options.method}-{digest}"
    source = EngineSource(folder / name, replace(options, output_dir=folder / name))
    if not _is_built(source.directory, fingerprint):
        source.build()
    return source


def _is_built(directory: Path, fingerprint: str) -> bool:
    """Whether an engine of this fingerprint is there. Its files are checked when it is loaded."""
    try:
        return read_manifest(directory).fingerprint == fingerprint
    except EngineDirectoryError:
        return False


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other processes and threads from building the same entry; the lock of a process that dies is gone with it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{directory} is being built by another process: waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
