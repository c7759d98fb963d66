"""The gated norm inside a Mamba 2 mixer: computed in float32, returned in the input's type."""

from __future__ import annotations

import torch

from llm.base.custom_op import CustomOp
from llm.errors import ValidationError
from llm.kernels.backend import Operations
from llm.layers.kernel_op import KernelOp
from llm.layers.norm import filled


def check_divides(parameter: str, groups: int, size: int) -> None:
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
        check_divides("full_n_groups", full_n_groups, full_hidden_size)
        self.n_groups = full_n_groups
        self.variance_epsilon = eps
        self.norm_before_gate = norm_before_gate
        self.weight = filled(full_hidden_size, 1.0, dtype) if use_rms_norm else None

    def compute(self, ops: Operations, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return ops.gated_rms_norm(x, gate, self.weight, self.variance_epsilon, self.n_groups, self.norm_before_gate)
