"""The tiny random engine that soak, fuzz, load and fault tests serve: float32, slots and extents few enough to be fought for."""

from __future__ import annotations

from pathlib import Path

from tests.support.random_models import save_random_model

from kvseek.builder import build

MAX_INPUT_LEN, MAX_SEQ_LEN, SLOTS = 2600, 3000, 4
EXTENTS = 7  # 4 requests of 3,000 tokens need 12
EXTENT_BYTES = 3 * 2 * 1024 * 2 * 32 * 4  # layers, KV heads, tokens, K and V, channels, bytes
WINDOW = ("--cache.sink", "4", "--cache.local", "32", "--cache.update", "16", "--cache.full_threshold", "64")


def build_soak_engine(folder: Path, method: str = "pariskv", extents: int = EXTENTS, slots: int = SLOTS) -> Path:
    """Build the engine in `folder` and return its directory."""
    model = save_random_model(folder / "model", "llama", max_position_embeddings=4096)
    limits = ("--max_batch_size", f"{slots}", "--max_seq_len", f"{MAX_SEQ_LEN}", "--max_input_len", f"{MAX_INPUT_LEN}")
    memory = ("--cache.kv_cache_host_memory_bytes", f"{extents * EXTENT_BYTES}", "--prefill_chunk_tokens", "512")
    top_k = ("--pariskv.top_k", "40") if method == "pariskv" else ()
    output = folder / "engine"
    arguments = ["--model", str(model), "--method", method, "--output_dir", str(output), "--quiet"]
    status = build.main([*arguments, *WINDOW, *limits, *memory, *top_k])
    if status:
        raise RuntimeError(f"kvseek build ended with status {status}")
    return output
