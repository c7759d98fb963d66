"""Linear layers: shapes and how checkpoint shards land in fused weights.

The arithmetic is `quant_method.apply`. World size is one: the partition sizes are the sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llm.quantization.base import LinearMethodBase, QuantizationConfig
from llm.quantization.unquantized import UnquantizedLinearMethod, new_parameter


class LinearBase(nn.Module):
    """y = x W^T + bias, with the weight behind `quant_method`.

    Args:
        input_size: K.
        output_sizes: rows of each logical matrix stacked in the weight; shard ids name them, see `shard_ids`.
        bias: whether there is one.
        params_dtype: storage type of an unquantized weight.
        quant_config: picks the method for `prefix`; None: unquantized.
        prefix: dotted path of the layer in the model.
        shard_ids: one name per entry of `output_sizes`, for fused layers.
    """

    quant_kind = "linear"

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        *,
        bias: bool,
        params_dtype: torch.dtype,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        shard_ids: tuple[Any, ...] = (),
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = sum(output_sizes)
        self.output_sizes = output_sizes
        self.shard_ids = shard_ids
        self.prefix = prefix
        self.quant_method = self._resolve_method(quant_config)
        self.quant_method.create_weights(
            self,
            input_size,
            output_sizes,
            input_size,
            self.output_size,
            params_dtype,
            weight_loader=self.weight_loader,
        )
        self.bias: nn.Parameter | None = None
        if bias:
            data = torch.empty(self.output_size, dtype=params_dtype)
            optional = getattr(self.quant_method, "holds_bias", False)
            self.bias = new_parameter(data, self.weight_loader, output_dim=0, optional=optional)

    def _resolve_method(self, quant_config: QuantizationConfig | None) -> LinearMethodBase:
        method = quant_config.get_quant_method(self, self.prefix) if quant_config else None
        if method is None:
            return UnquantizedLinearMethod()
        if not isinstance(method, LinearMethodBase):
            raise TypeError(f"{self.prefix}: {type(method).__name__} is not a LinearMethodBase")
        return method

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        """Copy `loaded` into the rows of `shard_id`, all of them when None; shapes must agree exactly."""
        target = param.data if shard_id is None else self._shard(param, shard_id)
        if getattr(param, "shard_slots", False) and loaded.numel() == 1:
            target.fill_(loaded.item())  # a quantity of the whole matrix, on disk a number or a list of one
            return target.numel()
        if target.shape != loaded.shape:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {list(target.shape)}")
        target.copy_(loaded)
        return loaded.numel()

    def _shard(self, param: nn.Parameter, shard_id: Any) -> torch.Tensor:
        attributes: Any = param
        index = self.shard_ids.index(shard_id)
        if getattr(param, "shard_slots", False):
            return param.data[index : index + 1]
        start, size = sum(self.output_sizes[:index]), self.output_sizes[index]
        if getattr(param, "packed_dim", None) == attributes.output_dim:
            start, size = start // attributes.packed_factor, size // attributes.packed_factor
        return param.data.narrow(attributes.output_dim, start, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, self.bias)


class ColumnParallelLinear(LinearBase):
    """One matrix whose rows (outputs) a tensor-parallel group would split."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, [output_size], **kwargs)


class RowParallelLinear(LinearBase):
    """One matrix whose columns (inputs) a tensor-parallel group would split."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, [output_size], **kwargs)


class MergedColumnParallelLinear(LinearBase):
    """Matrices over the same input, stacked: gate and up in one product. Shard ids are 0, 1, ..."""

    def __init__(self, input_size: int, output_sizes: list[int], **kwargs: Any) -> None:
        super().__init__(input_size, output_sizes, shard_ids=tuple(range(len(output_sizes))), **kwargs)


class QKVParallelLinear(LinearBase):
    """Query, key and value projections, stacked. Shard ids are "q", "k" and "v"."""

    def __init__(self, hidden_size: int, head_size: int, num_heads: int, num_kv_heads: int, **kwargs: Any) -> None:
        sizes = [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
        super().__init__(hidden_size, sizes, shard_ids=("q", "k", "v"), **kwargs)
