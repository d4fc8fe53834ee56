"""Token ids of long texts that begin alike, such as the turns of a conversation: what a text shares with one before is not
tokenised again.

A text is cut behind one of its special tokens, such as the end of a message: tokenizers take the text between two of them by
itself. A turn behind a conversation of 100,000 tokens is tokenised in a few milliseconds, where the whole takes 200.
"""

from __future__ import annotations

import re
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

SHORTEST = 1 << 14  # characters of a text that is kept: shorter ones are tokenised in some milliseconds
MOST_TEXTS = 32  # that are compared with a new one
MOST_BYTES = 64 << 20
ID = "I"  # of array: 32 bits


@dataclass(frozen=True)
class _Kept:
    """A text that was tokenised. Behind the first `ends[n]` characters, and `counts[n]` tokens, it may be cut."""

    salt: str | None
    text: str
    ids: array[int]
    ends: array[int]
    counts: array[int]

    @property
    def nbytes(self) -> int:
        arrays = sum(len(each) * each.itemsize for each in (self.ids, self.ends, self.counts))
        return 4 * len(self.text) + arrays  # a character takes 4 bytes at most


class KeptEncodings:
    """The texts that were tokenised last; may be shared by threads.

    Parameters
    ----------
    encode : callable
        Tokenises a text as it stands behind a special token.
    special : mapping of str to int
        Tokens that are found in a text before anything else of it is looked at, and their ids. Of those that begin at one
        place the longest counts.
    """

    def __init__(self, encode: Callable[[str], list[int]], special: Mapping[str, int]) -> None:
        self._encode, self._special, self._numbers = encode, special, frozenset(special.values())
        # Behind others nothing may be cut: what follows could make them a longer token.
        self._whole = {one for one in special if not any(one in other[:-1] for other in special)}
        self._pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        self._lock, self._kept = threading.Lock(), list[_Kept]()  # the oldest first

    def encode(self, text: str, salt: str | None, max_tokens: int) -> list[int]:
        """Tokenise a text; what it shares with others of the same salt alone shows in the time that takes.

        One of more than `max_tokens`, which is refused, is not kept: it would push out conversations.
        """
        if len(text) < SHORTEST or not self._special:
            return self._encode(text)
        with self._lock:
            candidates = [kept for kept in self._kept if kept.salt == salt]
        before, place = None, 0  # the text that shares most, and how many of its places to be cut lie within
        for kept in candidates:
            within = bisect_right(kept.ends, _common(kept.text, text))
            if within and (before is None or kept.ends[within - 1] > before.ends[place - 1]):
                before, place = kept, within
        if before is None:
            ids = self._encode(text)
            if len(ids) <= max_tokens:
                self._keep(_Kept(salt, text, array(ID, ids), *self._places(text, ids)), None)
            return ids
        end, count = before.ends[place - 1], before.counts[place - 1]
        rest = text[end:]
        new = self._encode(rest)
        if count + len(new) > max_tokens:
            return before.ids[:count].tolist() + new
        ends, counts = self._places(rest, new)
        ends = before.ends[:place] + array(ID, (end + each for each in ends))
        counts = before.counts[:place] + array(ID, (count + each for each in counts))
        whole = before.ids[:count] + array(ID, new)
        self._keep(_Kept(salt, text, whole, ends, counts), before if place == len(before.ends) else None)
        return whole.tolist()

    def _places(self, text: str, ids: list[int]) -> tuple[array[int], array[int]]:
        """Find where a text may be cut: nowhere if its special tokens are not those that the tokenizer found."""
        found = list(self._pattern.finditer(text))
        places = [place for place, token in enumerate(ids) if token in self._numbers]
        if [ids[place] for place in places] != [self._special[each[0]] for each in found]:
            return array(ID), array(ID)
        cuts = [(each.end(), place + 1) for each, place in zip(found, places, strict=True) if each[0] in self._whole]
        return array(ID, (end for end, _ in cuts)), array(ID, (count for _, count in cuts))

    def _keep(self, new: _Kept, instead_of: _Kept | None) -> None:
        if not new.ends:
            return
        with self._lock:
            kept = [each for each in self._kept if each is not instead_of] + [new]
            sizes = accumulate(each.nbytes for each in reversed(kept))
            fits = sum(size <= MOST_BYTES for size in sizes)
            self._kept = kept[len(kept) - min(fits, MOST_TEXTS) :]


def _common(one: str, other: str) -> int:
    """Count the characters with which both texts begin."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
