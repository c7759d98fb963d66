"""Mamba 2's mixer (arXiv:2405.21060)."""

from __future__ import annotations

from typing import Any

import torch

from llm.base.custom_op import PluggableLayer
from llm.forward import ForwardBatch, RecurrentSpec
from llm.kernels.reference.scan import NO_LIMIT
from llm.kernels.select import backend_of_construction
from llm.layers.factors import ColumnFactors
from llm.layers.linear import ReplicatedLinear
from llm.layers.mamba.conv import CausalConv1d
from llm.layers.mamba.gated_norm import Mixer2RMSNormGated
from llm.layers.mamba.parameters import DecayingLayer, MambaBase, float32_parameter
from llm.quantization.base import QuantizationConfig


@PluggableLayer.register("mamba_mixer2")
class MambaMixer2(MambaBase, DecayingLayer):
    """Input projection, convolution, the recurrence of each head, gated norm and output projection.

    Every rank of a tensor-parallel group computes all of it.

    Args:
        hidden_size: channels of what goes in and comes out.
        ssm_state_size: states of each channel.
        conv_kernel_size: inputs that the convolution sees.
        intermediate_size: channels of the recurrence, num_heads * head_dim.
        use_conv_bias, use_bias: of the convolution; of the projections at both ends.
        n_groups: consecutive heads share one of so many B and C; the norm is over each group's channels.
        use_rms_norm: False: the gate alone.
        norm_before_gate: the norm is of the recurrence's output; False: of its product with the gate.
        dt_limit: between which steps are clamped.
        multipliers: of what `in_proj` computes: gate, x, B, C and steps; None: no such constants.
        layer_index: position of this layer's state among the model's.
        params_dtype, quant_config, prefix: as in `LinearBase`.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        use_conv_bias: bool,
        use_bias: bool,
        n_groups: int = 1,
        num_heads: int = 128,
        head_dim: int = 64,
        rms_norm_eps: float = 1e-5,
        use_rms_norm: bool = True,
        *,
        layer_index: int,
        norm_before_gate: bool = False,
        dt_limit: tuple[float, float] = NO_LIMIT,
        multipliers: tuple[float, ...] | None = None,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        common: dict[str, Any] = {"params_dtype": params_dtype, "quant_config": quant_config}
        self.layer_index, self.dt_limit = layer_index, dt_limit
        shared = n_groups * ssm_state_size
        self.conv_sizes = [intermediate_size, shared, shared]
        self.sizes = [intermediate_size, sum(self.conv_sizes), num_heads]
        self.in_proj = ReplicatedLinear(
            hidden_size, sum(self.sizes), use_bias, prefix=f"{prefix}.in_proj", return_bias=False, **common
        )
        parts = [intermediate_size, *self.conv_sizes, num_heads]
        self.factors = None if multipliers is None else ColumnFactors(list(zip(parts, multipliers, strict=True)))
        self.conv1d = CausalConv1d(
            [sum(self.conv_sizes)], conv_kernel_size, bias=use_conv_bias, activation="silu", params_dtype=torch.float32
        )
        self.A_log, self.D, self.dt_bias = (float32_parameter(num_heads) for _ in range(3))
        self.norm = Mixer2RMSNormGated(
            intermediate_size, n_groups, use_rms_norm, rms_norm_eps, params_dtype, norm_before_gate=norm_before_gate
        )
        self.out_proj = ReplicatedLinear(
            intermediate_size, hidden_size, use_bias, prefix=f"{prefix}.out_proj", return_bias=False, **common
        )
        self._scan = backend_of_construction().op("mamba2_scan")

    @staticmethod
    def state_spec(
        conv_kernel_size: int, n_groups: int, num_heads: int, head_dim: int, ssm_state_size: int
    ) -> RecurrentSpec:
        """The last inputs of the convolution, and the states of the recurrence."""
        channels = num_heads * head_dim + 2 * n_groups * ssm_state_size
        shapes = (conv_kernel_size - 1, channels), (num_heads, ssm_state_size, head_dim)
        return RecurrentSpec(shapes, (torch.float32, torch.float32), rolls_back=True)

    def forward(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """float [N, hidden_size] of the step's tokens -> the same shape."""
        projected = self.in_proj(hidden_states)
        if self.factors is not None:
            projected = self.factors(projected)
        conv_state, state = batch.states[self.layer_index]
        metadata = batch.metadata[self.layer_index]
        gate, inputs, dt = projected.split_with_sizes(self.sizes, dim=-1)
        x, b, c = self.conv1d(inputs, conv_state, metadata).split_with_sizes(self.conv_sizes, dim=-1)
        constants = self.D, self.dt_bias, state
        y = metadata.run(lambda rows: self._scan(x, dt, self.rates, b, c, *constants, rows, self.dt_limit))
        return self.out_proj(self.norm(y, gate))
