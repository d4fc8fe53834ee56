"""Which requests an engine can serve, by its memory and by what its model computes."""

from __future__ import annotations

from kvseek.core.config import EngineConfig
from kvseek.core.errors import CapacityError, RequestError
from kvseek.core.request import Request
from kvseek.core.selected_rows import FIELD as ROWS_FIELD
from kvseek.engine.cache.reuse import why_no_reuse
from kvseek.engine.model.decoder import Decoder


def check_served(request: Request, config: EngineConfig, decoder: Decoder, reuses: bool) -> None:
    """Raise RequestError or CapacityError if an engine can never serve a valid request.

    `reuses`: whether it keeps rows of prompts for later requests.
    """
    tokens = len(request.prompt_ids) + request.max_tokens
    needed, capacity = decoder.cache.extents_needed(tokens), decoder.cache.extents.capacity
    if needed > capacity:
        bounds = " or ".join(config.cache.bounds)
        larger = f"a larger {bounds}" if bounds else "--cache.offload auto, or use a GPU with more memory"
        raise CapacityError(
            f"max_tokens = {request.max_tokens}: needs {needed} extents of the row pool together with the prompt of "
            f"{len(request.prompt_ids)} tokens, it has {capacity}; shorten the request or build with {larger}"
        )
    if request.session is not None and not reuses:
        raise RequestError(
            f"session_id: this engine keeps nothing of prompts (docs/conversations.md); {why_no_reuse(config)}"
        )
    if request.sampling.scores_prompt and not decoder.model.scores_prompts:
        name = "return_context_logits" if request.sampling.return_context_logits else "prompt_logprobs"
        raise RequestError(
            f"{name}: an engine of runtime {config.runtime} does not compute the logits of a prompt; leave it out, or "
            "build with --runtime torch"
        )
    if request.sampling.return_selected_rows is not None and not decoder.reports_rows:
        raise RequestError(
            f"{ROWS_FIELD}: is given: must be absent with --runtime tensorrt, --tp_size above 1, or --ctkvr.execution cpu "
            "on a GPU, where this process does not see all selected rows; leave it out, or build another engine"
        )
