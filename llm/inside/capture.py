"""What a user asks to be captured, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llm.base.checks import check_choice, check_integer, refuse
from llm.inside.names import Positions, canonical, check_positions


@dataclass(frozen=True)
class Capture:
    """Activations to return in `output.activations`, of every completion: `llm.generate(prompts, capture=...)`, or of
    one request by `SamplingParams(extra_args={"capture": ...})`.

    A request with a capture is computed anew: nothing of its prompt is taken from the prefix cache, and nothing of its
    answer is drafted. Its answer keeps its bits, and so do those of all others.

    Args:
        sites: names of `llm.sites()`, or patterns: `"layers.*.output"`, `"layers.-1.mlp.output"`; a list of them.
            TransformerLens' names (`"blocks.3.hook_resid_post"`) and those of Hugging Face's modules
            (`"model.layers.3.mlp"`) are understood.
        positions: "last", of the prompt; "prompt"; "generated"; "all"; numbers or a slice, of the prompt's tokens; or a
            callable (position, number of prompt tokens) -> bool. The last generated token is never computed.
        dtype: of the arrays, "float32" or "float16".
        heads: which heads of `attention.pattern`; None: all.
        limit_bytes: the call is refused if its activations may take more.

    Raises:
        ValidationError: an argument is wrong.
    """

    sites: str | Sequence[str]
    positions: Positions = "last"
    dtype: str = "float32"
    heads: Sequence[int] | None = None
    limit_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        names = [self.sites] if isinstance(self.sites, str) else self.sites
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            refuse("sites", self.sites, "the name of a site, or a list of them")
        check_positions(self.positions)
        if isinstance(self.positions, np.ndarray):
            object.__setattr__(self, "positions", self.positions.tolist())
        check_choice("dtype", self.dtype, ("float32", "float16"))
        check_integer("limit_bytes", self.limit_bytes, 1)
        for head in self.heads or ():
            check_integer("heads", head, 0)


@dataclass
class Activations(dict[str, np.ndarray]):
    """Site -> array [positions, *shape], by other libraries' names of a site too.

    Attributes:
        positions: site -> int64 [positions], in increasing order.
    """

    positions: dict[str, np.ndarray] = field(default_factory=dict)

    def __missing__(self, name: str) -> np.ndarray:
        own = canonical(name)
        if own == name or own not in self:
            raise KeyError(f"{name}; captured are: {', '.join(self)}")
        return self[own]

    def __repr__(self) -> str:
        return f"Activations({', '.join(f'{name} {array.dtype}{list(array.shape)}' for name, array in self.items())})"
