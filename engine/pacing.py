"""How much of the prompts a step may read, so that the requests that decode beside it hardly notice.

A unit of reading is one layer over one chunk of tokens. Its time is predicted as

    decode step / layers + token_seconds * tokens

for a unit reads a layer's weights once, as a decode step does, and computes in proportion to its tokens. The time of an
undisturbed decode step is the shortest of the last few that read nothing: what disturbs a step from outside, such as
another program on the same cores, only makes it longer. While prompts are read, one step in REST_INTERVAL reads nothing
to keep it up to date. `token_seconds` is learned from what the other steps took longer. It follows the attention over a
growing prompt too, which makes later tokens dearer.
"""

from __future__ import annotations

from collections import deque

SLOWDOWN = 1.8  # most that a step beside reading may take, in undisturbed decode steps
PACK_STEPS = 2.0  # most that a pack of short prompts, read in one step, may add to it, in undisturbed decode steps
SMALLEST_CHUNK = 16  # tokens; chunks are multiples of it
REST_INTERVAL = 32  # steps
SAMPLES = 3  # undisturbed steps whose shortest counts
FIRST_RESTS = 4  # steps between two that read nothing, until there are SAMPLES of them
LEARNING_RATE = 0.5
LARGEST_SAMPLE = 4.0  # times what was expected; a hiccup, or an index that is built, says little about the next unit


class Pacing:
    """Predicts what units cost beside decode steps, and says how many tokens a unit may have.

    Parameters
    ----------
    num_layers : int
        Units that one token passes through.
    max_chunk : int
        Most tokens of a unit (prefill_chunk_tokens).
    """

    def __init__(self, num_layers: int, max_chunk: int) -> None:
        self._layers, self._max_chunk = num_layers, max_chunk
        self._undisturbed: deque[float] = deque(maxlen=SAMPLES)
        self._since_rest = 0  # steps that read something
        self._token_seconds: float | None = None
        self._largest = SMALLEST_CHUNK  # what the next chunk may have: at most twice the last that was measured

    @property
    def rests(self) -> bool:
        """Whether the next step should read nothing, to measure an undisturbed decode step."""
        interval = REST_INTERVAL if len(self._undisturbed) == SAMPLES else FIRST_RESTS
        return not self._undisturbed or self._since_rest + 1 >= interval

    @property
    def allowance(self) -> float:
        """Seconds that reading may add to a decode step."""
        return (SLOWDOWN - 1) * self._decode_seconds

    def cost(self, tokens: int) -> float:
        """Predicted seconds of a unit of `tokens` tokens."""
        return self._decode_seconds / self._layers + self._per_token * tokens

    @property
    def chunk(self) -> int:
        """Tokens of a unit: as many as one unit can read within the allowance, for large units are the cheaper ones."""
        room = self.allowance - self._decode_seconds / self._layers
        return min(self._max_chunk, self._largest, self._rounded(room / self._per_token))

    @property
    def pack(self) -> int:
        """Tokens that a pack of short prompts may have, all layers of which are read in one step."""
        room = (PACK_STEPS - 1) * self._decode_seconds  # a unit of each layer takes a decode step without any token
        return min(self._max_chunk, self._rounded(room / (self._per_token * self._layers)))

    def record(self, seconds: float, units: int, token_layers: int, largest: int = 0) -> None:
        """Learn from a step with decoding requests.

        Parameters
        ----------
        seconds : float
            Of the whole step; it has waited for its tokens, so whatever computes them.
        units, token_layers : int
            What it read: units, and their tokens in all. 0: nothing.
        largest : int
            Tokens of its largest unit.
        """
        if not units:
            self._undisturbed.append(seconds)
            self._since_rest = 0
            return
        self._since_rest += 1
        if not self._undisturbed:
            return
        extra = seconds - self._decode_seconds * (1 + units / self._layers)
        sample = min(max(0.0, extra) / token_layers, LARGEST_SAMPLE * self._per_token)
        self._token_seconds = (1 - LEARNING_RATE) * self._per_token + LEARNING_RATE * sample
        self._largest = max(SMALLEST_CHUNK, 2 * self._rounded(largest))

    @property
    def _decode_seconds(self) -> float:
        return min(self._undisturbed, default=0.0)

    @property
    def _per_token(self) -> float:
        """Seconds per token and layer; until it is learned, that of a smallest chunk as dear as its layer's weights."""
        if self._token_seconds is None:
            return max(1e-12, self._decode_seconds / self._layers / SMALLEST_CHUNK)
        return max(1e-12, self._token_seconds)

    def _rounded(self, tokens: float) -> int:
        return max(SMALLEST_CHUNK, int(tokens) // SMALLEST_CHUNK * SMALLEST_CHUNK)
