"""The tokenizer inside a GGUF file, split into words as the model was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvseek.core.config import require
from kvseek.core.errors import ConfigError

REMEDY = "pass --tokenizer DIR, the model's Hugging Face directory"
# Words of the Llama 3 and Qwen tokenizers; they differ in how many digits form a word.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(path: Path, metadata: dict[str, Any]) -> Any:
    """Load a byte-level BPE tokenizer from a GGUF file as a transformers tokenizer.

    transformers reads vocabulary, merges and chat template, but splits every text as GPT-2 does, whatever
    `tokenizer.ggml.pre` says. So its split is replaced by the one that `tokenizer.ggml.pre` names.

    Raises
    ------
    ConfigError
        If the file has no tokenizer, or a tokenizer whose split is not known here.
    """
    from transformers import AutoTokenizer

    model, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    require(model == "gpt2", "tokenizer.ggml.model", model, "'gpt2', byte-level BPE", REMEDY)
    require(split in SPLITS, "tokenizer.ggml.pre", split, f"one of {', '.join(SPLITS)}", REMEDY)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # of many types: tokenizers raises Exception itself
        raise ConfigError(f"{path}: cannot load the tokenizer ({error}); {REMEDY}") from None
    backend = tokenizer.backend_tokenizer
    SPLITS[str(split)](backend)
    _begin_with_bos(backend, tokenizer, bool(metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe")))
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _begin_with_bos(backend: Any, tokenizer: Any, wanted: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    if wanted and bos is None:
        raise ConfigError(f"tokenizer.ggml.bos_token_id = None: must be stated with add_bos_token; {REMEDY}")
    if wanted:
        special = [(bos, tokenizer.bos_token_id)]
        pair = f"{bos} $A {bos} $B"
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", pair=pair, special_tokens=special)
    else:
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])


def _split_smollm(backend: Any) -> None:
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])


def _split_by(backend: Any, pattern: str) -> None:
    from tokenizers import Regex, pre_tokenizers

    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])


def _split_llama3(backend: Any) -> None:
    _split_by(backend, WORDS.format(digits="{1,3}"))
    backend.model.ignore_merges = True  # a word that is in the vocabulary is one token


def _split_qwen2(backend: Any) -> None:
    from tokenizers import normalizers

    _split_by(backend, WORDS.format(digits=""))
    backend.normalizer = normalizers.NFC()


# tokenizer.ggml.pre → how to split text into words
SPLITS: dict[str, Callable[[Any], None]] = {
    "smollm": _split_smollm,
    "llama-bpe": _split_llama3,
    "qwen2": _split_qwen2,
}
