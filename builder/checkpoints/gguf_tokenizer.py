"""The tokenizer inside a GGUF file, as the model's own tokenizer.json would state it.

A file has the vocabulary and a name for the kind of tokenizer, and with byte-level vocabularies a name for the split of text into
words, `tokenizer.ggml.pre`. What the names mean is written in llama.cpp (src/llama-vocab.cpp), where the constants here are from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from kvseek.core.errors import ConfigError, require

from .tokenizer import ModelTokenizer

REMEDY = "pass --tokenizer DIR, the model's Hugging Face directory"
SPACE = "\u2581"  # how SentencePiece writes a space
TOKENS, MERGES, SCORES, TYPES = (f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type"))
ARRAYS = (TOKENS, MERGES, SCORES, TYPES)
# Words of the Llama 3 and Qwen tokenizers, which differ in how many digits form a word.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words of Mistral's tekken tokenizers: as those of Qwen, but a capital letter behind a small one begins a word.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenType(IntEnum):
    """Kinds of tokens in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True)
class Split:
    """How a byte-level tokenizer splits text into words.

    Attributes
    ----------
    pattern : str or None
        Regular expression of the words; None: GPT-2's, which the library tokenizers has.
    digits : bool
        Whether each digit is a word, before the words are looked for.
    whole_words : bool
        Whether a word that is in the vocabulary is one token, whatever the merges say.
    composed : bool
        Whether text is first brought into Unicode's normal form C.
    begins : bool
        Whether texts begin with the token `bos` if the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False
    composed: bool = False
    begins: bool = False

    def apply(self, backend: Any) -> None:
        """Make a tokenizer split text so."""
        from tokenizers import Regex, normalizers, pre_tokenizers

        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.model.ignore_merges = self.whole_words
        if self.composed:
            backend.normalizer = normalizers.NFC()


LLAMA_3, QWEN_2 = WORDS.format(digits="{1,3}"), WORDS.format(digits="")
# tokenizer.ggml.pre → how text is split. Other names for the same split are those that llama.cpp takes for the same.
SPLITS: dict[str, Split] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral"),
        Split(LLAMA_3, whole_words=True, begins=True),
    ),
    "smaug-bpe": Split(LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), Split(QWEN_2, composed=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), Split(digits=True)),
    **dict.fromkeys(("gpt-2", "mellum", "a.x-4.0"), Split()),
    "tekken": Split(TEKKEN, whole_words=True, begins=True),
}


def load_tokenizer(metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> ModelTokenizer:
    """Make the tokenizer of a GGUF file.

    Parameters
    ----------
    metadata : mapping
        Values of the file by key, without the arrays of the tokenizer.
    arrays : mapping
        Those of ARRAYS that the file has, by key: lists of str or of numbers.

    Raises
    ------
    ConfigError
        If the file has no tokenizer, or one of a kind or a split that is not known here, or its parts contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    known = isinstance(model, str) and model in MODELS
    require(known, "tokenizer.ggml.model", model, f"one of {', '.join(map(repr, MODELS))}", REMEDY)
    tokens = arrays.get(TOKENS) or []
    require(bool(tokens), TOKENS, None, "a list of tokens", REMEDY)
    require(len(set(tokens)) == len(tokens), TOKENS, "tokens that are equal", "each token once", REMEDY)
    types = arrays.get(TYPES) or [TokenType.NORMAL] * len(tokens)
    require(len(types) == len(tokens), TYPES, len(types), f"of {len(tokens)} tokens, as {TOKENS}", REMEDY)
    try:
        backend, begins, ids = MODELS[str(model)](tokens, types, metadata, arrays)
        names = _special_tokens(tokens, {**ids, **metadata})
        _add_tokens(backend, tokens, types, set(names.values()))
    except ConfigError:
        raise
    except Exception as error:  # of many types: tokenizers raises Exception itself
        raise ConfigError(f"cannot make the tokenizer ({error}); {REMEDY}") from None
    _begin_with_bos(backend, names.get("bos_token"), bool(metadata.get("tokenizer.ggml.add_bos_token", begins)))
    template = metadata.get("tokenizer.chat_template")
    return ModelTokenizer(backend, names, template if isinstance(template, str) else None)


def _byte_level(
    tokens: list[str], types: list[int], metadata: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[Any, bool, dict[str, int]]:
    """Make a tokenizer of the kind of GPT-2's and tell whether texts begin with `bos`, and ids that files may leave out: none."""
    from tokenizers import Tokenizer, decoders, models

    name = metadata.get("tokenizer.ggml.pre")
    known = isinstance(name, str) and name in SPLITS
    require(known, "tokenizer.ggml.pre", name, f"one of {', '.join(SPLITS)}", REMEDY)
    require(MERGES in arrays, MERGES, None, "a list of pairs of tokens", REMEDY)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in arrays[MERGES])]
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.decoder = decoders.ByteLevel()
    split = SPLITS[str(name)]
    split.apply(backend)
    return backend, split.begins, {}


def _sentencepiece(
    tokens: list[str], types: list[int], metadata: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[Any, bool, dict[str, int]]:
    """Make a tokenizer of the kind of Llama 2's, and tell whether texts begin with `bos`, and ids that files may leave out.

    SentencePiece joins the two neighbouring pieces whose joint piece has the best score, and of equal ones the leftmost. The
    library tokenizers joins the two that come first in a list of merges. The list in the order of the scores does the same if
    none are equal but those of runs of one character: of a run, the leftmost pair is the one that has the longest left piece.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        name = f"tokenizer.ggml.{key}"
        require(not metadata.get(name), name, metadata.get(name), "absent or false", REMEDY)
    scores = arrays.get(SCORES) or []
    require(len(scores) == len(tokens), SCORES, len(scores), f"of {len(tokens)} tokens, as {TOKENS}", REMEDY)
    pieces = {token: scores[i] for i, token in enumerate(tokens) if types[i] == TokenType.NORMAL}
    pairs = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    joint = {left + right for _, _, left, right in pairs}
    counts = Counter(pieces[piece] for piece in joint)
    equal = sorted(piece for piece in joint if counts[pieces[piece]] > 1 and len(set(piece)) > 1)
    limit = f"another score for each piece, but {len(equal)} have that of another one"
    require(not equal, SCORES, equal[:4], limit, REMEDY)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 0))
    merges = [(left, right) for _, _, left, right in sorted(pairs)]
    model = models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend, spaces = Tokenizer(model), normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend, True, {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


MODELS: dict[str, Callable[..., tuple[Any, bool, dict[str, int]]]] = {"gpt2": _byte_level, "llama": _sentencepiece}


def _special_tokens(tokens: list[str], metadata: Mapping[str, Any]) -> dict[str, str]:
    """Read the tokens that have a use of their own, under transformers' names; raises ConfigError if there is no such token."""
    found = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is None:
            continue
        valid = isinstance(number, int) and 0 <= number < len(tokens)
        require(valid, f"tokenizer.ggml.{key}_token_id", number, f"in [0, {len(tokens)})", REMEDY)
        found[f"{name}_token"] = tokens[number]
    return found


def _add_tokens(backend: Any, tokens: list[str], types: list[int], named: set[str]) -> None:
    """Add the tokens that text may spell whole, and mark those that are no text."""
    from tokenizers import AddedToken

    special = [
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token in named
    ]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    own = (token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, normalized=False) for token in own if token not in named])


def _begin_with_bos(backend: Any, bos: str | None, wanted: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    if wanted and bos is None:
        raise ConfigError(f"tokenizer.ggml.bos_token_id = None: must be stated with add_bos_token; {REMEDY}")
    if wanted:
        special = [(bos, backend.token_to_id(bos))]
        pair = f"{bos} $A {bos} $B"
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", pair=pair, special_tokens=special)
    else:
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
