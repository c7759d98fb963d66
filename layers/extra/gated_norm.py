"""The gated norm of Qwen3-Next's mixer: computed in float32, returned in the input's type."""

from __future__ import annotations

import torch

from llm.base.custom_op import CustomOp
from llm.errors import ValidationError
from llm.kernels.backend import Operations
from llm.layers.kernel_op import KernelOp
from llm.layers.mamba.gated_norm import check_divides
from llm.layers.norm import filled

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
        check_divides("group_size", hidden_size if group_size is None else group_size, hidden_size)
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
