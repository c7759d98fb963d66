"""Rotary tables: what a module computes from positions alone, computed once for all positions.

Owns `PositionTable`. A module whose table is scaled by the longest position that it is given (dynamic ropes, LongRoPE)
is scaled for the longest sequence of the engine, as the families of `llm.models` are.
"""

from __future__ import annotations

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.models.transformers_backend.theirs import Theirs


class PositionTable(Patchable):
    """In the place of `module`, which is called with positions [1, N] and returns tensors with a row for each.

    Args:
        length: how many positions there are.
    """

    def __init__(self, module: nn.Module, length: int) -> None:
        super().__init__()
        self.of = module
        self._length = length
        self._tables: dict[tuple[object, ...], Theirs] = {}

    def __getattr__(self, name: str) -> Theirs:
        """Attributes of the module that it stands for: other modules of transformers may read them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("of"), name)

    def forward(self, *args: Theirs, **kwargs: Theirs) -> Theirs:
        positions = positions_in(args, kwargs)
        if positions is None:
            return self.of(*args, **kwargs)
        key = _key(args, kwargs)
        if key not in self._tables:
            every = torch.arange(self._length, device=positions.device).expand(*positions.shape[:-1], self._length)
            swapped = [every if item is positions else item for item in args]
            self._tables[key] = self.of(
                *swapped, **{name: every if item is positions else item for name, item in kwargs.items()}
            )
        rows = positions.reshape(-1, positions.shape[-1])[0]
        table = self._tables[key]
        return tuple(item[:, rows] for item in table) if isinstance(table, tuple) else table[:, rows]


def positions_in(args: tuple[Theirs, ...], kwargs: dict[str, Theirs]) -> torch.Tensor | None:
    """The positions among a call's arguments: the only integers [1, N], or [3, 1, N] with three equal streams."""
    found = [
        item
        for item in (*args, *kwargs.values())
        if isinstance(item, torch.Tensor) and not item.is_floating_point() and item.dim() >= 2 and item.shape[-2] == 1
    ]
    return found[0] if len(found) == 1 else None


def is_table(module: nn.Module, args: tuple[Theirs, ...], kwargs: dict[str, Theirs], output: object) -> bool:
    """True if this call, which returned `output`, may be one of a table of positions."""
    positions = positions_in(args, kwargs)
    if positions is None or any(True for _ in module.parameters()) or any(True for _ in module.children()):
        return False
    outputs = output if isinstance(output, tuple) else (output,)
    return all(
        isinstance(item, torch.Tensor) and item.dim() == 3 and item.shape[:2] == (1, positions.shape[-1])
        for item in outputs
    )


def _key(args: tuple[Theirs, ...], kwargs: dict[str, Theirs]) -> tuple[object, ...]:
    """What else the call depends on, such as the type of the layer."""
    return tuple(
        (name, item) for name, item in (*enumerate(args), *kwargs.items()) if not isinstance(item, torch.Tensor)
    )
