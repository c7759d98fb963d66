"""The causal convolution inside a recurrent layer: its weight, and the inputs that it keeps per request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.forward import RecurrentMetadata
from llm.kernels.select import backend_of_construction
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.unquantized import new_parameter


class CausalConv1d(Patchable):
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
        # Under the names of linear layers, for checkpoints with a tensor of each section.
        self.shard_ids = tuple(range(len(sections)))
        self.output_partition_sizes = [tp.share("channels", size) for size in sections]
        self.channels = sum(self.output_partition_sizes)
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

    def _load(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int | None = None) -> int:
        """This rank's channels of section `shard_id`, of all sections if that is None."""
        if shard_id is not None and self._is_equal_part(loaded, shard_id):
            first = shard_id * -(-self.channels // len(self.sections))
            param.data[first : first + len(loaded)] = loaded
            return loaded.numel()
        sections = self.sections if shard_id is None else [self.sections[shard_id]]
        wanted = [sum(sections), *param.shape[1:]]
        if list(loaded.shape) != wanted:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {wanted}")
        own = torch.cat([part.chunk(self.tp.size)[self.tp.rank] for part in loaded.split(sections)])
        first = sum(self.output_partition_sizes[: shard_id or 0])
        param.data[first : first + len(own)] = own
        return own.numel()

    def _is_equal_part(self, loaded: torch.Tensor, shard_id: int) -> bool:
        """transformers saves the sections' tensors as equal parts of the whole, whatever the sections' sizes."""
        size = -(-self.channels // len(self.sections))
        length = max(0, min(size, self.channels - shard_id * size))
        return self.tp.size == 1 and list(loaded.shape) == [length, *self.weight.shape[1:]]

    def forward(self, x: torch.Tensor, state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
        """`state`: [slots, *state_shape], written in place."""
        weight, window = self.weight.squeeze(1), state.transpose(1, 2)
        return metadata.run(lambda rows: self._convolve(x, weight, self.bias, window, rows, self.activation))

    def extra_repr(self) -> str:
        return f"channels={self.channels}, kernel_size={self.kernel_size}, activation={self.activation}"
