"""Our layers in the places of transformers', with the names that the checkpoint gives to their weights.

Exchanged are linear layers, the token embedding, the LM head, the operations that the probe recognised, and modules of
experts, whose stacked weights are cut. Everything that stays is float32. Experts that `TransformersFusedMoE` does not
compute stay transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn

from llm.base.construction import constructing_alone
from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from llm.layers.linear import ReplicatedLinear
from llm.layers.moe import TransformersFusedMoE
from llm.models.interface import BuildOptions, Cut
from llm.models.transformers_backend.probe import Layout
from llm.models.transformers_backend.recognise import PositionTable, is_conv1d, replace_module
from llm.models.transformers_backend.skeleton import Skeleton, Theirs


class TokenEmbedding(VocabParallelEmbedding):
    """ids -> rows times `scale`; floats -> logits where the table is also the LM head, at its second place."""

    scale: float = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return self.quant_method.apply(self, x, None)
        rows = super().forward(x)
        return rows if self.scale == 1.0 else rows * self.scale


class TiedHead(Patchable):
    """An LM head that is the embedding's table and has a bias of its own."""

    def __init__(self, table: TokenEmbedding, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias
        # Not a submodule: its weights have their name at the embedding.
        self._table = (table,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._table[0](x) + self.bias


class LMHead(ParallelLMHead):
    """hidden states -> logits, as transformers calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, self.bias)


def replace_layers(
    skeleton: Skeleton, layout: Layout, options: BuildOptions
) -> tuple[tuple[str, ...], Mapping[str, Cut]]:
    """Exchange the layers of `skeleton`.

    Returns the parameters that the checkpoint stores transposed, and how stacked weights of experts are cut.
    """
    model = skeleton.model
    if options.tp.size > 1:
        raise UnsupportedModelError("models that run on transformers' code are not split over several ranks.")
    head = _path(model, skeleton.head)
    transposed = []
    for name in layout.linear:
        if name != head:
            if is_conv1d(model.get_submodule(name)):
                transposed.append(f"{name}.weight")
            model.set_submodule(name, _linear(model.get_submodule(name), name, options))
    _replace_vocabulary(skeleton, layout, head, options)
    for name, replacement in layout.replacements.items():
        replace_module(model, name, replacement)
    for name in layout.tables:
        model.set_submodule(name, PositionTable(model.get_submodule(name), options.max_model_len))
    stacked = _replace_experts(model, options)
    _allocate(model)
    return tuple(transposed), stacked


def _path(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _linear(theirs: nn.Module, name: str, options: BuildOptions) -> ReplicatedLinear:
    weight: torch.Tensor = theirs.weight  # type: ignore[assignment]
    outputs, inputs = reversed(weight.shape) if is_conv1d(theirs) else weight.shape
    has_bias = getattr(theirs, "bias", None) is not None
    return ReplicatedLinear(
        inputs,
        outputs,
        has_bias,
        params_dtype=options.params_dtype,
        quant_config=options.quant_config,
        prefix=name,
        return_bias=False,
    )


def _replace_vocabulary(skeleton: Skeleton, layout: Layout, head_name: str, options: BuildOptions) -> None:
    model, embedding, head = skeleton.model, skeleton.embedding, skeleton.head
    name = _path(model, embedding)
    rows, width = _shape(embedding)
    common = {"params_dtype": options.params_dtype, "quant_config": options.quant_config}
    if layout.embedding_scale is not None:
        own = TokenEmbedding(rows, width, prefix=name, tied=skeleton.tied, padding_size=1, **common)  # type: ignore[arg-type]
        own.scale = layout.embedding_scale
        model.set_submodule(name, own)
        if skeleton.tied:
            model.set_submodule(head_name, own if head.bias is None else TiedHead(own, head.bias))  # type: ignore[arg-type]
            return
    elif skeleton.tied:
        raise UnsupportedModelError(f"{type(model).__name__} ties the LM head to an embedding that is no plain table.")
    outputs, inputs = _shape(head)
    lm_head = LMHead(outputs, inputs, prefix=head_name, padding_size=1, **common)  # type: ignore[arg-type]
    lm_head.bias = head.bias  # type: ignore[assignment]
    model.set_submodule(head_name, lm_head)


def _shape(module: Theirs) -> torch.Size:
    return module.weight.shape


def _allocate(model: nn.Module) -> None:
    """Memory for the parameters that stay transformers': float32, as everything is computed."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        if hasattr(module, "quant_method"):
            bias = getattr(module, "bias", None)
            if isinstance(bias, nn.Parameter) and bias.is_meta:
                module.bias = _made(bias, made)
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = _made(parameter, made)


def _made(parameter: nn.Parameter, made: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> nn.Parameter:
    """The same for the same parameter: some are shared."""
    if id(parameter) not in made:
        data = torch.empty(parameter.shape, dtype=parameter.dtype)
        made[id(parameter)] = parameter, nn.Parameter(data, requires_grad=False)
    return made[id(parameter)][1]


# Whatever a module is called in, its path ends with it: checkpoints of one tensor per expert have it before the number.
_NAME = "experts"
# Sizes of the weights that modules are tried with.
_COUNT, _HIDDEN, _INNER, _TOKENS, _TOP_K = 4, 16, 8, 6, 2
_FLAGS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")


def _replace_experts(model: nn.Module, options: BuildOptions) -> dict[str, Cut]:
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
