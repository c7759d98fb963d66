"""Normalisations as CustomOps, under vLLM's names. All compute in float32 and return the type of their input.

`RMSNorm`, `GemmaRMSNorm` and `LayerNorm` are called with x alone, or with a residual: then they return
(norm(x + residual), x + residual), the pair that a decoder layer passes on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from llm.base.custom_op import CustomOp
from llm.base.errors import ValidationError
from llm.kernels.backend import Operations
from llm.kernels.reference.norm import group_rms_norm
from llm.layers.kernel_op import KernelOp

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _filled(size: int, value: float, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.full((size,), value, dtype=dtype), requires_grad=False)


def _check_divides(parameter: str, groups: int, size: int) -> None:
    if groups < 1 or size % groups:
        raise ValidationError(
            f"{parameter}={groups} does not divide the {size} channels.", parameter=parameter, value=groups
        )


@CustomOp.register("rms_norm")
class RMSNorm(KernelOp):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (arXiv:1910.07467).

    Args:
        hidden_size: channels, the last dimension of x.
        eps: added to the mean.
        var_hidden_size: the mean is over this many leading channels; None: over all.
        has_weight: False: no `weight`, nothing is multiplied.
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
        self.weight = _filled(hidden_size, 1.0, dtype) if has_weight else None

    def compute(self, ops: Operations, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        if residual is None:
            return ops.rms_norm(x, self.weight, self.variance_epsilon, self.variance_size_override)
        return ops.add_rms_norm(x, residual, self.weight, self.variance_epsilon, self.variance_size_override)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(KernelOp):
    """RMSNorm whose checkpoint stores weight - 1. Arguments as of `RMSNorm`."""

    operations = ("rms_norm", "add_rms_norm")

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, dtype: torch.dtype | None = None, *, enforce_enable: bool = False
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.weight = _filled(hidden_size, 0.0, dtype)

    def compute(self, ops: Operations, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        if residual is None:
            return ops.rms_norm(x, self.weight, self.variance_epsilon, weight_offset=1.0)
        return ops.add_rms_norm(x, residual, self.weight, self.variance_epsilon, weight_offset=1.0)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("layer_norm")
class LayerNorm(KernelOp):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in float32 (arXiv:1607.06450).

    Args:
        dim: channels, the last dimension of x.
        eps: added to the variance.
        dtype: of `weight` and `bias` [dim]; None: torch's default.
    """

    operations = ("layer_norm", "add_layer_norm")

    def __init__(
        self, dim: int, eps: float = 1e-6, dtype: torch.dtype | None = None, *, enforce_enable: bool = False
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.dim = dim
        self.eps = eps
        self.weight = _filled(dim, 1.0, dtype)
        self.bias = _filled(dim, 0.0, dtype)

    def compute(self, ops: Operations, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        if residual is None:
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps}"


_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


@CustomOp.register("rms_norm_gated")
class RMSNormGated(CustomOp):
    """RMSNorm with an optional gate z of the shape of x: norm(x * act(z)), or norm(x) * act(z).

    Mamba 2 gates before (arXiv:2405.21060), Qwen3-Next after.

    Args:
        hidden_size: channels, the last dimension of x.
        eps: added to the mean.
        group_size: the mean is within runs of this many channels; None: over all.
        norm_before_gate: True: norm(x) * act(z).
        dtype: of `weight` [hidden_size]; None: torch's default.
        activation: act, "swish" (or "silu", the same) or "sigmoid".
    """

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
        self.weight = _filled(hidden_size, 1.0, dtype)

    def forward_native(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        wide = x.float()
        gate = 1.0 if z is None else _GATES[self.activation](z.float())
        if self.norm_before_gate:
            return (self._norm(wide) * gate).to(x.dtype)
        return self._norm(wide * gate).to(x.dtype)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return group_rms_norm(x, self.weight, self.eps, self.groups)

    def extra_repr(self) -> str:
        order = "before" if self.norm_before_gate else "after"
        return f"hidden_size={self.hidden_size}, eps={self.eps}, groups={self.groups}, {order} the gate"


@CustomOp.register("mixer2_gated_rms_norm")
class Mixer2RMSNormGated(CustomOp):
    """The norm inside a Mamba 2 mixer: group RMSNorm of x * silu(gate) (arXiv:2405.21060).

    Args:
        full_hidden_size: channels, the last dimension of x and gate.
        full_n_groups: the mean is within each of this many equal runs of channels.
        use_rms_norm: False: only x * silu(gate), and no `weight`.
        eps: added to the mean.
        dtype: of `weight` [full_hidden_size]; None: torch's default.
    """

    def __init__(
        self,
        full_hidden_size: int,
        full_n_groups: int,
        use_rms_norm: bool = True,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        _check_divides("full_n_groups", full_n_groups, full_hidden_size)
        self.n_groups = full_n_groups
        self.variance_epsilon = eps
        self.weight = _filled(full_hidden_size, 1.0, dtype) if use_rms_norm else None

    def forward_native(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = x.float() * F.silu(gate.float())
        if self.weight is not None:
            gated = group_rms_norm(gated, self.weight, self.variance_epsilon, self.n_groups)
        return gated.to(x.dtype)
