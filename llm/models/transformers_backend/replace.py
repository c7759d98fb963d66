"""Our layers in the places of transformers', with the names that the checkpoint gives to their weights.

Owns the exchange: linear layers, the token embedding, the LM head, the operations that the probe recognised, and
float32 memory for everything that stays.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from llm.layers.linear import ReplicatedLinear
from llm.models.interface import BuildOptions, Cut
from llm.models.transformers_backend.experts import replace_experts
from llm.models.transformers_backend.observe import replace_module
from llm.models.transformers_backend.probe import Layout
from llm.models.transformers_backend.recognise import is_conv1d
from llm.models.transformers_backend.skeleton import Skeleton
from llm.models.transformers_backend.tables import PositionTable
from llm.models.transformers_backend.theirs import Theirs


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
    stacked = replace_experts(model, options)
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
