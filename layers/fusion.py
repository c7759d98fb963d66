"""A norm or an activation computed by the product that reads it.

Owns `Fusion`, by which a block declares such a pair, and the conditions under which the two are one kernel: both are
the platform's own, and nobody watches or replaces what is in between. The answer is kept, and holds while the modules
and methods that it was found for are still in their places, unwatched: that much is looked at in every call. Where the
two are not one kernel, the operation is computed by itself, as if nothing had been declared.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from llm.base.custom_op import CustomOp, is_watched
from llm.kernels.reference.rows import Rows, gives_rows, marked, takes_rows


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

    def __init__(self, op: str, reader: str) -> None:
        self.op = op
        self.reader = reader
        self._kept_as = f"_fusion_of_{op}"

    def __get__(self, block: Any, owner: Any = None) -> Any:
        return self if block is None else functools.partial(self.compute, block)

    def compute(self, block: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """`op(x)` or `op(x, residual)`, its first tensor perhaps as `Rows`."""
        given = (x,) if residual is None else (x, residual)
        if torch.compiler.is_compiling():
            return getattr(block, self.op)(*given)  # whoever traces the block is shown tensors, which rows are not
        pair = block.__dict__.get(self._kept_as)
        if pair is None or not pair.holds():
            pair = block.__dict__[self._kept_as] = _Pair(block, self)
        if pair.refusal is not None:
            return pair.op(*given)
        try:
            rows = Rows(pair.op.row_operation(), *given)
        except ValueError:  # another type or a view: the operation takes it or says what is wrong
            return pair.op(*given)
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


class _Pair:
    """What a block's fusion was found to be, and what it was found for."""

    def __init__(self, block: nn.Module, fusion: Fusion) -> None:
        self.op: Any = getattr(block, fusion.op)
        self.refusal = fusion.refusal(block)
        readers = fusion.readers(block)
        owners = [block, *(reader for _, reader in readers[:-1])]
        name = next((name for name, module in block.named_children() if module is self.op), fusion.op)
        self._places = [(block._modules, name, self.op)]
        self._places += [(owner._modules, *reader) for owner, reader in zip(owners, readers, strict=True)]
        self._forwards = [(module, getattr(type(module), "forward", None)) for _, _, module in self._places]
        self._layer = readers[-1][1]
        self._state = self._methods()
        self._lasts = True
        self._lasts = self.holds()  # not what was found while somebody watched

    def holds(self) -> bool:
        """Whether all that it was found for is as it was, and nobody watches or did."""
        if not self._lasts:
            return False
        for modules, name, module in self._places:
            if module is None or modules.get(name) is not module:
                return False
        for module, forward in self._forwards:
            own = module.__dict__
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
                return False
            if type(module).forward is not forward:
                return False
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return False
        return self._methods() == self._state

    def _methods(self) -> tuple[Any, ...]:
        """What is bound for the operation and for the product."""
        bound, method = self.op.__dict__.get("_forward_method"), getattr(self._layer, "quant_method", None)
        if method is None:
            return bound, None
        return bound, method, method.__dict__.get("apply"), type(method).apply, getattr(method, "fuses", False)


def fusions(block: nn.Module) -> list[Fusion]:
    """What a block's class declares."""
    names = {name: value for base in reversed(type(block).__mro__) for name, value in vars(base).items()}
    return [value for value in names.values() if isinstance(value, Fusion)]
