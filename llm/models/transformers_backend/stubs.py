"""Stand-ins for a skeleton's weights, with which its forward pass can be tried before any weight is loaded.

Owns them. Matrices become cheap functions of each token by itself; vectors and small tensors get random values out of
one shared pool, so a skeleton of any size takes little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.models.transformers_backend.recognise import is_conv1d, is_linear
from llm.models.transformers_backend.skeleton import Theirs

_POOL = 1 << 22
_EMBEDDED = 64


def stub_weights(model: nn.Module) -> list[str]:
    """Give `model` values; returns the paths of its linear layers."""
    generator = torch.Generator().manual_seed(0)
    pool = 0.1 * torch.randn(_POOL, generator=generator)
    linear, values = [], _Values(pool)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            _stub_embedding(module, values)
            continue
        if is_linear(module):
            linear.append(name)
            _patch(module, _linear_stub(module, generator))
        elif any(parameter.numel() > _POOL for parameter in module.parameters(recurse=False)):
            _patch(module, _keeps_shape)
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                is_small = parameter.numel() <= _POOL
                module._parameters[key] = values.of(parameter) if is_small else _unreadable(parameter)
    return linear


def forget_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Take the values of these linear layers away: a model that reads a weight without calling the layer fails now.

    Loaded, the weight of a layer that is called is packed for our kernels.
    """
    for name in names:
        module: Theirs = model.get_submodule(name)
        module.weight = _unreadable(module.weight)


def _unreadable(parameter: nn.Parameter) -> nn.Parameter:
    """NaN in the memory of one number: a result that it enters is equal to none. A meta tensor would not do: a product
    of one with a CPU tensor raises nothing."""
    value = torch.full((), torch.nan) if parameter.is_floating_point() else torch.zeros((), dtype=parameter.dtype)
    return nn.Parameter(value.expand(parameter.shape), requires_grad=False)


class CalledOnly(Patchable):
    """In the place of an embedding: a model that reads rows of its weight without calling it fails now."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.called = embedding
        self.weight = torch.zeros(())  # it has a type and a device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.called(ids)


class _Values:
    """The same values for the same parameter: some are shared by modules."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        # The key's parameter is kept: its id is not given to another one.
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._next = 0

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Around 1 for vectors, which are mostly norms', and of the size of a trained weight for the others."""
        if id(parameter) not in self._made:
            count = parameter.numel()
            self._next = (self._next + 976) % (_POOL - count + 1)
            values = self._pool[self._next : self._next + count].view(parameter.shape)
            if not parameter.is_floating_point():
                values = torch.zeros(parameter.shape, dtype=parameter.dtype)
            elif parameter.dim() == 1:
                values = 1 + values
            made = nn.Parameter(values.to(parameter.dtype), requires_grad=False)
            self._made[id(parameter)] = parameter, made
        return self._made[id(parameter)][1]


def _patch(module: nn.Module, function: Callable[..., Theirs]) -> None:
    module.forward = function


def _linear_stub(module: nn.Module, generator: torch.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Each output channel is one input channel times a factor."""
    weight: Theirs = module.weight
    outputs, inputs = reversed(weight.shape) if is_conv1d(module) else weight.shape
    if outputs > _POOL or inputs > _POOL:
        raise UnsupportedModelError(f"a matrix of {outputs} x {inputs} is no model's.")
    channels = torch.randint(max(1, inputs), (outputs,), generator=generator)
    factors = torch.randn(outputs, generator=generator)
    return lambda x: x[..., channels] * factors


def _stub_embedding(module: nn.Embedding, values: _Values) -> None:
    """A table of a few rows, each for many ids."""
    rows = min(_EMBEDDED, module.num_embeddings)
    module.weight = values.of(nn.Parameter(torch.empty(rows, module.embedding_dim, device="meta")))

    def within(_: nn.Module, arguments: tuple[Theirs, ...]) -> tuple[Theirs, ...]:
        return tuple(item % rows if isinstance(item, torch.Tensor) else item for item in arguments)

    module.register_forward_pre_hook(within)


def _keeps_shape(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Of modules with large tensors of their own, which are experts: their output is shaped like their input."""
    return 0.5 * x
