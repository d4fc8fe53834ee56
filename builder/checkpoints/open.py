"""Opens a checkpoint of any supported kind."""

from __future__ import annotations

from pathlib import Path

from kvseek.core.errors import ConfigError, require

from .checkpoint import NAME_TOKENIZER, Checkpoint
from .files import read_object
from .gguf import GgufCheckpoint
from .hugging_face import ADAPTER_FILE, LEAVE_OUT, MERGE_INTO, HuggingFaceCheckpoint
from .model_config import text_part
from .tensorrt_llm import TensorRtLlmCheckpoint


def open_checkpoint(
    path: Path, tokenizer_directory: Path | None = None, *, text_only: bool | None = False, mtp: bool = False
) -> Checkpoint:
    """Open a Hugging Face directory, a TensorRT-LLM checkpoint or a GGUF file.

    Parameters
    ----------
    tokenizer_directory : Path, optional
        Directory that the tokenizer is read from, instead of the checkpoint.
    text_only : bool or None
        Whether the text part is wanted of a checkpoint that also reads images; None: if it is one.
    mtp : bool
        Whether the multi-token-prediction head of a Hugging Face directory is wanted.

    Raises
    ------
    ConfigError
        If `path` is none of these, or `tokenizer_directory` is no directory, or `text_only` or `mtp` does not fit.
    """
    if tokenizer_directory is not None and not tokenizer_directory.is_dir():
        raise ConfigError(f"tokenizer = {str(tokenizer_directory)!r}: must be a directory; {NAME_TOKENIZER}")
    if path.is_file():
        _refuse_text_only(text_only)
        _refuse_mtp(mtp)
        return GgufCheckpoint(path, tokenizer_directory)
    kinds = "a Hugging Face directory with safetensors, a TensorRT-LLM checkpoint or a .gguf file"
    if not (path / "config.json").is_file():
        found = "has no config.json" if path.is_dir() else "does not exist"
        if (path / ADAPTER_FILE).is_file():
            raise ConfigError(f"model = {str(path)!r}: is an adapter; {MERGE_INTO} and pass the result")
        raise ConfigError(f"model = {str(path)!r}: {found}; pass {kinds}")
    values = read_object(path / "config.json")
    if "format_version" in values or "pretrained_config" in values:
        kind = "an engine directory of kvseek" if "format_version" in values else "a compiled TensorRT-LLM engine"
        raise ConfigError(f"model = {str(path)!r}: is {kind}; pass the checkpoint that it was built from")
    if isinstance(values.get("architecture"), str) and "architectures" not in values:
        _refuse_text_only(text_only)
        _refuse_mtp(mtp)
        return TensorRtLlmCheckpoint(path, tokenizer_directory)
    if text_part(values) is None:
        _refuse_text_only(text_only)
    elif text_only is False:
        raise ConfigError(
            f"architectures = {values['architectures'][0]!r}: reads images, which kvseek does not: pass --text_only, by which "
            "what the checkpoint has for them is left out"
        )
    return HuggingFaceCheckpoint(path, tokenizer_directory, mtp=mtp)


def _refuse_mtp(mtp: bool) -> None:
    require(not mtp, "mtp", mtp, "left out with a model that is no Hugging Face directory", LEAVE_OUT)


def _refuse_text_only(text_only: bool | None) -> None:
    require(not text_only, "text_only", text_only, "left out with a model that reads no images", "it has no other part")
