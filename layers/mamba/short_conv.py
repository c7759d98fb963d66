"""The short convolution of LFM2: a gated causal convolution over a few tokens in the place of attention."""

from __future__ import annotations

import torch

from llm.base.custom_op import CustomOp
from llm.forward import ForwardBatch
from llm.kernels.select import backend_of_construction
from llm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from llm.layers.mamba.conv import CausalConv1d
from llm.layers.mamba.parameters import MambaBase
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.base import QuantizationConfig


@CustomOp.register("short_conv")
class ShortConv(MambaBase, CustomOp):
    """b, c, x = in_proj(hidden); out_proj(c * conv(b * x)): float32 [N, dim] -> float32 [N, dim].

    Args:
        dim: channels.
        kernel_size: tokens that the convolution sees, the current one included.
        bias: of the convolution and of both projections.
        layer_index: position of this layer's state among the model's.
    """

    is_layer = True

    def __init__(
        self,
        dim: int,
        kernel_size: int,
        *,
        bias: bool = False,
        layer_index: int,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.in_proj = MergedColumnParallelLinear(
            dim,
            [dim] * 3,
            bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
            tp=tp,
            return_bias=False,
        )
        self.conv = CausalConv1d([dim], kernel_size, bias=bias, params_dtype=torch.float32, tp=tp)
        self.out_proj = RowParallelLinear(
            dim,
            dim,
            bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            tp=tp,
            return_bias=False,
        )
        # PyTorch would share it among its own threads.
        self._multiply = backend_of_construction().op("multiply")

    def forward_native(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        (window,), metadata = batch.states[self.layer_index], batch.metadata[self.layer_index]
        before, after, x = self.in_proj(hidden).tensor_split(3, dim=-1)
        return self.out_proj(self._multiply(after, self.conv(self._multiply(before, x), window, metadata)))
