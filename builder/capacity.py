"""`kvseek build --plan`: which engines fit into a machine's memory, without the machine, as tables or as JSON.

There are no separate formulas for a GPU. Each answer is the division of the memory that loading would make
(engine/cache/memory_layout.py), with the bytes of the indexes counted on the meta device (engine/loading/memory.py), and the
extents that requests of full length have. On the CPU nothing is divided: host_layout adds up. Ranks are equal: what is planned is
one of them, and host memory holds all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import OwnNumbers, WeightFormat, own_numbers, rank_shape, total_size
from kvseek.builder.compile.cuda import specialise
from kvseek.core.batch import BUCKETS
from kvseek.core.command_line import readable
from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.errors import CapacityError, KernelError, require
from kvseek.core.extents import extents_for
from kvseek.core.model_config import ModelConfig
from kvseek.core.ranks import divided
from kvseek.core.weight_only import INT4
from kvseek.engine.cache.cache import retrieval_tokens
from kvseek.engine.cache.memory_layout import (
    MemoryLayout,
    host_rows,
    lay_out_rows,
    layer_extent_bytes,
    slot_count,
    state_bytes,
    window_bytes,
)
from kvseek.engine.cache.reuse import reuses_prefixes
from kvseek.engine.cache.row_storage import can_pin
from kvseek.engine.loading.memory import HOPPER, DryRun, IndexNeeds, divide_measured
from kvseek.engine.loading.supported import check_supported
from kvseek.engine.model.activation_memory import work_bytes
from kvseek.engine.model.cpu import stays_quantised
from kvseek.engine.model.weights import EXPERTS, list_weights
from kvseek.engine.parallel.cuda.sums import NCCL_BYTES, symmetric_bytes
from kvseek.plugins.registry import method_traits

from .options import FitOptions
from .printing import Column, print_json, table
from .weight_storage import weight_storage

CONTEXTS = tuple(1 << power for power in range(13, 21))  # 8K to 1M tokens
BATCHES = (1, 2, 4, 8)
MOST_REQUESTS = BUCKETS[-1]
DEVICE, HOST, BUDGET, KERNELS = "device memory", "host memory", "cache budget", "kernels"
REQUESTS, REACH = f"{MOST_REQUESTS} requests", "model's reach"  # limits that no memory lifts
FEW_SLOTS = (3, 5)  # work spaces for powers of two of requests and the padding slot: neither number is rounded up
Document = dict[str, Any]
GIB = 1 << 30


@dataclass(frozen=True)
class Attempt:
    """An engine of `batch` requests of `context` tokens each, and whether it fits.

    Attributes
    ----------
    memory : MemoryLayout or None
        The memory of a rank, as loading would divide the device's; None if loading would refuse the engine.
    needs : IndexNeeds or None
        Memory that the engine's indexes take; None if its kernels refuse the length.
    limit : str or None
        Name of what is short. None: the engine fits, so it loads, and admits all of the requests at once.
    reason : str
        A sentence, with numbers, on what is short; empty if nothing is.
    """

    context: int
    batch: int
    memory: MemoryLayout | None = None
    needs: IndexNeeds | None = None
    limit: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Most:
    """The largest engine that fits (`best`, None if nothing fits), and the `limit` that keeps the next larger from fitting."""

    best: Attempt | None
    limit: str
    reason: str = ""


class FitSearch:
    """Finds which engines of one model and method fit into one machine.

    Attributes
    ----------
    model : ModelConfig
        With max_position_embeddings raised to --max_seq_len, if that is more: one may ask about lengths that a build refuses.
    reach : int
        Tokens that the model itself allows.
    asked : EngineConfig
        The part of the engine of the options that each rank computes: all of it with one rank.
    weight_bytes : int
        Bytes of a rank's weights in memory.
    notes : sequence of str
        What the numbers of the weights contain.

    Parameters
    ----------
    own : OwnNumbers, optional
        See EngineOptions.engine_config.

    Raises
    ------
    ConfigError
        A value is out of range, the model cannot be divided among the ranks, or the method or its kernels do not support a
        rank's part of it on the device.
    """

    def __init__(self, options: FitOptions, model: ModelConfig, own: OwnNumbers | None = None) -> None:
        self.options, self.reach = options, model.max_position_embeddings
        longest = max(self.reach, options.limits.get("max_seq_len", 0))
        self.model = dataclasses.replace(model, max_position_embeddings=longest)
        whole, ranks = options.engine_config(self.model, own), options.tp_size
        self.model.check_ranks(ranks)
        remedy = "plans are not divided among ranks: plan with --runtime torch"
        require(ranks == 1 or whole.runtime == "torch", "tp_size", ranks, "1 with runtime = 'tensorrt'", remedy)
        self.asked = divided(whole, ranks)
        self.on_gpu = whole.device == "cuda"
        if self.on_gpu:
            specialise(self.asked)
        check_supported(self.asked)
        self.dtype: torch.dtype = getattr(torch, self.asked.dtype)
        storage = weight_storage(whole)
        self.notes = storage.notes
        # Whichever way is chosen when the engine is loaded.
        of_sums = symmetric_bytes(ranks) + NCCL_BYTES if ranks > 1 else 0
        self._beside = of_sums if self.on_gpu else widened_bytes(whole, ranks)
        if not self.on_gpu:
            self.weight_bytes = host_weight_bytes(whole, ranks)
        elif ranks == 1:
            self.weight_bytes = storage.weight_bytes
        else:
            self.weight_bytes = total_size(self.model, WeightFormat.of(whole), ranks) // ranks
        self._dry_run = DryRun(method_traits(self.asked).codebooks(model.head_dim))
        self._attempts: dict[tuple[int, int], Attempt] = {}

    @property
    def reads_whole_prompts(self) -> bool:
        """Whether a prompt is one call of one TensorRT plan, rather than chunks."""
        return self.asked.runtime == "tensorrt" and self.asked.tensorrt.form == "engine"

    def config(self, context: int, batch: int) -> EngineConfig:
        """The engine for `batch` requests of `context` tokens, otherwise as asked for."""
        longest_input = min(context, self.options.limits.get("max_input_len", context))
        sizes = {"max_seq_len": context, "max_batch_size": batch, "max_input_len": longest_input}
        if self.reads_whole_prompts:
            sizes["prefill_chunk_tokens"] = longest_input
        return dataclasses.replace(self.asked, **sizes)  # type: ignore[arg-type]  # all of them are numbers

    def attempt(self, context: int, batch: int) -> Attempt:
        """The engine for `batch` requests of `context` tokens each; raises ConfigError as the class does."""
        if (context, batch) not in self._attempts:
            self._attempts[context, batch] = self._attempt(context, batch)
        return self._attempts[context, batch]

    def largest_batch(self, context: int) -> Most:
        """The most requests of `context` tokens each."""
        return self._most(range(1, MOST_REQUESTS + 1), lambda batch: self.attempt(context, batch), REQUESTS)

    def longest_context(self, batch: int) -> Most:
        """The most tokens of each of `batch` requests, in steps of 1,024 up to the end of the model's reach."""
        longest = self.model.max_position_embeddings
        contexts = [*range(EXTENT_TOKENS, longest, EXTENT_TOKENS), longest]
        return self._most(contexts, lambda context: self.attempt(context, batch), REACH)

    @property
    def contexts(self) -> list[int]:
        """Contexts worth asking about: powers of two within reach, the end of it, and what was asked for."""
        longest = self.model.max_position_embeddings
        inside = {context for context in CONTEXTS if context <= longest}
        return sorted({*inside, min(self.reach, CONTEXTS[-1]), self.options.limits.get("max_seq_len", self.reach)})

    @property
    def batches(self) -> list[int]:
        """Batch sizes worth asking about."""
        return sorted({*BATCHES, self.asked.max_batch_size})

    @cached_property
    def slot_index_bytes(self) -> int:
        """Bytes that each further slot adds to the indexes and attentions of all layers, entries of cached tokens aside."""
        few, more = (self._dry_run.index_needs(self.asked, slots).fixed for slots in FEW_SLOTS)
        return (more - few) // (FEW_SLOTS[1] - FEW_SLOTS[0])

    @property
    def token_index_bytes(self) -> float:
        """Bytes that each cached token adds to the indexes of all layers."""
        return self._dry_run.index_needs(self.asked).extent / EXTENT_TOKENS

    @property
    def token_row_bytes(self) -> int:
        """Bytes of a cached token's rows in all layers, wherever they lie."""
        return len(self.model.row_layers) * layer_extent_bytes(self.asked, self.dtype) // EXTENT_TOKENS

    @property
    def slot_window_bytes(self) -> int:
        """Bytes of a slot's window and states in all layers."""
        whole = window_bytes(self.asked, self.dtype) + state_bytes(self.asked, self.dtype)
        return whole // slot_count(self.asked)

    def work_bytes(self, config: EngineConfig) -> int:
        """Bytes of a rank's work space."""
        return work_bytes(config, self.dtype) + self._beside

    def host_bytes(self, memory: MemoryLayout) -> int:
        """Bytes of host memory that all ranks take: of rows, on the CPU of everything."""
        return self.options.tp_size * (memory.rows.host_bytes + (0 if self.on_gpu else memory.device_bytes))

    def _most(self, sizes: Sequence[int], attempt: Callable[[int], Attempt], end: str) -> Most:
        """Find the largest of ascending sizes that fits, by bisection: a size never fits if a smaller one does not."""
        fitting, failing = -1, len(sizes)
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            if attempt(sizes[middle]).limit is None:
                fitting = middle
            else:
                failing = middle
        best = attempt(sizes[fitting]) if fitting >= 0 else None
        if failing == len(sizes):
            return Most(best, end)
        refused = attempt(sizes[failing])
        return Most(best, refused.limit or "", refused.reason)

    def _attempt(self, context: int, batch: int) -> Attempt:
        config, options = self.config(context, batch), self.options
        try:
            needs = self._dry_run.index_needs(config)
        except KernelError as error:
            return Attempt(context, batch, limit=KERNELS, reason=str(error))
        try:
            memory = self._divide(config, needs)
        except CapacityError as error:
            return Attempt(context, batch, None, needs, self._short(config), str(error))
        wanted, held = self._admitted(config), memory.rows.capacity
        if held < wanted:
            limit = self._short(config)
            reason = f"{limit} holds {held * EXTENT_TOKENS:,} tokens, the requests need {wanted * EXTENT_TOKENS:,}"
            return Attempt(context, batch, memory, needs, limit, reason)
        host_bytes, of_ranks = self.host_bytes(memory), f" of {options.tp_size} ranks" * (options.tp_size > 1)
        if self.on_gpu:
            fits = not host_bytes or can_pin(host_bytes, options.host_memory)
            reason = f"rows{of_ranks} need {host_bytes:,} bytes of host memory and 1 GiB beside them"
        else:
            fits = host_bytes <= options.host_memory
            reason = (
                f"all parts{of_ranks} need {host_bytes:,} bytes of host memory, {options.host_memory:,} are available"
            )
        return Attempt(context, batch, memory, needs) if fits else Attempt(context, batch, memory, needs, HOST, reason)

    def _divide(self, config: EngineConfig, needs: IndexNeeds) -> MemoryLayout:
        """Divide the memory of a rank; raises CapacityError if a GPU's does not suffice."""
        if self.options.gpu_memory is None:
            return host_layout(config, needs, self.weight_bytes, self.work_bytes(config))
        return divide_measured(config, needs, self.options.gpu_memory, self.weight_bytes, self._beside)

    def _admitted(self, config: EngineConfig) -> int:
        """Extents of all requests, each at its full length."""
        return config.max_batch_size * extents_for(retrieval_tokens(config.cache, config.max_seq_len))

    def _short(self, config: EngineConfig) -> str:
        """Name the reason for too few extents: budgets that would be too small on any machine, or the device's memory."""
        if not self.on_gpu:
            return BUDGET
        try:
            enough = lay_out_rows(config, self.dtype, None).capacity >= self._admitted(config)
        except CapacityError:
            enough = False
        return DEVICE if enough else BUDGET


def host_weight_bytes(config: EngineConfig, tp_size: int) -> int:
    """Return the bytes of the weights of one of `tp_size` ranks in memory, which may be more than in its files.

    Native kernels copy weights into oneDNN's layout, so a head that is tied to the embedding takes memory of its own, and weights
    of 8 bits that are not multiplied as they are become numbers of the engine's dtype (engine/model/cpu.py). Pages of
    the files that were copied are not counted, because the system drops them when it needs their memory.
    """
    native, dtype = config.kernels == "native", getattr(torch, config.dtype)
    model = dataclasses.replace(config.model, tie_word_embeddings=config.model.tie_word_embeddings and not native)
    files, size = WeightFormat.of(config), 0
    for weight in list_weights(model, quantize_lm_head=files.quantize_lm_head):
        parts = files.stored(weight)
        if len(parts) > 1:
            _, inputs = rank_shape(weight.name, weight.shape, model, tp_size)
            if not (native and stays_quantised(dtype, parts[0].dtype, inputs)):
                parts = WeightFormat(dtype).stored(weight)
        shapes = [rank_shape(part.name, part.shape, model, tp_size) for part in parts]
        size += sum(math.prod(shape) * part.dtype.itemsize for part, shape in zip(parts, shapes, strict=True))
    return size


def widened_bytes(config: EngineConfig, tp_size: int) -> int:
    """Return the bytes of the largest weight of one of `tp_size` ranks in float32; 0 for engines in float32.

    A processor without instructions for bfloat16 converts a weight for each product with many rows.
    """
    if config.dtype == "float32":
        return 0
    experts, sizes = config.model.experts, list[int]()
    for weight in list_weights(config.model):
        size = math.prod(rank_shape(weight.name, weight.shape, config.model, tp_size))
        apart = experts.num_experts if experts is not None and f".{EXPERTS}." in weight.name else 1
        sizes.append(size // apart)
    return max(sizes) * torch.float32.itemsize


def host_layout(config: EngineConfig, needs: IndexNeeds, weight_bytes: int, work: int) -> MemoryLayout:
    """Lay out the memory of an engine on the CPU, all of it in host memory: what divide_measured is for a GPU.

    `work` are the bytes of the work space; `needs.fixed` is added to them.
    """
    dtype = getattr(torch, config.dtype)
    rows = host_rows(config, dtype)
    index, windows = needs.extent * rows.capacity, window_bytes(config, dtype) + state_bytes(config, dtype)
    return MemoryLayout(rows, 0, weight_bytes, index, windows, work + needs.fixed)


def print_fit(options: FitOptions, console: Console) -> None:
    """Find what fits, and print it; raises ConfigError as FitSearch does, and as open_checkpoint."""
    document = fit_document(options)
    if options.as_json:
        print_json(document)
        return
    model, engine, layers = document["model"], document["engine"], document["layers_with_rows"]
    where = f"cache.offload {document['cache']['offload']}" if document["device"] == "cuda" else "device cpu"
    ranks = f"; sizes are those of each of {options.tp_size} ranks" * (options.tp_size > 1)
    groups = f" in groups of {document['weight_group']}" * (document["weight_only_precision"] == INT4)
    head = " with quantize_lm_head" * document["quantize_lm_head"]
    where += f", cache.row_dtype {document['cache']['row_dtype']}" * (document["cache"]["row_dtype"] != "auto")
    rowless = f" ({layers} with rows)" * (layers < model["num_layers"])
    console.print(
        f"{options.model.name}: {model['architecture']}, {model['num_layers']} layers{rowless}, {model['num_heads']} query and "
        f"{model['num_kv_heads']} KV heads of {model['head_dim']} channels; {document['method']}, {document['dtype']}, "
        f"weight_only_precision {document['weight_only_precision']}{groups}{head}, runtime {document['runtime']}, {where}{ranks}"
    )
    console.print(_parts_table(document["bytes"], document["device"]))
    console.print(_engine_table(engine, layers, document))
    if engine["limit"]:
        console.print(f"does not fit, {engine['limit']}: {engine['reason']}\n")
    console.print(_contexts_table(document["contexts"], layers, document["device"]))
    console.print(_batches_table(document["batches"]))
    for note in document["notes"]:
        console.print(f"- {note}")


def fit_document(options: FitOptions) -> Document:
    """The whole report as JSON values; sizes in bytes."""
    checkpoint = open_checkpoint(options.model, options.tokenizer, text_only=options.text_only)
    own = own_numbers(checkpoint, options.choices["device"])
    search = FitSearch(options, checkpoint.config, own)
    asked = search.asked
    attempt = search.attempt(asked.max_seq_len, asked.max_batch_size)
    return {
        "model": dataclasses.asdict(search.model),
        "layers_with_rows": len(search.model.row_layers),
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
        "weight_group": asked.weight_group,
        "weight_formats": asked.weight_formats,
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
        "notes": [*([] if own is None else [own.describe(asked, checkpoint.quantised_by)]), *_notes(search)],
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
    if search.model.delta_net is not None and reuses_prefixes(search.asked):
        most = readable(search.asked.cache.reuse_state_bytes)
        notes.append(f"States that are kept for later requests take up to {most} of host memory besides.")
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
