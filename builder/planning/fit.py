"""What an engine would take and hold on a GPU that need not be there: `kvseek build --plan`.

Nothing is estimated. Every answer is a plan that loading would make (engine/memory_plan.py), with the indexes' bytes counted
on the meta device (engine/dry_run.py), and the extents that admission would reserve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvseek.builder.checkpoints.weights import WeightFormat, total_size
from kvseek.builder.compile.cuda import specialise
from kvseek.builder.options import PlanOptions
from kvseek.builder.tensorrt.plans import weight_bytes as plan_bytes
from kvseek.core.config import EXTENT_TOKENS, EngineConfig, ModelConfig
from kvseek.core.errors import CapacityError, KernelError
from kvseek.core.extents import extents_for
from kvseek.engine.dry_run import DryRun
from kvseek.engine.graphs import BUCKETS
from kvseek.engine.host_pool import can_pin
from kvseek.engine.loading import IndexNeeds, plan_measured
from kvseek.engine.memory_plan import MemoryPlan, layer_extent_bytes, plan_rows, retrieval_tokens, window_bytes
from kvseek.plugins.registry import get_method

CONTEXTS = tuple(1 << power for power in range(13, 21))  # 8K to 1M tokens
BATCHES = (1, 2, 4, 8)
MOST_REQUESTS = BUCKETS[-1]
DEVICE, HOST, BUDGET, KERNELS = "device memory", "host memory", "cache budget", "kernels"
REQUESTS, REACH = f"{MOST_REQUESTS} requests", "model's reach"  # limits that no memory lifts
FEW_SLOTS = (3, 5)  # work spaces for powers of two of requests and the padding slot: neither number is rounded up


@dataclass(frozen=True)
class Attempt:
    """An engine of `batch` requests of `context` tokens each, planned.

    Attributes
    ----------
    plan : MemoryPlan or None
        What loading would make of it; None if it would refuse.
    needs : IndexNeeds or None
        What its indexes take; None if its kernels refuse the length.
    limit : str or None
        What is short; None: the engine loads, and admits all of the requests at once.
    reason : str
        The same in a sentence, with numbers; empty if nothing is short.
    """

    context: int
    batch: int
    plan: MemoryPlan | None = None
    needs: IndexNeeds | None = None
    limit: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Most:
    """The most that fits: `limit` is what keeps the next larger engine from it. `best` is None if nothing fits."""

    best: Attempt | None
    limit: str
    reason: str = ""


class Planner:
    """Plans engines of one model and method for one machine.

    Attributes
    ----------
    model : ModelConfig
        With max_position_embeddings raised to --max_seq_len, if that is more: planning may ask for what building refuses.
    reach : int
        Tokens that the model itself allows.
    asked : EngineConfig
        The engine that the options describe.

    Raises
    ------
    ConfigError
        A value is out of range, or the method or its kernels do not support the model on a GPU.
    """

    def __init__(self, options: PlanOptions, model: ModelConfig) -> None:
        self.options, self.reach = options, model.max_position_embeddings
        longest = max(self.reach, options.limits.get("max_seq_len", 0))
        self.model = dataclasses.replace(model, max_position_embeddings=longest)
        self.asked = options.engine_config(self.model)
        specialise(self.asked)
        self.dtype: torch.dtype = getattr(torch, self.asked.dtype)
        plans = self.asked.runtime == "tensorrt"
        self.weight_bytes = plan_bytes(self.asked) if plans else total_size(model, WeightFormat.of(self.asked))
        method = get_method(options.method)
        books = method.codebooks(method.configure(self.asked.method_config), model.head_dim)
        self._dry_run = DryRun(books)
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
        """Plan `batch` requests of `context` tokens each; raises ConfigError as the class does."""
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
        """Bytes that each further slot adds to the indexes and attentions of all layers, cached tokens aside."""
        few, more = (self._dry_run.index_needs(self.asked, slots).fixed for slots in FEW_SLOTS)
        return (more - few) // (FEW_SLOTS[1] - FEW_SLOTS[0])

    @property
    def token_index_bytes(self) -> float:
        """Bytes that each cached token adds to the indexes of all layers."""
        return self._dry_run.index_needs(self.asked).extent / EXTENT_TOKENS

    @property
    def token_row_bytes(self) -> int:
        """Bytes of a cached token's rows in all layers, wherever they lie."""
        return self.model.num_layers * layer_extent_bytes(self.asked, self.dtype) // EXTENT_TOKENS

    @property
    def slot_window_bytes(self) -> int:
        """Bytes of a slot's window in all layers."""
        return window_bytes(self.asked, self.dtype) // (self.asked.max_batch_size + 1)

    def _most(self, sizes: Sequence[int], attempt: Callable[[int], Attempt], end: str) -> Most:
        """The largest of ascending sizes that fits. More never fits where less does not, so the border is searched for."""
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
            plan = plan_measured(config, needs, options.gpu_memory, self.weight_bytes)
        except CapacityError as error:
            return Attempt(context, batch, None, needs, self._short(config), str(error))
        wanted, held = self._admitted(config), plan.rows.capacity
        if held < wanted:
            limit = self._short(config)
            reason = f"{limit} holds {held * EXTENT_TOKENS:,} tokens, the requests need {wanted * EXTENT_TOKENS:,}"
            return Attempt(context, batch, plan, needs, limit, reason)
        if plan.rows.host_bytes and not can_pin(plan.rows.host_bytes, options.host_memory):
            reason = f"rows need {plan.rows.host_bytes:,} bytes of host memory and 1 GiB beside them"
            return Attempt(context, batch, plan, needs, HOST, reason)
        return Attempt(context, batch, plan, needs)

    def _admitted(self, config: EngineConfig) -> int:
        """Extents that admission reserves for all requests, each at its full length."""
        return config.max_batch_size * extents_for(retrieval_tokens(config.cache, config.max_seq_len))

    def _short(self, config: EngineConfig) -> str:
        """What to blame for too few extents: budgets that would be too small on any GPU, or the device."""
        try:
            enough = plan_rows(config, self.dtype, None).capacity >= self._admitted(config)
        except CapacityError:
            enough = False
        return DEVICE if enough else BUDGET
