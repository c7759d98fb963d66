"""Which positions of a request a capture or an intervention is for.

Position p is that of token p of prompt and answer together. The last token of an answer is never computed, so an answer
of G tokens after a prompt of P has activations at 0 to P + G - 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llm.base.checks import refuse

# "last": of the prompt, from which the first token is drawn. A slice or numbers: of the prompt, negative ones from its
# end. A callable: (position, number of prompt tokens) -> bool.
Positions = str | int | slice | Sequence[int] | Callable[[int, int], bool]
_WORDS = ("last", "prompt", "generated", "all")
_RIGHT = "'last', 'prompt', 'generated', 'all', an integer, a list of them, a slice, or a callable"


def check_positions(positions: object) -> None:
    """Raise `ValidationError` for what are no positions."""
    if isinstance(positions, str) and positions in _WORDS:
        return
    if isinstance(positions, slice) or (callable(positions) and not isinstance(positions, type)):
        return
    numbers = [positions] if not isinstance(positions, list | tuple | range | np.ndarray) else positions
    if len(numbers) == 0 or not all(
        isinstance(item, int | np.integer) and not isinstance(item, bool) for item in numbers
    ):
        refuse("positions", positions, _RIGHT)


def wanted(positions: Positions, at: np.ndarray, num_prompt: int) -> np.ndarray:
    """bool [N]: which of the positions `at`, int64 [N], are meant in a request with so many prompt tokens."""
    if isinstance(positions, str):
        if positions == "last":
            return at == num_prompt - 1
        if positions == "prompt":
            return at < num_prompt
        return at >= num_prompt if positions == "generated" else np.ones(len(at), dtype=bool)
    if (listed := numbers(positions, num_prompt)) is not None:
        return np.isin(at, listed)
    return np.array([bool(positions(int(one), num_prompt)) for one in at], dtype=bool)  # type: ignore[operator]


def numbers(positions: Positions, num_prompt: int) -> list[int] | None:
    """The positions of a prompt in the order given; None: they are not of the prompt alone."""
    if isinstance(positions, slice):
        return list(range(*positions.indices(num_prompt)))
    if positions in ("last", "prompt") if isinstance(positions, str) else False:
        return [num_prompt - 1] if positions == "last" else list(range(num_prompt))
    if isinstance(positions, str) or callable(positions):
        return None
    given = [positions] if isinstance(positions, int | np.integer) else positions
    return [int(item) + num_prompt if item < 0 else int(item) for item in given]


def check_within(positions: Positions, num_prompt: int) -> None:
    """Raise `ValidationError` for a number that is no position of the prompt."""
    if isinstance(positions, str | slice) or callable(positions):
        return
    for item in numbers(positions, num_prompt) or ():
        if not 0 <= item < num_prompt:
            refuse("positions", positions, f"numbers from {-num_prompt} to {num_prompt - 1}, of the prompt's tokens")


def most(positions: Positions, num_prompt: int, num_generated: int) -> int:
    """At most so many positions are meant, if so many tokens are generated."""
    computed = num_prompt + max(0, num_generated - 1)
    if positions == "generated" if isinstance(positions, str) else False:
        return max(0, num_generated - 1)
    listed = numbers(positions, num_prompt)
    return computed if listed is None else len(listed)
