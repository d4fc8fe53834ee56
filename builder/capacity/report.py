"""The report of `kvseek build --plan`: one document, printed as tables or as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.options import FitOptions
from kvseek.builder.printing import Column, print_json, table
from kvseek.core.command_line import readable
from kvseek.core.config import EXTENT_TOKENS
from kvseek.engine.cache.memory_layout import MemoryLayout
from kvseek.engine.loading.memory import HOPPER
from kvseek.engine.parallel.cuda.sums import NCCL_BYTES, symmetric_bytes

from .fit import Attempt, FitSearch, Most

Document = dict[str, Any]
GIB = 1 << 30


def print_fit(options: FitOptions, console: Console) -> None:
    """Find what fits, and print it; raises ConfigError as FitSearch does, and as open_checkpoint."""
    document = fit_document(options)
    if options.as_json:
        print_json(document)
        return
    model, engine = document["model"], document["engine"]
    where = f"cache.offload {document['cache']['offload']}" if document["device"] == "cuda" else "device cpu"
    ranks = f"; sizes are those of each of {options.tp_size} ranks" * (options.tp_size > 1)
    head = " with quantize_lm_head" * document["quantize_lm_head"]
    console.print(
        f"{options.model.name}: {model['architecture']}, {model['num_layers']} layers, {model['num_heads']} query and "
        f"{model['num_kv_heads']} KV heads of {model['head_dim']} channels; {document['method']}, {document['dtype']}, "
        f"weight_only_precision {document['weight_only_precision']}{head}, runtime {document['runtime']}, {where}{ranks}"
    )
    console.print(_parts_table(document["bytes"], document["device"]))
    console.print(_engine_table(engine, model["num_layers"], document))
    if engine["limit"]:
        console.print(f"does not fit, {engine['limit']}: {engine['reason']}\n")
    console.print(_contexts_table(document["contexts"], model["num_layers"], document["device"]))
    console.print(_batches_table(document["batches"]))
    for note in document["notes"]:
        console.print(f"- {note}")


def fit_document(options: FitOptions) -> Document:
    """The whole report as JSON values; sizes in bytes."""
    search = FitSearch(options, open_checkpoint(options.model, options.tokenizer).config)
    asked = search.asked
    attempt = search.attempt(asked.max_seq_len, asked.max_batch_size)
    return {
        "model": dataclasses.asdict(search.model),
        "reach": search.reach,
        "device": asked.device,
        "tp_size": options.tp_size,
        "method": asked.method,
        "runtime": asked.runtime,
        "tensorrt": dataclasses.asdict(asked.tensorrt) if asked.runtime == "tensorrt" else None,
        "method_config": asked.method_config,
        "cache": dataclasses.asdict(asked.cache),
        "dtype": asked.dtype,
        "weight_only_precision": asked.weight_only_precision,
        "quantize_lm_head": asked.quantize_lm_head,
        "gpu": dataclasses.asdict(HOPPER) if search.on_gpu else None,
        "gpu_memory_bytes": options.gpu_memory,
        "host_memory_bytes": options.host_memory,
        "bytes": {
            "weights": search.weight_bytes,
            "window_per_slot": search.slot_window_bytes,
            "index_per_token": search.token_index_bytes,
            "index_per_slot": search.slot_index_bytes,
            "rows_per_token": search.token_row_bytes,
            "work_space": search.work_bytes(asked),
        },
        "engine": _attempt_document(attempt, search),
        "contexts": [
            {"context": context, **_most_document(search.largest_batch(context), "batch", search)}
            for context in search.contexts
        ],
        "batches": [
            {"batch": batch, **_most_document(search.longest_context(batch), "context", search)}
            for batch in search.batches
        ],
        "notes": _notes(search),
    }


def _notes(search: FitSearch) -> list[str]:
    """What a reader must know to trust the numbers."""
    full = "A request counts at its full length; until it has grown to that, more fit."
    if search.on_gpu:
        notes = [
            f"Work space and selections are sized for a GPU like {HOPPER.name}. --gpu_memory is what is free once the driver "
            "has taken its part.",
            f"{full} 1 GiB of --host_memory stays free.",
        ]
    else:
        notes = [
            f"{full} Rows take memory when they are written, so an engine begins with less.",
            "The work space is estimated high. It contains 1 GiB a rank for its process.",
        ]
    notes += _rank_notes(search)
    if search.model.max_position_embeddings > search.reach:
        notes.append(f"The model reaches {search.reach:,} tokens: a build refuses a larger --max_seq_len.")
    notes += search.notes
    if search.asked.dtype == "float32":
        notes.append("float32 is the default of kvseek build; --dtype bfloat16 halves weights and rows.")
    return notes


def _rank_notes(search: FitSearch) -> list[str]:
    """What a reader must know of several ranks."""
    ranks, heads = search.options.tp_size, search.model.num_kv_heads
    if ranks == 1:
        return []
    notes = ["Ranks are equal, and --host_memory is that of all of them; on several hosts, of these together."]
    if ranks > heads:
        notes.append(
            f"{ranks // heads} ranks have the same KV head: with more than {heads} ranks, rows and index do not shrink."
        )
    if search.on_gpu:
        notes.append(
            f"The work space contains {readable(symmetric_bytes(ranks))} in which ranks sum, and {readable(NCCL_BYTES)} for "
            "NCCL: an estimate, and more than is taken where NCCL is not used."
        )
    return notes


def _attempt_document(attempt: Attempt, search: FitSearch) -> Document:
    document: Document = {
        "max_seq_len": attempt.context,
        "max_batch_size": attempt.batch,
        "fits": attempt.limit is None,
        "limit": attempt.limit,
        "reason": attempt.reason,
    }
    if attempt.memory is None or attempt.needs is None:
        return document
    memory, rows, fixed = attempt.memory, attempt.memory.rows, attempt.needs.fixed
    layers, token_row_bytes = rows.device_layers + rows.host_layers, search.token_row_bytes
    return document | {
        "weights": memory.weight_bytes,
        "windows": memory.window_bytes,
        "index_of_tokens": memory.index_bytes,
        "index_of_slots": fixed,
        "work_space": memory.work_bytes - fixed,
        "device_rows": rows.device_bytes,
        **_totals(memory, search),
        "device_rows_per_token": token_row_bytes * rows.device_layers // layers,
        "host_rows_per_token": token_row_bytes * rows.host_layers // layers,
        "tokens": rows.capacity * EXTENT_TOKENS,
    }


def _most_document(most: Most, name: str, search: FitSearch) -> Document:
    document: Document = {name: 0, "limit": most.limit, "reason": most.reason}
    if most.best is None or most.best.memory is None:
        return document
    return document | {name: getattr(most.best, name)} | _totals(most.best.memory, search)


def _totals(memory: MemoryLayout, search: FitSearch) -> Document:
    return {
        "device_layers": memory.rows.device_layers,
        "device_total": memory.device_bytes if search.on_gpu else 0,
        "host_rows": memory.rows.host_bytes,
        "host_total": search.host_bytes(memory),
    }


def _parts_table(sizes: Document, device: str) -> Table:
    kept = ", and rows it keeps on the device," * (device == "cuda")
    rows = [
        ("weights", readable(sizes["weights"])),
        ("window of a slot", readable(sizes["window_per_slot"])),
        (f"index{kept} of a slot", readable(sizes["index_per_slot"])),
        ("index of a token, all layers", readable(sizes["index_per_token"])),
        ("rows of a token, all layers", readable(sizes["rows_per_token"])),
        ("work space, for prompts of max_input_len tokens", readable(sizes["work_space"])),
    ]
    return table("What an engine is made of", ("", "left"), ("size", "right"), rows=rows)


def _engine_table(engine: Document, layers: int, document: Document) -> Table:
    title = f"max_batch_size {engine['max_batch_size']}, max_seq_len {engine['max_seq_len']:,}"
    if "weights" not in engine:
        return table(title, ("", "left"), ("size", "right"), rows=[("nothing to divide", "")])
    on_device, per_device = engine["device_layers"], readable(engine["device_rows_per_token"])
    rows = [
        ("weights", readable(engine["weights"])),
        ("windows", readable(engine["windows"])),
        (f"index of {engine['tokens']:,} tokens", readable(engine["index_of_tokens"])),
        ("index of slots", readable(engine["index_of_slots"])),
        ("work space", readable(engine["work_space"])),
    ]
    ranks, available = document["tp_size"], readable(document["host_memory_bytes"])
    if document["device"] == "cpu":
        rows.append((f"rows, {readable(engine['host_rows_per_token'])} a token", readable(engine["host_rows"])))
        what = f"of all {ranks} ranks" if ranks > 1 else "all parts"
        rows.append((f"{what}, of {available}", readable(engine["host_total"])))
        return table(title, ("", "left"), ("size", "right"), rows=rows)
    held = f"rows in host memory, {readable(engine['host_rows_per_token'])} a token"
    rows += [
        (f"rows of {on_device} of {layers} layers, {per_device} a token", readable(engine["device_rows"])),
        (f"on the device, of {readable(document['gpu_memory_bytes'])}", readable(engine["device_total"])),
        (held if ranks > 1 else f"{held}, of {available}", readable(engine["host_rows"])),
    ]
    if ranks > 1:
        rows.append((f"those of all {ranks} ranks, of {available}", readable(engine["host_total"])))
    return table(title, ("", "left"), ("size", "right"), rows=rows)


def _contexts_table(contexts: list[Document], layers: int, device: str) -> Table:
    held = slice(2, None) if device == "cpu" else slice(None)
    rows = [(f"{row['context']:,}", str(row["batch"]), *_held(row, layers)[held], row["limit"]) for row in contexts]
    columns: list[Column] = [("context", "right"), ("batch", "right"), *_HELD[held], ("limit", "left")]
    return table("Largest batch of a context", *columns, rows=rows)


def _batches_table(batches: list[Document]) -> Table:
    rows = [(str(row["batch"]), f"{row['context']:,}", row["limit"]) for row in batches]
    columns: tuple[Column, ...] = (("batch", "right"), ("context", "right"), ("limit", "left"))
    return table("Longest context of a batch", *columns, rows=rows)


_HELD: tuple[Column, ...] = (("row layers on device", "right"), ("device GiB", "right"), ("host GiB", "right"))


def _held(row: Document, layers: int) -> tuple[str, str, str]:
    """Cells of _HELD; empty if nothing fits."""
    if "device_total" not in row:
        return "", "", ""
    return (
        f"{row['device_layers']} of {layers}",
        f"{row['device_total'] / GIB:.1f}",
        f"{row['host_total'] / GIB:.1f}",
    )
