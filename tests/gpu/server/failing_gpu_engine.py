"""An engine whose GPU fails for chosen requests: `python -m tests.gpu.server.failing_gpu_engine` with the arguments of
kvseek.server.engine.process. With `--llm DIRECTORY PROMPT` it is a program that uses `LLM` instead.

A prompt of HANGING tokens, or a decode step of a request with such a prompt if its first token is 7, meets a kernel that never
ends; one of ILLEGAL tokens a kernel that writes to an illegal address.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.gpu.engine.test_cuda import ScaleArguments, make_image

from kvseek.core.cuda import CudaKernels
from kvseek.engine import service
from kvseek.engine.model.cuda.steps import GraphDecoder
from kvseek.engine.retrieval import Retrieval
from kvseek.server.engine import process

HANGING, ILLEGAL, IN_STEP = 34, 35, 7
HUNG_SECONDS = 15.0  # a GPU takes seconds to tell of an illegal address
FOREVER = 1 << 62  # cycles
DONE = "the program goes on: "


def install() -> None:
    """Replace the functions through which prompts and steps come."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = CudaKernels(make_image(Path(folder)))
    store_layer, launch, faults = Retrieval.store_layer, GraphDecoder.launch, dict[int, int]()

    def fail(tokens: int) -> None:
        if tokens == HANGING:
            torch.cuda._sleep(FOREVER)
        elif tokens == ILLEGAL:
            kernels.launch("kvseek_scale", (1, 1, 1), 128, ScaleArguments(1 << 20, 1, 1, 2.0))

    def failing_store(self: Retrieval, layer: int, slot: int, keys: Any, values: Any, queries: Any) -> None:
        if layer == 1 and not faults.get(slot):
            fail(keys.shape[1])
        store_layer(self, layer, slot, keys, values, queries)

    def failing_launch(self: GraphDecoder, tokens: Any, slots: Any, *others: Any) -> Any:
        for slot in slots:
            fail(faults.get(slot, 0))
        return launch(self, tokens, slots, *others)

    prefill = GraphDecoder.prefill

    def noting_prefill(self: GraphDecoder, prompts: Any, *takers: Any) -> Any:
        for slot, ids in prompts:
            faults[slot] = len(ids) if ids[0] == IN_STEP else 0
        return prefill(self, prompts, *takers)

    Retrieval.store_layer, GraphDecoder.launch = failing_store, failing_launch  # type: ignore[method-assign]
    GraphDecoder.prefill = noting_prefill  # type: ignore[method-assign]
    service.HUNG_SECONDS, service.LOOK_SECONDS = HUNG_SECONDS, 0.5


def use_llm(directory: str, tokens: str, first: str) -> int:
    """Generate with an `LLM` and print what it says, twice."""
    from kvseek import LLM, SamplingParams
    from kvseek.core.errors import KvseekError

    llm = LLM(directory)
    for _ in range(2):
        try:
            llm.generate([[int(first), *range(10, 9 + int(tokens))]], SamplingParams(max_tokens=5, temperature=0))
        except KvseekError as error:
            print(DONE, error, flush=True)
    llm.close()
    return 0


def main() -> int:
    """Install the faults and run."""
    install()
    return use_llm(*sys.argv[2:]) if sys.argv[1:2] == ["--llm"] else process.main()


if __name__ == "__main__":
    sys.exit(main())
