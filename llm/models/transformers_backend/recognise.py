"""What stands in the place of transformers' modules: our operations, and tables of positions.

Which of our operations computes a module is found by comparing values, never by a name. A module that nothing here
matches stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from llm.base.watch import Patchable
from llm.layers.activation import GELU, GELUTanh, QuickGELU, ReLU, ReLUSquaredActivation, SiluAndMul
from llm.layers.norm import GemmaRMSNorm, LayerNorm, LayerNorm1P, RMSNorm
from llm.models.transformers_backend.skeleton import Theirs


class SiLU(Patchable):
    """silu(x), by the kernel of the gated activation."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gated(torch.cat((x, torch.ones_like(x)), dim=-1))


_NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "RMSNorm": lambda size, eps: RMSNorm(size, eps, dtype=torch.float32),
    "GemmaRMSNorm": lambda size, eps: GemmaRMSNorm(size, eps, dtype=torch.float32),
    "RMSNorm without weight": lambda size, eps: RMSNorm(size, eps, has_weight=False),
    "LayerNorm": lambda size, eps: LayerNorm(size, eps, torch.float32),
    "LayerNorm without bias": lambda size, eps: LayerNorm(size, eps, torch.float32, has_bias=False),
    "LayerNorm without weight": lambda size, eps: LayerNorm(size, eps, torch.float32, has_weight=False, has_bias=False),
    "LayerNorm1P": lambda size, eps: LayerNorm1P(size, eps, torch.float32),
}
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "SiLU": SiLU,
    "GELU": GELU,
    "GELUTanh": GELUTanh,
    "QuickGELU": QuickGELU,
    "ReLU": ReLU,
    "ReLUSquared": ReLUSquaredActivation,
}
# What is added to a mean of squares, where the module does not say: inputs as small as these tell them apart.
_EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, torch.finfo(torch.float32).eps)
_INPUT_SIZES = (1.0, 1e-2, 1e-3)


@dataclass(frozen=True)
class Replacement:
    """An operation of ours: a key of the tables above, and of norms the channels and what is added to the mean."""

    kind: str
    size: int = 0
    eps: float = 0.0

    def build(self) -> nn.Module:
        return _ACTIVATIONS[self.kind]() if self.kind in _ACTIVATIONS else _NORMS[self.kind](self.size, self.eps)


def recognise(module: nn.Module, width: int) -> Replacement | None:
    """Our operation with the values of `module`, which is called with one tensor [..., width]; None: there is none.

    Its parameters have values that tell the candidates apart.
    """
    if next(module.children(), None) is not None or next(module.buffers(recurse=False), None) is not None:
        return None
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) - {"weight", "bias"} or any(item.shape != (width,) for item in parameters.values()):
        return None
    inputs = _inputs(width)
    try:
        expected = [module(x.clone()) for x in inputs]
    except (RuntimeError, TypeError, ValueError):
        return None
    if not all(isinstance(y, torch.Tensor) and y.shape == x.shape for x, y in zip(inputs, expected, strict=True)):
        return None
    for candidate in _candidates(module, set(parameters), width):
        own = candidate.build()
        for name, parameter in parameters.items():
            getattr(own, name).data.copy_(parameter.data)
        if all(_same(own(x), y) for x, y in zip(inputs, expected, strict=True)):
            return candidate
    return None


def _candidates(module: nn.Module, parameters: set[str], width: int) -> Iterator[Replacement]:
    if not parameters:
        yield from map(Replacement, _ACTIVATIONS)
    kinds = {
        (): ("RMSNorm without weight", "LayerNorm without weight"),
        ("weight",): ("RMSNorm", "GemmaRMSNorm", "LayerNorm without bias"),
        ("bias", "weight"): ("LayerNorm", "LayerNorm1P"),
    }
    stated = (value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2)
    for eps in dict.fromkeys((*stated, *_EPSILONS)):
        for kind in kinds.get(tuple(sorted(parameters)), ()):
            yield Replacement(kind, width, eps)


def _inputs(width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(3, width, generator=generator)
    return [size * normal for size in _INPUT_SIZES] + [8.0 * normal]


def _same(own: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for rounding."""
    size = expected.abs().max().item()
    return torch.allclose(own, expected.float(), rtol=1e-5, atol=2e-6 * size)


def is_linear(module: nn.Module) -> bool:
    """True if `module` computes x W^T + bias with `weight` [N, K], or is transformers' Conv1D with [K, N]."""
    weight = getattr(module, "weight", None)
    if type(module) is nn.Linear:
        return True
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or next(module.children(), None) is not None:
        return False
    return is_conv1d(module) or (isinstance(module, nn.Linear) and _multiplies(module))


def is_conv1d(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def _multiplies(module: nn.Linear) -> bool:
    """Tried with a small weight in the place of its own."""
    kept = module.weight, module.bias
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(3, 4, generator=generator), torch.randn(1, 5, 4, generator=generator)
    bias = None if module.bias is None else torch.randn(3, generator=generator)
    try:
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return torch.allclose(module(x), functional.linear(x, weight, bias))
    except (RuntimeError, TypeError, ValueError):
        return False
    finally:
        module.weight, module.bias = kept


def embedding_scale(module: nn.Embedding) -> float | None:
    """The factor on the rows of the table in `module`'s output; None: it does something else. Its weight has values."""
    if type(module) is nn.Embedding:
        return 1.0
    rows = module.weight[:3]
    found = module(torch.arange(3))
    place = rows.abs().argmax()
    scale = (found.flatten()[place] / rows.flatten()[place]).item()
    return scale if torch.equal(found, rows * scale) or torch.allclose(found, rows * scale, rtol=1e-6) else None


def replace_module(model: nn.Module, name: str, replacement: Replacement) -> nn.Module:
    """Put our operation in the place of a module of the model, with its parameters."""
    kept, own = model.get_submodule(name), replacement.build()
    for key, parameter in kept.named_parameters(recurse=False):
        setattr(own, key, parameter)
    model.set_submodule(name, own)
    return own


class PositionTable(Patchable):
    """What a module computes from positions alone (rotary tables), computed once for all positions.

    It is in the place of `module`, which is called with positions [1, N] and returns tensors with a row for each. One
    that is scaled by the longest position that it is given (dynamic ropes, LongRoPE) is scaled for the longest sequence
    of the engine, as the families of `llm.models` are.

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
        positions = _positions_in(args, kwargs)
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


def _positions_in(args: tuple[Theirs, ...], kwargs: dict[str, Theirs]) -> torch.Tensor | None:
    """The positions among a call's arguments: the only integers [1, N], or [3, 1, N] with three equal streams."""
    found = [
        item
        for item in (*args, *kwargs.values())
        if isinstance(item, torch.Tensor) and not item.is_floating_point() and item.dim() >= 2 and item.shape[-2] == 1
    ]
    return found[0] if len(found) == 1 else None


def is_table(module: nn.Module, args: tuple[Theirs, ...], kwargs: dict[str, Theirs], output: object) -> bool:
    """True if this call, which returned `output`, may be one of a table of positions."""
    positions = _positions_in(args, kwargs)
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
