"""Gated norms of the mixers in recurrent models: computed in float32, returned in the input's type."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from llm.base.custom_op import CustomOp
from llm.base.errors import ValidationError
from llm.kernels.reference.norm import group_rms_norm
from llm.layers.norm import filled

_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


def _check_divides(parameter: str, groups: int, size: int) -> None:
    if groups < 1 or size % groups:
        raise ValidationError(
            f"{parameter}={groups} does not divide the {size} channels.", parameter=parameter, value=groups
        )


@CustomOp.register("rms_norm_gated")
class RMSNormGated(CustomOp):
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
        self.weight = filled(full_hidden_size, 1.0, dtype) if use_rms_norm else None

    def forward_native(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = x.float() * F.silu(gate.float())
        if self.weight is not None:
            gated = group_rms_norm(gated, self.weight, self.variance_epsilon, self.n_groups)
        return gated.to(x.dtype)
