"""Engines whose products are TensorRT plans: the one entry to this folder (engine/loading/runtime.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kvseek.core.batch import buckets_for
from kvseek.core.config import EngineConfig
from kvseek.core.cuda import CudaKernels
from kvseek.core.tensorrt_api import import_tensorrt
from kvseek.engine.cache.memory_layout import Footprint
from kvseek.engine.draws.compiled import CompiledDraws
from kvseek.engine.model.cuda.steps import GraphDecoder, layer_kernels, prompt_attention
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.cuda.draw.draw import DeviceDraw
from kvseek.plugins.tensorrt.plugin import register
from kvseek.plugins.tensorrt.serving import serving

from .models import SegmentsModel, WholeModel
from .plan_files import check_version, read_plan_index
from .session import OUTSIDE_OF_GRAPHS, Session


def load_plans(
    directory: Path, config: EngineConfig, device: torch.device
) -> tuple[Footprint, Callable[[Retrieval, CudaKernels], Decoder]]:
    """Load the plans of an engine directory, with the module config.tensorrt.module; returns and raises as load_runtime.

    What the plans take is the size of their files, which hold mostly weights.
    """
    api = import_tensorrt(config.tensorrt.module)
    index = read_plan_index(directory, config)
    check_version(index, api)
    if index.form == "engine":
        register(api)  # a plan with plugin layers loads only after their classes have been registered
    files = [directory / entry.file for entry in index.segments]
    contexts = (OUTSIDE_OF_GRAPHS, *buckets_for(config.max_batch_size))
    session, file_bytes = Session(api, files, device, contexts), sum(file.stat().st_size for file in files)

    def make_decoder(retrieval: Retrieval, kernels: CudaKernels) -> Decoder:
        plans, ops, draws = session.plans, layer_kernels(retrieval, kernels), CompiledDraws(DeviceDraw(kernels))
        if index.form == "segments":
            segments = SegmentsModel(plans, retrieval, ops, prompt_attention(retrieval, kernels))
            return GraphDecoder(segments, retrieval, draws)
        return GraphDecoder(WholeModel(plans[0], serving, retrieval, ops), retrieval, draws)

    return Footprint(file_bytes, outside=file_bytes, plan_work=session.memory.nbytes), make_decoder
