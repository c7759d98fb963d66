"""Our layers of experts in the places of transformers' modules of experts.

Owns which modules those are, and the cutting of their stacked weights. What `TransformersFusedMoE` does not compute
stays transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from llm.base.construction import constructing_alone
from llm.errors import UnsupportedModelError
from llm.layers.moe import TransformersFusedMoE
from llm.models.interface import BuildOptions, Cut
from llm.models.transformers_backend.theirs import Theirs

# Whatever a module is called in, its path ends with it: checkpoints of one tensor per expert have it before the number.
_NAME = "experts"
# Sizes of the weights that modules are tried with.
_COUNT, _HIDDEN, _INNER, _TOKENS, _TOP_K = 4, 16, 8, 6, 2
_FLAGS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")


def replace_experts(model: nn.Module, options: BuildOptions) -> dict[str, Cut]:
    """Exchange modules of experts; returns the `stacked_weights` of the model (`llm.models.interface.CausalLM`)."""
    cuts: dict[str, Cut] = {}
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[2] != _NAME or not _is_stack(module) or not computes_as_ours(module):
            continue
        try:
            ours = TransformersFusedMoE.of(
                module,
                _top_k(module),
                params_dtype=options.params_dtype,
                quant_config=options.quant_config,
                prefix=path,
            )
        except UnsupportedModelError:
            continue
        model.set_submodule(path, ours)
        cuts |= _cuts(module)
    return cuts


def computes_as_ours(experts: Theirs) -> bool:
    """True if our layer has the values of `experts`, tried with small weights in the places of its own."""
    names = [name for name, _ in experts.named_parameters(recurse=False)]
    kept, count = {name: experts.get_parameter(name) for name in names}, getattr(experts, "num_experts", None)
    generator = torch.Generator().manual_seed(5)
    shapes = {"gate_up_proj": (2 * _INNER, _HIDDEN), "down_proj": (_HIDDEN, _INNER)}
    for name in names:
        rows, columns = shapes[name.removesuffix("_bias")]
        shape = (rows,) if name.endswith("_bias") else (columns, rows) if experts.is_transposed else (rows, columns)
        setattr(experts, name, nn.Parameter(torch.randn(_COUNT, *shape, generator=generator), requires_grad=False))
    experts.num_experts = _COUNT
    x, weights = (torch.randn(_TOKENS, size, generator=generator) for size in (_HIDDEN, _TOP_K))
    ids = torch.stack([torch.randperm(_COUNT, generator=generator)[:_TOP_K] for _ in range(_TOKENS)])
    try:
        expected = experts(x, ids, weights)
        with constructing_alone():  # not packed for kernels, nor kept where this model's weights are
            ours = TransformersFusedMoE.of(experts, _TOP_K, params_dtype=torch.float32)
        ours.load_experts(experts)
        return torch.allclose(ours(x, ids, weights), expected, rtol=1e-4, atol=1e-3)
    except (AttributeError, RuntimeError, TypeError, ValueError, UnsupportedModelError):
        return False
    finally:
        experts.num_experts = count
        for name, parameter in kept.items():
            setattr(experts, name, parameter)


def own_weights(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """The paths of the layers that were exchanged, and their parameters."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, TransformersFusedMoE)}
    names = (f"{path}.{name}" for path, layer in layers.items() for name, _ in layer.named_parameters())
    return frozenset(layers), frozenset(names)


def _is_stack(module: Theirs) -> bool:
    """transformers marks the modules whose forward pass may be computed by any implementation of its own."""
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    is_marked = all(hasattr(module, name) for name in _FLAGS)
    return is_marked and all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


def _top_k(module: Theirs) -> int:
    """How many experts a token has: it decides no number, only what a step is said to cost."""
    given = getattr(module.config, "num_experts_per_tok", 1)
    return min(max(1, given), len(module.down_proj)) if isinstance(given, int) else 1


def _cuts(module: Theirs) -> dict[str, Cut]:
    take_turns, transposed = not module.is_concatenated, module.is_transposed
    found: dict[str, Cut] = {
        f"{_NAME}.gate_up_proj": partial(_both, "gate_up_proj.weight", take_turns, transposed),
        f"{_NAME}.down_proj": partial(_both, "down_proj.weight", False, transposed),
    }
    if module.has_bias:
        found[f"{_NAME}.gate_up_proj_bias"] = partial(_both, "gate_up_proj.bias", take_turns, False)
        found[f"{_NAME}.down_proj_bias"] = partial(_both, "down_proj.bias", False, False)
    return found


def _both(name: str, take_turns: bool, transposed: bool, part: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """One expert's tensor with the gate in its first rows, or the only matrix."""
    rows = part.t() if transposed else part
    yield name, torch.cat((rows[::2], rows[1::2])) if take_turns else rows
