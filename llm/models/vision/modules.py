"""Ours in the places of transformers' modules: linear layers, convolutions, norms, activations; and large inputs in
parts.

What depends on a picture alone has the same bits in parts, and a part stays in the processor's caches, where a tensor
of all tiles of a page is written to memory that the system must give first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from llm.base.construction import construction
from llm.base.watch import Patchable
from llm.kernels.select import backend_of_construction
from llm.layers.activation import GELU, GELUTanh, QuickGELU
from llm.layers.linear import ReplicatedLinear
from llm.layers.norm import LayerNorm
from llm.layers.vision import Conv2dLayer, Conv3dLayer
from llm.models.transformers_backend.skeleton import Theirs
from llm.models.vision import attention
from llm.quantization.base import QuantizationConfig

# Of the input of a module that computes each row by itself.
_ROWS = 1024
_MASK = "attention_mask"


def put_ours_in(model: nn.Module, dtype: torch.dtype, quant_config: QuantizationConfig | None) -> None:
    """`dtype`: in which matrices are stored; all else is of the activations' type."""
    for path, module in list(model.named_modules()):
        if attention.is_sams(module):
            model.set_submodule(path, attention.SamAttention(module, path, dtype, quant_config))
        elif attention.is_decoder_of_ocr(module):
            model.set_submodule(path, attention.OcrDecoder(module, path, dtype, quant_config))
    for path, module in list(model.named_modules()):
        own = _ours(module, path, dtype, quant_config)
        if own is not None:
            model.set_submodule(path, own)
    if backend_of_construction().device.type != "cpu":  # on a device a part costs as many kernels as the whole
        return
    for module in model.modules():
        if _is_row_wise(module):
            module.forward = partial(_by_rows, module.forward)
        elif _is_layer(module):
            module.forward = partial(_by_pictures, module.forward, list(inspect.signature(module.forward).parameters))


def _ours(
    theirs: nn.Module, path: str, dtype: torch.dtype, quant_config: QuantizationConfig | None
) -> nn.Module | None:
    """None: it stays."""
    if type(theirs) is nn.Linear:
        return _linear(theirs, path, dtype, quant_config)
    if type(theirs) in (nn.Conv2d, nn.Conv3d):
        return _convolution(theirs)
    if type(theirs) is nn.LayerNorm and len(theirs.normalized_shape) == 1:
        has = {f"has_{name}": getattr(theirs, name) is not None for name in ("weight", "bias")}
        return LayerNorm(theirs.normalized_shape[0], theirs.eps, construction().activations, **has)
    if isinstance(theirs, nn.GELU):
        return GELU() if theirs.approximate == "none" else GELUTanh()
    make = _ACTIVATIONS.get(type(theirs).__name__)
    return None if make is None else make()


class SiLU(Patchable):
    """x sigmoid(x). PyTorch's bits depend on the number of threads."""

    def __init__(self) -> None:
        super().__init__()
        self._ops = backend_of_construction().ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._ops.silu(x)
        return found


# Of torch and transformers, by class.
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "GELUActivation": GELU,
    "GELUTanh": GELUTanh,
    "PytorchGELUTanh": GELUTanh,
    "QuickGELUActivation": QuickGELU,
    "SiLU": SiLU,
    "SiLUActivation": SiLU,
}


class TowerLinear(ReplicatedLinear):
    """With the names by which transformers' modules ask for sizes."""

    @property
    def in_features(self) -> int:
        return self.input_size

    @property
    def out_features(self) -> int:
        return self.output_size


def _linear(theirs: nn.Linear, name: str, dtype: torch.dtype, quant_config: QuantizationConfig | None) -> TowerLinear:
    return TowerLinear(
        theirs.in_features,
        theirs.out_features,
        theirs.bias is not None,
        params_dtype=dtype,
        quant_config=quant_config,
        prefix=name,
        return_bias=False,
    )


def _convolution(theirs: Theirs) -> Conv2dLayer | Conv3dLayer:
    return (Conv2dLayer if isinstance(theirs, nn.Conv2d) else Conv3dLayer)(
        theirs.in_channels,
        theirs.out_channels,
        theirs.kernel_size,
        theirs.stride,
        theirs.padding,
        theirs.dilation,
        theirs.groups,
        theirs.bias is not None,
        theirs.padding_mode,
        params_dtype=construction().activations,
    )


def _is_layer(module: nn.Module) -> bool:
    """Whether it is a layer of an encoder of transformers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _by_pictures(whole: Callable[..., Theirs], names: list[str], *args: Theirs, **kwargs: Theirs) -> Theirs:
    """A layer's output for [B, N, channels], one of B by itself: attention is within each of them.

    names: of the layer's positional arguments, the first of which is the input.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    hidden, mask = given.pop(names[0]), given.get(_MASK)
    others = (value for name, value in given.items() if name != _MASK)
    is_plain = len(args) <= len(names) and not any(map(_has_tensors, others))
    if not is_plain or hidden.dim() != 3 or len(hidden) == 1 or not isinstance(mask, torch.Tensor | None):
        return whole(*args, **kwargs)
    out = torch.empty_like(hidden)
    for index in range(len(hidden)):
        part = slice(index, index + 1)
        if mask is not None and len(mask) > 1:
            given[_MASK] = mask[part]
        found = whole(hidden[part], **given)
        if not isinstance(found, torch.Tensor):
            return whole(*args, **kwargs)
        out[part] = found
    return out


def _has_tensors(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensors, value)))


def _is_row_wise(module: nn.Module) -> bool:
    """Whether it is two or three matrices with an activation."""
    parts = [part for part in module.children() if not isinstance(part, nn.Dropout | nn.Identity)]
    if not type(module).__name__.lower().endswith("mlp") or not parts:
        return False
    linear = sum(isinstance(part, TowerLinear) for part in parts)
    return linear in (2, 3) and linear + 1 == len(parts)


def _by_rows(whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= _ROWS:
        return whole(x)
    first = whole(rows[:_ROWS])
    out = first.new_empty(len(rows), first.shape[-1])
    out[:_ROWS] = first
    for start in range(_ROWS, len(rows), _ROWS):
        out[start : start + _ROWS] = whole(rows[start : start + _ROWS])
    return out.view(*x.shape[:-1], out.shape[-1])
