"""Normalisations as CustomOps, under vLLM's names. All compute in float32 and return the input's type.

`RMSNorm`, `GemmaRMSNorm`, `LayerNorm` and `LayerNorm1P` are called with x, or with x and a residual: then they return
(norm(x + residual), x + residual).
"""

from __future__ import annotations

import torch
from torch import nn

from llm.base.custom_op import CustomOp
from llm.base.watch import Patchable
from llm.errors import ValidationError
from llm.kernels.backend import Operations
from llm.kernels.select import backend_of_construction
from llm.layers.custom_op import KernelOp
from llm.quantization.unquantized import new_parameter

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def filled(size: int, value: float, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter [size] filled with `value`, which the checkpoint overwrites."""
    return nn.Parameter(torch.full((size,), value, dtype=dtype), requires_grad=False)


@CustomOp.register("rms_norm")
class RMSNorm(KernelOp):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (arXiv:1910.07467).

    Inputs of 16 bits are rounded to their type before they are multiplied by the weight, and after it.

    Args:
        hidden_size: channels, the last dimension of x.
        eps: added to the mean.
        var_hidden_size: the mean is over this many leading channels; None: over all.
        has_weight: False: no `weight`, and no multiplication by it.
        dtype: of `weight` [hidden_size]; None: torch's default.
    """

    operations = ("rms_norm", "add_rms_norm")

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if var_hidden_size is not None and not 0 < var_hidden_size <= hidden_size:
            raise ValidationError(
                f"var_hidden_size={var_hidden_size} must be from 1 to the {hidden_size} channels.",
                parameter="var_hidden_size",
                value=var_hidden_size,
            )
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
        self.weight = filled(hidden_size, 1.0, dtype) if has_weight else None

    def compute(self, ops: Operations, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        own = self.weight, self.variance_epsilon, self.variance_size_override
        if residual is None:
            return ops.rms_norm(x, *own, rounds_first=True)
        return ops.add_rms_norm(x, residual, *own, rounds_first=True)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(KernelOp):
    """RMSNorm whose checkpoint stores weight - `weight_offset`. Arguments as of `RMSNorm`."""

    operations = ("rms_norm", "add_rms_norm")

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 1.0,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.weight_offset = weight_offset
        self.weight = filled(hidden_size, 0.0, dtype)

    def compute(self, ops: Operations, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        if residual is None:
            return ops.rms_norm(x, self.weight, self.variance_epsilon, weight_offset=self.weight_offset)
        return ops.add_rms_norm(x, residual, self.weight, self.variance_epsilon, weight_offset=self.weight_offset)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("layer_norm")
class LayerNorm(KernelOp):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in float32 (arXiv:1607.06450).

    Args:
        dim: channels, the last dimension of x.
        eps: added to the variance.
        dtype: of `weight` and `bias` [dim]; None: torch's default.
        has_weight, has_bias: False: no checkpoint has one; it is a buffer of ones or zeros.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    operations = ("layer_norm", "add_layer_norm")

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        *,
        has_weight: bool = True,
        has_bias: bool = True,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.dim = dim
        self.eps = eps
        for name, value, is_stored in (("weight", 1.0, has_weight), ("bias", 0.0, has_bias)):
            if is_stored:
                self.register_parameter(name, filled(dim, value, dtype))
            else:
                self.register_buffer(name, torch.full((dim,), value, dtype=dtype), persistent=False)

    def compute(self, ops: Operations, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        weight, bias = self.scale_and_shift()
        if residual is None:
            return ops.layer_norm(x, weight, bias, self.eps)
        return ops.add_layer_norm(x, residual, weight, bias, self.eps)

    def scale_and_shift(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is multiplied and added, both of one type: a checkpoint may store one of them wider."""
        weight, bias = self.weight, self.bias
        if weight.dtype != bias.dtype:
            return weight.float(), bias.float()
        return weight, bias

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps}"


@CustomOp.register("layer_norm_1p")
class LayerNorm1P(LayerNorm):
    """LayerNorm whose checkpoint stores weight - 1. Arguments as of `LayerNorm`."""

    def scale_and_shift(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight.float() + 1.0, self.bias.float()


def _check_divides(parameter: str, groups: int, size: int) -> None:
    if groups < 1 or size % groups:
        raise ValidationError(
            f"{parameter}={groups} does not divide the {size} channels.", parameter=parameter, value=groups
        )


@CustomOp.register("mixer2_gated_rms_norm")
class Mixer2RMSNormGated(KernelOp):
    """The norm inside a Mamba 2 mixer: group RMSNorm of x * silu(gate) (arXiv:2405.21060).

    Args:
        full_hidden_size: channels, the last dimension of x and gate.
        full_n_groups: the mean is within each of this many equal runs of channels.
        use_rms_norm: False: only x * silu(gate), and no `weight`.
        eps: added to the mean.
        dtype: of `weight` [full_hidden_size]; None: torch's default.
        norm_before_gate: True: norm(x) * silu(gate).
    """

    operations = ("gated_rms_norm",)

    def __init__(
        self,
        full_hidden_size: int,
        full_n_groups: int,
        use_rms_norm: bool = True,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        *,
        norm_before_gate: bool = False,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        _check_divides("full_n_groups", full_n_groups, full_hidden_size)
        self.n_groups = full_n_groups
        self.variance_epsilon = eps
        self.norm_before_gate = norm_before_gate
        self.weight = filled(full_hidden_size, 1.0, dtype) if use_rms_norm else None

    def compute(self, ops: Operations, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return ops.gated_rms_norm(x, gate, self.weight, self.variance_epsilon, self.n_groups, self.norm_before_gate)


# Names of activations -> those of the operation.
_GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


@CustomOp.register("rms_norm_gated")
class RMSNormGated(KernelOp):
    """RMSNorm with an optional gate z of the shape of x: norm(x * act(z)), or norm(x) * act(z).

    Mamba 2 gates before the norm (arXiv:2405.21060), Qwen3-Next after it.

    Args:
        hidden_size: channels, the last dimension of x.
        eps: added to the mean.
        group_size: the mean is within runs of this many channels; None: over all.
        norm_before_gate: True: norm(x) * act(z).
        dtype: of `weight` [hidden_size]; None: torch's default.
        activation: act, "swish" (or "silu", the same) or "sigmoid".
    """

    operations = ("gated_rms_norm",)

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        dtype: torch.dtype | None = None,
        activation: str = "swish",
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        _check_divides("group_size", hidden_size if group_size is None else group_size, hidden_size)
        if activation not in _GATES:
            raise ValidationError(
                f"activation={activation!r} is no gate of RMSNormGated; use {', '.join(map(repr, _GATES))}.",
                parameter="activation",
                value=activation,
            )
        self.hidden_size = hidden_size
        self.eps = eps
        self.groups = 1 if group_size is None else hidden_size // group_size
        self.norm_before_gate = norm_before_gate
        self.activation = activation
        self.weight = filled(hidden_size, 1.0, dtype)

    def compute(self, ops: Operations, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        gate = _GATES[self.activation]
        return ops.gated_rms_norm(x, z, self.weight, self.eps, self.groups, self.norm_before_gate, gate)

    def extra_repr(self) -> str:
        order = "before" if self.norm_before_gate else "after"
        return f"hidden_size={self.hidden_size}, eps={self.eps}, groups={self.groups}, {order} the gate"


class HeadsRMSNorm(Patchable):
    """RMSNorm of each head by itself: float32 [N, heads * head_size], rows of any stride -> the same shape.

    Args:
        total_heads: of the whole model, whose weights a checkpoint has as [total_heads, head_size].
        heads: of this rank.
        part: which `heads` of them.
    """

    def __init__(
        self, total_heads: int, heads: int, head_size: int, eps: float, dtype: torch.dtype | None, part: int
    ) -> None:
        super().__init__()
        self.total_heads, self.heads, self.head_size, self.eps, self.part = total_heads, heads, head_size, eps, part
        self.weight = new_parameter(torch.ones(heads, head_size, dtype=dtype), self._load)
        self._ops = backend_of_construction().ops

    def _load(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        """This rank's heads."""
        wanted = [self.total_heads, self.head_size]
        if list(loaded.shape) != wanted:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {wanted}")
        param.data.copy_(loaded.narrow(0, self.part * self.heads, self.heads))
        return param.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.gated_rms_norm(x, None, self.weight.view(-1), self.eps, self.heads)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_size={self.head_size}, eps={self.eps}"
