"""What adapters add to the result of one layer (LoRA, arXiv:2106.09685), as the operations `lora` take it.

Owns `LoraTerm`, one pair of matrices, and `LoraTerms`, those of every loaded adapter for one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar, cast

from llm.kernels.weight import Weight

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LoraTerm:
    """y[first : first + up.n] += scale * up(down(x)) for the tokens of the adapter in `slot`.

    Attributes:
        slot: of the adapter, at least 1.
        first: the first of its output channels; a fused layer has one term per matrix that the adapter changes.
        down: float [rank, K]; of an embedding [vocabulary, rank], whose rows are chosen by id.
        up: float [channels, rank], which may have a bias.
    """

    slot: int
    first: int
    down: Weight
    up: Weight
    scale: float


@dataclass(frozen=True, eq=False)
class LoraTerms:
    """The terms of one layer; those of one slot are for different channels.

    Attributes:
        width: output channels of the layer.
        is_lookup: `down` is read by id.

    Raises:
        ValueError: there are none, or they do not fit the layer or each other.
    """

    terms: tuple[LoraTerm, ...]
    width: int
    is_lookup: bool = False
    _derived: dict[object, object] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("no terms")
        inputs = self.inputs
        for term in self.terms:
            rank = term.down.k if self.is_lookup else term.down.n
            own = term.down.n if self.is_lookup else term.down.k
            fits = own == inputs and rank == term.up.k and 0 <= term.first <= self.width - term.up.n
            if not fits or term.slot < 1 or not (term.down.is_float and term.up.is_float):
                raise ValueError(
                    f"a term of slot {term.slot} from channel {term.first} with {[term.down.n, term.down.k]} and "
                    f"{[term.up.n, term.up.k]} does not fit {inputs} inputs and {self.width} channels"
                )
        spans = sorted((t.slot, t.first, t.first + t.up.n) for t in self.terms)
        if any(a[0] == b[0] and a[2] > b[1] for a, b in pairwise(spans)):
            raise ValueError("two terms of one slot have a channel in common")

    @property
    def inputs(self) -> int:
        """K; for an embedding the number of ids."""
        down = self.terms[0].down
        return down.n if self.is_lookup else down.k

    def derived(self, make: Callable[[LoraTerms], T]) -> T:
        """`make(self)`, computed once: what a backend keeps of all of them together."""
        if make not in self._derived:
            self._derived[make] = make(self)
        return cast(T, self._derived[make])
