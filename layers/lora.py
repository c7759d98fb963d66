"""What adapters add to the results of linear layers, embedding tables and LM heads.

A layer has `LayerAdapters` while adapters are enabled; through `AdapterRows` all of them learn from the runner
which rows have which adapter. Which adapters are loaded is `llm.runner.adapters`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from llm.kernels.backend import Operation
from llm.kernels.weight import LoraTerms


@dataclass
class AdapterRows:
    """The slot of each row's adapter, int64 [rows], 0: none; None: no row has one.

    The runner sets it before it computes a step, and layers read it: they get hidden states and not the batch.
    """

    slots: torch.Tensor | None = None

    @contextmanager
    def of(self, slots: torch.Tensor | None) -> Iterator[None]:
        """Rows have these slots while the context is open."""
        before, self.slots = self.slots, slots
        try:
            yield
        finally:
            self.slots = before


class LayerAdapters:
    """What the loaded adapters add to the result of one layer.

    Args:
        rows: shared by all layers with the same rows.
        operation: `lora` of the backend, or `lora_embedding`.

    Attributes:
        terms: None: no loaded adapter changes this layer.
        is_reached: the layer has called `add` for rows with adapters: it does not compute in another way.
    """

    def __init__(self, rows: AdapterRows, operation: Operation) -> None:
        self._rows = rows
        self._operation = operation
        self.terms: LoraTerms | None = None
        self.is_reached = False

    def add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y with what they add for each row of x, which are hidden states or ids; y may be changed."""
        slots, terms = self._rows.slots, self.terms
        if slots is None or terms is None:
            return y
        self.is_reached = True
        added: torch.Tensor = self._operation(y, x, slots, terms)
        return added
