"""`kvseek build --inspect` and `--verify`: an engine directory by its JSON files alone, and its files beside the manifest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvseek.builder.calibration import CALIBRATION_FILE, Calibration
from kvseek.builder.flags import LIMITS
from kvseek.builder.printing import print_json, table
from kvseek.builder.weight_storage import weight_storage
from kvseek.core.command_line import readable
from kvseek.core.config import FORMAT_VERSION, CacheConfig, check_format, read_config
from kvseek.core.cpu_library import LIBRARY_FILE
from kvseek.core.cuda import cubin_architectures
from kvseek.core.manifest import MANIFEST_FILE, Fault, find_faults, read_manifest
from kvseek.engine.cache.reuse import reuses_prefixes
from kvseek.engine.model.cuda.attention import expected_attention
from kvseek.engine.parallel.cuda.sums import expected_sums
from kvseek.plugins.registry import get_method, method_traits


def print_engine(directory: Path, console: Console, as_json: bool = False) -> None:
    """Print an engine directory; raises EngineDirectoryError or ConfigError if it is none, or incomplete."""
    document = engine_document(directory)
    if as_json:
        print_json(document)
        return
    console.print(
        f"{directory}: {document['method']} engine of {document['source_model']}, built by "
        f"kvseek {document['kvseek_version']}, format {document['format_version']}",
        soft_wrap=True,
    )
    names = (
        "dtype",
        "weight_only_precision",
        "weight_group",
        "quantize_lm_head",
        "device",
        "kernels",
        "runtime",
        "prompt_attention",
        "prefix_reuse",
        "rank_sums",
        *LIMITS,
    )
    described = [(name, _text(document[name])) for name in names]
    model = [(name, _text(value)) for name, value in document["model"].items() if value not in (None, False)]
    console.print(table("Engine", ("", "left"), ("value", "left"), rows=described))
    console.print(table("Model", ("", "left"), ("value", "left"), rows=model))
    for part in weight_storage(read_config(directory)).tables(directory):
        console.print(part)
    for title, name in ((f"Method {document['method']}", "method_config"), ("Cache", "cache")):
        console.print(_fields_table(title, document[name], document["changed"][name]))
    if document["calibration"] is not None:
        Calibration.load(directory).print(console)
    files = [(name, readable(size)) for name, size in document["files"].items()]
    total = readable(sum(document["files"].values()))
    console.print(table(f"Files, {total}", ("file", "left"), ("size", "right"), rows=files))
    console.print("Sizes are the manifest's; kvseek build --verify DIR checks the files.")


def engine_document(directory: Path) -> dict[str, Any]:
    """Describe the directory in JSON values; `changed` lists the fields that differ from the defaults."""
    config, manifest = read_config(directory), read_manifest(directory)
    method = get_method(config.method)
    defaults = {
        "method_config": dataclasses.asdict(method.configure({})),
        "cache": dataclasses.asdict(CacheConfig(**method.traits().cache_defaults)),
    }
    document: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    changed = {
        part: [name for name, value in document[part].items() if value != json.loads(json.dumps(own.get(name)))]
        for part, own in defaults.items()
    }
    compiled = [f"sm_{arch}" for arch in cubin_architectures(directory)] + ["cpu"] * (
        str(LIBRARY_FILE) in manifest.files
    )
    calibration = Calibration.load(directory) if CALIBRATION_FILE in manifest.files else None
    return {
        "format_version": FORMAT_VERSION,
        "kvseek_version": manifest.kvseek_version,
        "source_model": manifest.source_model,
        **document,
        "kernels": compiled if config.kernels == "native" else [config.kernels],
        "prompt_attention": expected_attention(config),
        "prefix_reuse": method_traits(config).prefix_reuse if reuses_prefixes(config) else "off",
        "rank_sums": expected_sums(config),
        "changed": changed,
        "plans": weight_storage(config).describe(directory),
        "calibration": None if calibration is None else dataclasses.asdict(calibration),
        "files": {name: record.size for name, record in sorted(manifest.files.items())},
    }


def _fields_table(title: str, fields: dict[str, Any], changed: list[str]) -> Any:
    rows = [(name, _text(value), "not the default" * (name in changed)) for name, value in fields.items()]
    return table(title, ("field", "left"), ("value", "left"), ("", "left"), rows=rows)


def _text(value: Any) -> str:
    """Write a JSON value as a cell: numbers with separated thousands, lists of names with commas."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def print_faults(directory: Path, console: Console) -> int:
    """Check a directory with a progress bar, list its faults; returns 0 if there are none, else 1.

    Raises
    ------
    EngineDirectoryError
        The engine is of another format version, or the manifest itself is missing or malformed.
    """
    check_format(directory)
    manifest = read_manifest(directory)
    total = sum(record.size for record in manifest.files.values())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    bar = Console(stderr=True)
    with Progress(*columns, console=bar, transient=True, disable=not bar.is_terminal) as progress:
        task = progress.add_task("check files", total=total)
        faults = list(find_faults(directory, manifest.files, lambda amount: progress.advance(task, amount)))
    present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    faults += [Fault(name, "foreign") for name in sorted(present - set(manifest.files) - {MANIFEST_FILE})]
    for fault in faults:
        console.print(f"{fault.kind:8} {fault.name}{': ' * bool(fault.detail)}{fault.detail}", soft_wrap=True)
    if not faults:
        told = f"{directory}: {len(manifest.files)} files, {readable(total)}, as kvseek build wrote them"
        console.print(told, soft_wrap=True)
        return 0
    remedy = "build the engine again, or copy it again from where it was built, and delete what is foreign"
    console.print(
        f"{directory}: {len(faults)} of its files are not as kvseek build wrote them; {remedy}", soft_wrap=True
    )
    return 1
