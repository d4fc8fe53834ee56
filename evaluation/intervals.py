"""How much a share of right answers says: confidence intervals."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054  # of the standard normal distribution, 2.5 % lies above


def wilson(share: float, samples: int) -> tuple[float, float]:
    """95 % interval of a proportion that `samples` independent samples have estimated as `share` (0 to 1).

    The score interval of E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal of
    the American Statistical Association 22 (1927). `share` times `samples` may be no whole number: where several questions
    are asked on one context, `samples` is the number of contexts.
    """
    spread = Z_95**2 / samples
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
