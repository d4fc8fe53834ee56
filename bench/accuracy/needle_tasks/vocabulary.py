"""The words of the needle tasks: one word is one token, and the classes of words are ranges of token ids.

The layout (which ids are digits, adjectives and so on) is that of the needle model, so that it understands these questions;
its own tokenizer spells the made-up words differently, which no question depends on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
ORDINAL_WORDS = ("first", "second", "third", "fourth")
GRAMMAR = ("the", "is", ".", ",", "?", "question", "answer", "what", "are", "all", *ORDINAL_WORDS, "trace", "var", "=")
PAD, BOS, EOS, UNKNOWN = range(len(SPECIAL))
FIRST_DIGIT = len(SPECIAL) + len(GRAMMAR)
DIGITS = range(FIRST_DIGIT, FIRST_DIGIT + 10)
ADJECTIVES = range(DIGITS.stop, DIGITS.stop + 256)
NOUNS = range(ADJECTIVES.stop, ADJECTIVES.stop + 256)
VALUE_WORDS = range(NOUNS.stop, NOUNS.stop + 512)
VARIABLES = range(VALUE_WORDS.stop, VALUE_WORDS.stop + 512)
FILLER = range(VARIABLES.stop, VARIABLES.stop + 1024)
WIDE_WORDS = (  # behind the others: models that do not know wide.py have none here
    *("weighs", "passage", "pick", "met", "list", "table", "from", "to", "both", "only"),
    *("extract", "copy", "count", "compare", "grow"),
)
SIZE = -(-(FILLER.stop + len(WIDE_WORDS)) // 64) * 64  # matrices' rows come in multiples of 64

SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
ENDINGS = {ADJECTIVES: "ish", NOUNS: "er", VALUE_WORDS: "ok", VARIABLES: "x", FILLER: ""}


def _words() -> list[str]:
    """The word of every token id: two syllables, and the ending of its class."""
    words = [*SPECIAL, *GRAMMAR, *map(str, range(10))]
    for ids, ending in ENDINGS.items():
        made = (a + b + ending for b, a in product(SYLLABLES, repeat=2))  # the first syllable changes fastest
        words += [word.upper() if ids is VARIABLES else word for word, _ in zip(made, ids, strict=False)]
    words += WIDE_WORDS
    return words + [f"<unused_{number}>" for number in range(len(words), SIZE)]


WORDS = _words()
IDS = {word: number for number, word in enumerate(WORDS)}
FULL_STOP = IDS["."]
ORDINALS = [IDS[word] for word in ORDINAL_WORDS]


def encode(text: str) -> list[int]:
    """Token ids of words that blanks separate; raises KeyError for a word that is none."""
    return [IDS[word] for word in text.split()]


def decode(ids: Iterable[int]) -> str:
    """The words of token ids, separated by blanks."""
    return " ".join(WORDS[number] for number in ids)


def save_tokenizer(folder: Path, positions: int) -> None:
    """Write the tokenizer's files and generation_config.json, as transformers reads them, beside a checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=SPECIAL[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    begin = SPECIAL[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, BOS)])
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions, **names).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows too
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    ends = [EOS, FULL_STOP]
    GenerationConfig(bos_token_id=BOS, eos_token_id=ends, pad_token_id=PAD, do_sample=False).save_pretrained(folder)
