"""One checkpoint in kvseek and in transformers: the same logits, or refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.builder.checkpoints.drawn_checkpoints import Case, save_case

from kvseek.builder.build import build_engine
from kvseek.builder.checking.comparison import greedy
from kvseek.builder.checking.reference import generated_logits
from kvseek.builder.options import build_options
from kvseek.core.config_file import read_config
from kvseek.core.errors import KvseekError
from kvseek.engine.leading.leader import load_decoder

PROMPT = [3, 17, 90, 4, 55, 3, 62, 8, 71, 29, 44, 13, 80, 6, 37, 91, 22, 58, 2, 66, 49, 11, 75, 30]
GREEDY_TOKENS = 16
MOST = 1e-4  # difference of logits, whose spread is about 1; measured: some 8e-6
FLAGS = {
    "method": "full",
    "kernels": "reference",
    "max_batch_size": 1,
    "prefill_chunk_tokens": 10,
    "check": False,
    "quiet": True,
}


def outcome(case: Case) -> str:
    """Build and compare a case: returns "equal" or why kvseek refuses; raises AssertionError if the property does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        model, engine = Path(folder, "model"), Path(folder, "out", "engine")
        model.mkdir()
        save_case(case, model)
        try:
            build_engine(build_options({**FLAGS, "model": model, "output_dir": engine}))
            decoder = load_decoder(engine, read_config(engine))
        except KvseekError as error:
            reason = str(error).replace(folder, "")
            assert "are available" not in reason, f"this machine has no room for the test: {reason}"
            assert not engine.parent.exists(), "a refused checkpoint left something behind"
            return f"refused: {reason}"
        prompt = PROMPT[: decoder.config.max_seq_len - GREEDY_TOKENS]
        tokens, found = greedy(decoder, prompt, GREEDY_TOKENS)
        try:
            expected = transformers_logits(model, [*prompt, *tokens[:-1]])
        except Exception as error:
            raise AssertionError(f"kvseek accepts what transformers refuses: {type(error).__name__}: {error}") from None
        # Transformers reads the engine's own tokens. With logits this close, its greedy decoding draws the same ones: it could
        # only draw others where two tokens are as likely as each other to within the rounding.
        difference = float((found - expected).abs().max())
        assert difference <= MOST * max(1.0, float(expected.abs().max())), f"the logits differ by {difference:.3g}"
        return "equal"


def transformers_logits(model: Path, ids: list[int]) -> torch.Tensor:
    """The logits of the last tokens [GREEDY_TOKENS, vocabulary], as whoever generates with the checkpoint gets them."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    return generated_logits(reference, ids, GREEDY_TOKENS, passes=GREEDY_TOKENS)
