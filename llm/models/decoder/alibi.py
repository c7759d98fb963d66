"""The slopes of ALiBi (arXiv:2108.12409): attention with a bias that falls with the distance, and no positions."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One slope per head: powers of two whose exponents are spread evenly from 0 to -8.

    A number of heads between two powers of two takes every second slope of the larger power, then those between.
    """
    count = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8.0 * index / count) for index in range(1, count + 1)]
    return tuple(slopes if count == heads else (slopes[1::2] + slopes[::2])[:heads])
