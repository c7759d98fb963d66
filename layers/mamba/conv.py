"""The causal convolution inside a recurrent layer: its weight, and the inputs that it keeps per request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from llm.forward import RecurrentMetadata
from llm.kernels.select import backend_of_construction
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.unquantized import new_parameter


class CausalConv1d(nn.Module):
    """Each channel by itself over the last `kernel_size` tokens of its request: float32 [N, C] -> float32 [N, C].

    Args:
        sections: channels of the parts that ranks share out one by one, e.g. of queries, keys and values.
        kernel_size: K.
        bias: whether it has one.
        activation: "silu" or None.

    Attributes:
        channels: C, on this rank.
        weight: [C, 1, K], in memory with the channels side by side.
    """

    def __init__(
        self,
        sections: Sequence[int],
        kernel_size: int,
        *,
        bias: bool = False,
        activation: str | None = None,
        params_dtype: torch.dtype | None = None,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.tp, self.sections = tp, list(sections)
        self.channels = sum(tp.share("channels", size) for size in sections)
        self.kernel_size, self.activation = kernel_size, activation
        weight = torch.empty(kernel_size, 1, self.channels, dtype=params_dtype).permute(2, 1, 0)
        self.weight = new_parameter(weight, self._load)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = new_parameter(torch.empty(self.channels, dtype=params_dtype), self._load)
        self._convolve = backend_of_construction().op("causal_conv1d")

    @property
    def state_shape(self) -> tuple[int, int]:
        """Of the inputs before the next token, float32, the oldest first."""
        return self.kernel_size - 1, self.channels

    def _load(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        """This rank's channels of each section."""
        if list(loaded.shape) != [sum(self.sections), *param.shape[1:]]:
            wanted = [sum(self.sections), *param.shape[1:]]
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {wanted}")
        parts = [part.chunk(self.tp.size)[self.tp.rank] for part in loaded.split(self.sections)]
        param.data.copy_(torch.cat(parts))
        return param.numel()

    def forward(self, x: torch.Tensor, state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
        """`state`: [slots, *state_shape], written in place."""
        weight, window = self.weight.squeeze(1), state.transpose(1, 2)
        return self._convolve(x, weight, self.bias, window, metadata, self.activation)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, kernel_size={self.kernel_size}, activation={self.activation}"
