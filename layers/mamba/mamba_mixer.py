"""Mamba's mixer (arXiv:2312.00752)."""

from __future__ import annotations

import torch
from torch import nn

from llm.base.custom_op import PluggableLayer
from llm.forward import ForwardBatch, RecurrentSpec
from llm.kernels.select import backend_of_construction
from llm.layers.linear import ReplicatedLinear
from llm.layers.mamba.conv import CausalConv1d
from llm.layers.mamba.parameters import DecayingLayer, MambaBase, float32_parameter
from llm.layers.norm import RMSNorm
from llm.quantization.base import QuantizationConfig


@PluggableLayer.register("mamba_mixer")
class MambaMixer(MambaBase, DecayingLayer):
    """Input projection, convolution, selective scan and output projection; steps, B and C depend on the input.

    Every rank of a tensor-parallel group computes all of it.

    Args:
        hidden_size: channels of what goes in and comes out.
        ssm_state_size: states of each channel.
        conv_kernel_size: inputs that the convolution sees.
        intermediate_size: channels of the recurrence.
        time_step_rank: channels that steps are computed from.
        use_conv_bias, use_bias: of the convolution; of the projections at both ends.
        use_rms_norm: steps, B and C are normalised; `rms_norm_has_weight`: by norms with a weight.
        layer_index: position of this layer's state among the model's.
        params_dtype, quant_config, prefix: as in `LinearBase`.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        time_step_rank: int,
        use_conv_bias: bool,
        use_bias: bool,
        use_rms_norm: bool,
        rms_norm_has_weight: bool = True,
        rms_norm_eps: float = 1e-5,
        *,
        layer_index: int,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()

        def linear(name: str, inputs: int, outputs: int, bias: bool) -> ReplicatedLinear:
            path = f"{prefix}.{name}"
            return ReplicatedLinear(
                inputs,
                outputs,
                bias,
                params_dtype=params_dtype,
                quant_config=quant_config,
                prefix=path,
                return_bias=False,
            )

        def norm(size: int) -> RMSNorm | None:
            if not use_rms_norm:
                return None
            return RMSNorm(size, rms_norm_eps, has_weight=rms_norm_has_weight, dtype=params_dtype)

        self.layer_index = layer_index
        self.sizes = [time_step_rank, ssm_state_size, ssm_state_size]
        self.in_proj = linear("in_proj", hidden_size, 2 * intermediate_size, use_bias)
        self.conv1d = CausalConv1d(
            [intermediate_size], conv_kernel_size, bias=use_conv_bias, activation="silu", params_dtype=torch.float32
        )
        self.x_proj = linear("x_proj", intermediate_size, sum(self.sizes), False)
        self.dt_proj = linear("dt_proj", time_step_rank, intermediate_size, True)
        self.A_log = float32_parameter(intermediate_size, ssm_state_size)
        self.D = float32_parameter(intermediate_size)
        self.out_proj = linear("out_proj", intermediate_size, hidden_size, use_bias)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (norm(size) for size in self.sizes)
        self._scan = backend_of_construction().op("selective_scan")

    @staticmethod
    def state_spec(conv_kernel_size: int, intermediate_size: int, ssm_state_size: int) -> RecurrentSpec:
        """The last inputs of the convolution, and the states of the recurrence."""
        shapes = (conv_kernel_size - 1, intermediate_size), (ssm_state_size, intermediate_size)
        return RecurrentSpec(shapes, (torch.float32, torch.float32), rolls_back=True)

    def forward(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """float [N, hidden_size] of the step's tokens -> the same shape."""
        conv_state, state = batch.states[self.layer_index]
        metadata = batch.metadata[self.layer_index]
        x, gate = self.in_proj(hidden_states).tensor_split(2, dim=-1)
        x = self.conv1d(x, conv_state, metadata)
        dt, b, c = self.x_proj(x).split_with_sizes(self.sizes, dim=-1)
        dt = self.dt_proj(_normed(self.dt_layernorm, dt))
        b, c = _normed(self.b_layernorm, b), _normed(self.c_layernorm, c)
        y = metadata.run(lambda rows: self._scan(x, dt, self.rates, b, c, self.D, None, gate, state, rows))
        return self.out_proj(y)


def _normed(norm: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)
