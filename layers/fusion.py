"""A norm or an activation computed by the product that reads it.

Owns `Fusion`, by which a block declares such a pair, and the conditions under which the two are one kernel: both are
the platform's own, and nobody watches or replaces what is in between. They are looked at in every call, in the modules
that the block has then; where one does not hold, the operation is computed by itself, as if nothing had been declared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llm.kernels.reference.rows import gives_rows, marked, takes_rows
from llm.layers.custom_op import CustomOp, is_watched


@dataclass(frozen=True)
class Fusion:
    """Declared in a block's class: `op` is read by `reader` alone, which passes it to one linear layer untouched.

        class Block(nn.Module):
            activated = Fusion("act_fn", "down_proj")

            def forward(self, x):
                return self.down_proj(self.activated(self.gate_up_proj(x)))

    `self.activated` takes what `self.act_fn` takes. It returns the same, or `Rows` in place of its first tensor, which
    `down_proj` computes as it reads them. A residual sum that comes with rows is filled in then, not before.

    Args:
        op: name of the block's operation, a `CustomOp` with a `row_operation()`.
        reader: name of the block's linear layer, or of a block inside it that names its own linear layer in
            `input_product` and whose forward is marked with `takes_rows`.
    """

    op: str
    reader: str

    def __get__(self, block: Any, owner: Any = None) -> Any:
        return self if block is None else functools.partial(self.compute, block)

    def compute(self, block: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """`op(x)` or `op(x, residual)`, its first tensor perhaps as `Rows`."""
        op: Any = getattr(block, self.op)
        given = (x,) if residual is None else (x, residual)
        # Whoever traces the block is shown its operations: rows are no tensor.
        if torch.compiler.is_compiling() or self.refusal(block) is not None or not all(_fits(item) for item in given):
            return op(*given)
        rows = op.row_operation().rows(*given)
        return rows if residual is None else (rows, rows.total)

    def refusal(self, block: nn.Module) -> str | None:
        """Why the two are not one kernel, None when they are."""
        op, readers = getattr(block, self.op, None), [reader for _, reader in self.readers(block)]
        if not isinstance(op, CustomOp) or type(op).forward is not CustomOp.forward:
            return "the operation has a forward of its own"
        if not marked(op._forward_method, gives_rows):
            return f"products do not compute {op.binding.method}"
        if not all(isinstance(reader, nn.Module) and marked(reader.forward, takes_rows) for reader in readers):
            return "what reads it has a forward of its own"
        if is_watched((op, *readers)):
            return "somebody watches"
        method: Any = getattr(readers[-1], "quant_method", None)
        if not getattr(method, "fuses", False) or not marked(method.apply, takes_rows):
            return "the product reads rows from memory"
        return None

    def readers(self, block: nn.Module) -> list[tuple[str, Any]]:
        """What the rows pass through, by name, the linear layer last."""
        name: str | None = self.reader
        found: list[tuple[str, Any]] = []
        while name is not None:
            block = getattr(block, name, None)  # type: ignore[assignment]
            found.append((name, block))
            name = getattr(block, "input_product", None)
        return found


def fusions(block: nn.Module) -> list[Fusion]:
    """What a block's class declares."""
    names = {name: value for base in reversed(type(block).__mro__) for name, value in vars(base).items()}
    return [value for value in names.values() if isinstance(value, Fusion)]


def _fits(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.dim() == 2 and x.is_contiguous()
