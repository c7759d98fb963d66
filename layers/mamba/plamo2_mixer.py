"""PLaMo 2's mixer: Mamba 2's recurrence, whose steps, B and C are computed from what the convolution gives."""

from __future__ import annotations

import torch

from llm.base.custom_op import PluggableLayer
from llm.forward import ForwardBatch, RecurrentSpec
from llm.kernels.select import backend_of_construction
from llm.layers.by_head import StackedByHead
from llm.layers.linear import ReplicatedLinear
from llm.layers.mamba.conv import CausalConv1d
from llm.layers.mamba.gated_norm import Mixer2RMSNormGated
from llm.layers.mamba.mamba_mixer2 import MambaMixer2
from llm.layers.mamba.parameters import DecayingLayer, MambaBase, float32_parameter
from llm.layers.norm import RMSNorm
from llm.quantization.base import QuantizationConfig


@PluggableLayer.register("plamo2_mamba_mixer")
class Plamo2MambaMixer(MambaBase, DecayingLayer):
    """Input projection, convolution, the recurrence of each head, gate and output projection.

    All heads share one B and one C. Every rank of a tensor-parallel group computes all of it.

    Args:
        hidden_size: channels of what goes in and comes out.
        ssm_state_size: states of each channel.
        conv_kernel_size: inputs that the convolution sees.
        num_heads, head_dim: of the recurrence.
        time_step_rank: channels that steps are computed from.
        rms_norm_eps: of the norms of steps, B and C.
        layer_index: position of this layer's state among the model's.
        params_dtype, quant_config, prefix: as in `LinearBase`.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        num_heads: int,
        head_dim: int,
        time_step_rank: int,
        rms_norm_eps: float = 1e-6,
        *,
        layer_index: int,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        width = num_heads * head_dim

        def linear(name: str, inputs: int, outputs: int) -> ReplicatedLinear:
            path = f"{prefix}.{name}"
            return ReplicatedLinear(
                inputs,
                outputs,
                False,
                params_dtype=params_dtype,
                quant_config=quant_config,
                prefix=path,
                return_bias=False,
            )

        self.layer_index = layer_index
        self.sizes = [ssm_state_size, ssm_state_size, time_step_rank]
        self.in_proj = StackedByHead(
            hidden_size,
            [width, width],
            num_heads,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
            return_bias=False,
        )
        self.conv1d = CausalConv1d([width], conv_kernel_size, activation="silu", params_dtype=torch.float32)
        self.bcdt_proj = linear("bcdt_proj", width, sum(self.sizes))
        self.B_norm, self.C_norm, self.dt_norm = (
            RMSNorm(size, rms_norm_eps, dtype=params_dtype) for size in self.sizes
        )
        self.dt_proj = linear("dt_proj", time_step_rank, num_heads)
        self.A_log, self.D, self.dt_bias = (float32_parameter(num_heads) for _ in range(3))
        self.gate = Mixer2RMSNormGated(width, 1, use_rms_norm=False)
        self.out_proj = linear("out_proj", width, hidden_size)
        self._scan = backend_of_construction().op("mamba2_scan")

    @staticmethod
    def state_spec(conv_kernel_size: int, num_heads: int, head_dim: int, ssm_state_size: int) -> RecurrentSpec:
        """The last inputs of the convolution, which sees no B and no C, and the states of the recurrence."""
        return MambaMixer2.state_spec(conv_kernel_size, 0, num_heads, head_dim, ssm_state_size)

    def forward(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """float [N, hidden_size] of the step's tokens -> the same shape."""
        conv_state, state = batch.states[self.layer_index]
        metadata = batch.metadata[self.layer_index]
        gate, inputs = self.in_proj(hidden_states).tensor_split(2, dim=-1)
        x = self.conv1d(inputs, conv_state, metadata)
        b, c, dt = self.bcdt_proj(x).split_with_sizes(self.sizes, dim=-1)
        b, c, dt = self.B_norm(b), self.C_norm(c), self.dt_proj(self.dt_norm(dt))
        constants = self.D, self.dt_bias, state
        y = metadata.run(lambda rows: self._scan(x, dt, self.rates, b, c, *constants, rows))
        return self.out_proj(self.gate(y, gate))
