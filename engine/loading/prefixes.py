"""Opens the prefixes on disk of an engine that is loaded (docs/conversations.md)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.manifest import read_manifest
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.prefixes.file import Origin, RowShape
from kvseek.engine.cache.prefixes.folder import DEFAULT_DISK_BYTES, open_folder
from kvseek.engine.cache.prefixes.store import PrefixStore
from kvseek.engine.cache.reuse import reuses_prefixes, why_no_reuse

TENSORS = ".safetensors"  # weights and codebooks of an engine directory
ROW_FIELDS = ("sink", "local", "update", "full_threshold", "cached_prefill")  # of CacheConfig: what tokens attend to


@dataclass(frozen=True)
class DiskSettings:
    """Where prefixes are kept on disk, and how many bytes of them; no field of an engine, but of a process that loads it.

    Attributes
    ----------
    directory : Path or None
        None: prefixes are kept in memory alone.
    most_bytes : int or None
        Most bytes of an engine's files there; None: DEFAULT_DISK_BYTES.

    Raises
    ------
    ConfigError
        If `most_bytes` is below 1, or given without a directory.
    """

    directory: Path | None = None
    most_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.most_bytes is None:
            return
        if self.directory is None:
            raise ConfigError(f"disk_bytes = {self.most_bytes}: must be left out without disk_dir, or give that too")
        if self.most_bytes < 1:
            raise ConfigError(f"disk_bytes = {self.most_bytes}: must be > 0; {DEFAULT_DISK_BYTES} is the default")


def check_disk(config: EngineConfig, disk: DiskSettings) -> None:
    """Raise ConfigError if an engine cannot keep prefixes on disk as it is asked to."""
    if disk.directory is not None and not reuses_prefixes(config):
        raise ConfigError(
            f"disk_dir = {str(disk.directory)!r}: must be left out, as the engine keeps no prefixes; {why_no_reuse(config)}"
        )
    if disk.directory is not None and config.cache.row_dtype != "auto":
        raise ConfigError(
            f"disk_dir = {str(disk.directory)!r}: must be left out with cache.row_dtype = {config.cache.row_dtype!r}, as rows of "
            "8 bits are not written to disk yet; or build with --cache.row_dtype auto"
        )
    if disk.directory is not None and config.model.delta_net is not None:
        raise ConfigError(
            f"disk_dir = {str(disk.directory)!r}: must be left out with Gated DeltaNet layers, whose states are written "
            "to no disk"
        )
    if disk.directory is not None and config.tp_size > 1:
        raise ConfigError(
            f"disk_dir = {str(disk.directory)!r}: must be left out with tp_size = {config.tp_size}, as ranks keep no prefixes "
            "on disk yet; or use an engine that is built with --tp_size 1"
        )


def open_prefixes(engine_dir: Path, config: EngineConfig, cache: Cache, disk: DiskSettings) -> PrefixStore | None:
    """Open the prefixes of an engine on disk; None if it keeps none there.

    Raises
    ------
    ConfigError
        If the directory cannot be used, another process uses it with this engine, or the files of one extent do not fit; or if
        rows lie on a device.
    """
    if disk.directory is None:
        return None
    if on_device := cache.rows.layout.device_layers:
        raise ConfigError(
            f"disk_dir = {str(disk.directory)!r}: must be left out with the rows of {on_device} layers on the device, which are "
            "not written to disk: leave it out, or build with --cache.offload always and a method that is sparse in all layers"
        )
    pool, most = cache.rows.pool.rows, disk.most_bytes or DEFAULT_DISK_BYTES
    model = read_manifest(engine_dir).source_model
    return PrefixStore(
        open_folder(
            disk.directory, most, Origin(digest(engine_dir, config), model, config.method), RowShape.of(config)
        ),
        pool,
        cache.window.device,
    )


def digest(engine_dir: Path, config: EngineConfig) -> str:
    """Return a digest of what an engine's rows depend on, 32 hexadecimal digits.

    These are its weights, codebooks and model, and what prompts and decode steps attend to, as rows depend on that.
    Sizes of batches and pools do not matter, nor do the compiled kernels, which differ by rounding.
    """
    files = {name: one.sha256 for name, one in read_manifest(engine_dir).files.items() if name.endswith(TENSORS)}
    document = {
        "files": files,
        "model": dataclasses.asdict(config.model),
        "dtype": config.dtype,
        "weight_only_precision": config.weight_only_precision,
        "weight_formats": config.weight_formats,
        "method": [config.method, config.method_config],
        "cache": [getattr(config.cache, name) for name in ROW_FIELDS],
    }
    if config.prefill_precision != "none":
        document["prefill_precision"] = config.prefill_precision
    if config.prefill_attention != "dense":
        document["prefill_attention"] = [config.prefill_attention, dataclasses.asdict(config.block_sparse)]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]
