"""Linear layers: shapes, the slice of each matrix that a rank holds, and loading checkpoint shards into fused weights.

Ranks split the rows of every matrix, its outputs, and gather what they computed: a sum over inputs is one rank's, so
its bits do not depend on the number of ranks. `quant_method.apply` is the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypedDict

import torch
from torch import nn

from llm.base.checks import refuse
from llm.base.custom_op import PluggableLayer
from llm.base.watch import Patchable
from llm.errors import ValidationError
from llm.kernels.select import backend_of_construction
from llm.kernels.weight import Weight
from llm.layers.lora import LayerAdapters
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.base import LinearMethodBase, PackedLinearMethod, QuantizationConfig
from llm.quantization.unquantized import UnquantizedLinearMethod, fill_rows, new_parameter

_PACKED_GEMM = PackedLinearMethod.apply
Output = torch.Tensor | tuple[torch.Tensor, nn.Parameter | None]


class LayerArguments(TypedDict):
    """The constructor arguments that all linear layers and embeddings of a model share."""

    params_dtype: torch.dtype | None
    quant_config: QuantizationConfig | None
    tp: TensorParallel


class LinearArguments(LayerArguments):
    """Those of linear layers."""

    return_bias: bool


class LinearBase(PluggableLayer):
    """y = x W^T + bias, with the weight behind `quant_method`.

    Shapes: x float [..., K] -> y float [..., N]. Sizes are of the whole matrix; this rank holds
    `output_partition_sizes` rows of W.

    Args:
        input_size: K.
        output_sizes: rows of each logical matrix stacked in the weight; `shard_ids` names them.
        bias: whether the layer has one.
        skip_bias_add: return the bias instead of adding it, so that the caller can fuse the addition; needs
            `return_bias`.
        params_dtype: storage type of an unquantized weight and of the bias; None: torch's default.
        quant_config: picks the method for `prefix`; None: unquantized.
        prefix: dotted path of the layer in the model.
        shard_ids: one name per entry of `output_sizes`, for fused layers.
        return_bias: forward returns (y, the bias that was not added or None), as vLLM's does; False: y alone.
        tp: this layer's place in a tensor-parallel group.
        disable_tp: hold the whole matrix on every rank of the group.

    Raises:
        ValidationError: the group cannot split the sizes evenly, or the bias would be lost.
    """

    quant_kind = "linear"
    # Whether ranks split the rows of the weight.
    splits_outputs: ClassVar[bool] = False
    # The operand of a `PackedLinearMethod`'s GEMM, once the weight is loaded.
    packed_weight: Weight | None = None
    # None: no adapter can change the layer.
    adapters: LayerAdapters | None = None

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        *,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        shard_ids: tuple[Any, ...] = (),
        return_bias: bool = True,
        tp: TensorParallel = SINGLE,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        if bias and skip_bias_add and not return_bias:
            raise ValidationError(
                "skip_bias_add=True loses the bias; use return_bias=True to receive it.",
                parameter="skip_bias_add",
                value=skip_bias_add,
            )
        self.tp = SINGLE if disable_tp else tp
        self.tp_rank, self.tp_size = self.tp.rank, self.tp.size
        self.input_size = input_size
        self.output_size = sum(output_sizes)
        self.output_sizes = output_sizes
        self.shard_ids = shard_ids
        self.prefix = prefix
        self.skip_bias_add = skip_bias_add
        self.return_bias = return_bias
        self.input_size_per_partition = input_size  # a name of vLLM's, where ranks may split the columns
        self.output_partition_sizes = [size // self.parts(index) for index, size in enumerate(output_sizes)]
        self.output_size_per_partition = sum(self.output_partition_sizes)
        dtype = params_dtype or torch.get_default_dtype()
        self.quant_method = self._resolve_method(quant_config)
        self.quant_method.create_weights(
            self,
            self.input_size_per_partition,
            self.output_partition_sizes,
            input_size,
            self.output_size,
            dtype,
            weight_loader=self.weight_loader,
        )
        self.bias: nn.Parameter | None = None
        if bias:
            data = torch.empty(self.output_size_per_partition, dtype=dtype)
            optional = getattr(self.quant_method, "holds_bias", False)
            self.bias = new_parameter(data, self.weight_loader, output_dim=0, optional=optional)

    def _resolve_method(self, quant_config: QuantizationConfig | None) -> LinearMethodBase:
        method = quant_config.get_quant_method(self, self.prefix) if quant_config else None
        if method is None:
            return UnquantizedLinearMethod()
        if not isinstance(method, LinearMethodBase):
            raise TypeError(f"{self.prefix}: {type(method).__name__} is not a LinearMethodBase")
        return method

    def parts(self, index: int) -> int:
        """The number of equal parts that the rows of logical matrix `index` are split into.

        If there are fewer parts than ranks, several ranks hold the same part.
        """
        if self.splits_outputs:
            self.tp.share("output_size", self.output_sizes[index], self.prefix)
            return self.tp_size
        return 1

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        """Copy this rank's slice of `loaded`, which is logical matrix `shard_id`, or all of them stacked if None.

        `param.output_dim` is the dimension along the rows of the weight. It may be shorter than those (packed values,
        scales of blocks); slices then shrink in proportion. `param.shard_slots` says that it has one number per logical
        matrix, held by every rank. Returns how many elements of `param` were filled; raises ValueError if the shapes
        disagree.
        """
        if getattr(param, "shard_slots", False):
            return self._load_slots(param, loaded, shard_id)
        output_dim = getattr(param, "output_dim", None)
        indices = range(len(self.output_sizes)) if shard_id is None else [self.shard_ids.index(shard_id)]
        lengths = [0] * len(self.output_sizes) if output_dim is None else self._lengths(param, output_dim)
        expected = list(param.shape)
        if output_dim is not None:
            expected[output_dim] = sum(lengths[index] * self.parts(index) for index in indices)
        if list(loaded.shape) != expected:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {expected}")
        if output_dim is None:
            param.data.copy_(loaded)
            return param.numel()
        return self._copy_rows(param, loaded, output_dim, lengths, indices)

    def rows_of_rank(self, loaded: torch.Tensor, shard_id: object) -> torch.Tensor:
        """This rank's rows of a tensor [N, ...] that is logical matrix `shard_id`, or all of them stacked if None.

        Raises ValueError if it has another number of rows.
        """
        if self.tp_size == 1:
            return loaded
        indices = range(len(self.output_sizes)) if shard_id is None else [self.shard_ids.index(shard_id)]
        sizes = [self.output_sizes[index] for index in indices]
        if loaded.dim() < 1 or len(loaded) != sum(sizes):
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {sum(sizes)} rows")
        parts = [
            matrix.chunk(self.parts(index))[self.tp_rank * self.parts(index) // self.tp_size]
            for index, matrix in zip(indices, loaded.split(sizes), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows_of_all(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts of all ranks as one has the whole: logical matrix after matrix."""
        if self.tp_size == 1:
            return parts[0]
        by_rank = [part.split(self.output_partition_sizes) for part in parts]
        return torch.cat(
            [
                by_rank[rank][index]
                for index in range(len(self.output_sizes))
                for rank in range(0, self.tp_size, self.tp_size // self.parts(index))
            ]
        )

    def _load_slots(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any) -> int:
        index = None if shard_id is None else self.shard_ids.index(shard_id)
        target = param.data if index is None else param.data[index : index + 1]
        if loaded.numel() == 1:
            target.fill_(loaded.item())  # stored as a scalar or as [1]
        elif loaded.shape == target.shape:
            target.copy_(loaded)
        else:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {list(target.shape)}")
        return target.numel()

    def _copy_rows(
        self, param: nn.Parameter, loaded: torch.Tensor, dim: int, lengths: list[int], indices: Iterable[int]
    ) -> int:
        filled = source_start = 0
        for index in indices:
            length, parts = lengths[index], self.parts(index)
            part = self.tp_rank * parts // self.tp_size
            rows = loaded.narrow(dim, source_start + part * length, length)
            fill_rows(param, dim, sum(lengths[:index]), rows)
            source_start += parts * length
            filled += rows.numel()
        return filled

    def _lengths(self, param: nn.Parameter, dim: int) -> list[int]:
        """The length of each logical matrix along dimension `dim` of `param`, in proportion to its rows."""
        available = param.shape[dim]
        scaled = [size * available for size in self.output_partition_sizes]
        if any(size % self.output_size_per_partition for size in scaled):
            raise ValueError(f"of length {available} cannot be shared out to rows {self.output_partition_sizes}")
        return [size // self.output_size_per_partition for size in scaled]

    def forward(self, x: torch.Tensor) -> Output:
        y = self._multiply(x, None if self.skip_bias_add else self.bias)
        return self._result(y) if self.return_bias else y

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`quant_method.apply`, or directly its GEMM if `apply` is neither overridden nor patched; and the adapters."""
        method, weight = self.quant_method, self.packed_weight
        if (
            weight is None
            or weight.bias is not bias
            or method.linear is None
            or getattr(method.apply, "__func__", None) is not _PACKED_GEMM
        ):
            y = method.apply(self, x, bias)
        else:
            y = method.linear(x, weight)
        return y if self.adapters is None else self.adapters.add(y, x)

    def _result(self, y: torch.Tensor) -> Output:
        """y; with `return_bias`, (y, the bias that was not added or None)."""
        return y, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        shape = f"in_features={self.input_size_per_partition}, out_features={self.output_size_per_partition}"
        return f"{shape}, bias={self.bias is not None}, rank={self.tp_rank} of {self.tp_size}"


@PluggableLayer.register("replicated_linear")
class ReplicatedLinear(LinearBase):
    """One matrix that every rank holds whole. Further arguments: `LinearBase`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            input_size,
            [output_size],
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            **kwargs,
        )


@PluggableLayer.register("column_parallel_linear")
class ColumnParallelLinear(LinearBase):
    """Ranks split the rows of W (the outputs): y of rank r is x W_r^T.

    Args:
        gather_output: give every rank the whole y.
        output_sizes: rows of the logical matrices stacked in W, each of which the ranks split; None: one matrix of
            `output_size` rows.
        Further arguments: `LinearBase`.
    """

    splits_outputs = True

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        output_sizes: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            input_size,
            [output_size] if output_sizes is None else output_sizes,
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            **kwargs,
        )
        if gather_output and self.tp_size > 1 and len(self.output_sizes) > 1:
            raise ValidationError(
                "gather_output=True would interleave the ranks' parts of stacked matrices; gather each one by itself.",
                parameter="gather_output",
                value=gather_output,
            )
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> Output:
        y = self._multiply(x, None if self.skip_bias_add else self.bias)
        if self.gather_output:
            y = self.tp.all_gather(y)
        return self._result(y) if self.return_bias else y


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Matrices with the same input, stacked: gate and up in one GEMM. Shard ids are 0, 1, ...

    Further arguments: `ColumnParallelLinear`.
    """

    def __init__(
        self, input_size: int, output_sizes: list[int], bias: bool = True, *further: Any, **kwargs: Any
    ) -> None:
        shard_ids, total = tuple(range(len(output_sizes))), sum(output_sizes)
        super().__init__(input_size, total, bias, *further, output_sizes=output_sizes, shard_ids=shard_ids, **kwargs)


def by_head(rows: torch.Tensor, sizes: list[int], heads: int) -> torch.Tensor:
    """Rows of stacked matrices of `sizes` rows -> one head's rows of each matrix, then the next head's."""
    parts = [part.unflatten(0, (heads, part.shape[0] // heads)) for part in rows.split_with_sizes(sizes)]
    return torch.cat(parts, dim=1).flatten(0, 1)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections, stacked. Shard ids are "q", "k" and "v".

    Ranks split heads; if there are more ranks than key heads, several ranks hold the same key head.

    Args:
        hidden_size: K.
        head_size: channels of a head.
        total_num_heads, total_num_kv_heads: of the whole model; None: as many key heads as query heads.
        stored_by_key_head: a tensor of all three holds the queries, the key and the value of one key head after
            another; False: all queries, all keys, all values.
        Further arguments: `ColumnParallelLinear`. `num_heads` and `num_kv_heads` are what this rank holds.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        stored_by_key_head: bool = False,
        tp: TensorParallel = SINGLE,
        disable_tp: bool = False,
        **kwargs: Any,
    ) -> None:
        tp = SINGLE if disable_tp else tp
        total_num_kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        self._kv_parts = min(tp.size, total_num_kv_heads)
        if total_num_kv_heads % self._kv_parts or tp.size % self._kv_parts:
            raise ValidationError(
                f"{prefix}: total_num_kv_heads={total_num_kv_heads} neither divides nor is divided by {tp.size} ranks.",
                parameter="total_num_kv_heads",
                value=total_num_kv_heads,
            )
        sizes = [total_num_heads * head_size, total_num_kv_heads * head_size, total_num_kv_heads * head_size]
        num_heads = tp.share("total_num_heads", total_num_heads, prefix)
        super().__init__(
            hidden_size,
            sum(sizes),
            bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            output_sizes=sizes,
            shard_ids=("q", "k", "v"),
            tp=tp,
            **kwargs,
        )
        self.head_size = head_size
        self.num_heads = num_heads
        self.num_kv_heads = total_num_kv_heads // self._kv_parts
        self.num_kv_head_replicas = tp.size // self._kv_parts
        self.total_num_kv_heads = total_num_kv_heads
        self.stored_by_key_head = stored_by_key_head

    def restacked(self, loaded: torch.Tensor, dim: int) -> torch.Tensor:
        """A checkpoint's tensor of all three with its rows in this layer's order: queries, keys, values.

        `dim` is that of the rows, which may be packed. Raises ValueError if it cannot be shared out to the heads.
        """
        if not self.stored_by_key_head:
            return loaded
        groups = self.total_num_kv_heads
        heads = self.output_sizes[0] // self.output_sizes[1] + 2
        length = loaded.shape[dim] if loaded.dim() > dim else 0
        if length == 0 or length % (groups * heads):
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {groups * heads} heads")
        by_group = loaded.unflatten(dim, (groups, heads, length // (groups * heads)))
        parts = by_group.split_with_sizes((heads - 2, 1, 1), dim=dim + 1)
        return torch.cat([part.flatten(dim, dim + 2) for part in parts], dim=dim)

    def as_stored_together(self, rows: torch.Tensor) -> torch.Tensor:
        """The opposite, of a rank that has all heads: rows along the first dimension."""
        return by_head(rows, self.output_sizes, self.total_num_kv_heads) if self.stored_by_key_head else rows

    def parts(self, index: int) -> int:
        return self.tp_size if index == 0 else self._kv_parts


@PluggableLayer.register("row_parallel_linear")
class RowParallelLinear(LinearBase):
    """A projection of what ranks hold slices of: x is gathered, ranks split the rows of W, and y is gathered.

    vLLM's ranks split the columns and add their terms, in an order that depends on how many there are.

    Args:
        input_is_parallel: x is this rank's slice; False: x is whole.
        reduce_results: give every rank the whole y; False is for one rank alone.
        Further arguments: `LinearBase`.
    """

    splits_outputs = True

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            input_size,
            [output_size],
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            **kwargs,
        )
        if self.tp_size > 1 and not reduce_results:
            refuse("reduce_results", reduce_results, "True: ranks hold no terms of a sum, but parts of the outputs")
        if self.tp_size > 1 and skip_bias_add:
            refuse("skip_bias_add", skip_bias_add, "False: a rank has the bias of its own outputs alone")
        if input_is_parallel:
            self.tp.share("input_size", input_size, prefix)
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results

    def forward(self, x: torch.Tensor) -> Output:
        if self.tp_size == 1:
            return super().forward(x)
        y = self._multiply(self.tp.all_gather(x) if self.input_is_parallel else x, self.bias)
        y = self.tp.all_gather(y)
        return self._result(y) if self.return_bias else y


class StackedByHead(MergedColumnParallelLinear):
    """A checkpoint's tensor has one head's part of each matrix, then the next head's; here they are stacked.

    Without a bias.

    Args:
        heads: of the whole model.
        Further arguments: `MergedColumnParallelLinear`.
    """

    stored_by_key_head = True

    def __init__(self, input_size: int, output_sizes: list[int], heads: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_sizes, False, **kwargs)
        self.heads = heads

    def restacked(self, loaded: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensor with the rows, along `dim`, of one matrix after another."""
        length = loaded.shape[dim] if loaded.dim() > dim else 0
        total = self.output_size * self.heads
        if length == 0 or any(size * length % total for size in self.output_sizes) or length % self.heads:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {self.heads} heads")
        parts = loaded.unflatten(dim, (self.heads, length // self.heads)).split_with_sizes(
            [size * length // total for size in self.output_sizes], dim=dim + 1
        )
        return torch.cat([part.flatten(dim, dim + 1) for part in parts], dim=dim)

    def as_stored_together(self, rows: torch.Tensor) -> torch.Tensor:
        """The opposite, of a rank that has all heads: rows along the first dimension."""
        return by_head(rows, self.output_sizes, self.heads)


class ColumnFactors(Patchable):
    """float32 [N, width] -> the same, each column times its constant.

    Args:
        runs: (how many columns, their constant), one run after another.
    """

    factors: torch.Tensor

    def __init__(self, runs: Sequence[tuple[int, float]]) -> None:
        super().__init__()
        self.register_buffer(
            "factors", torch.cat([torch.full((count,), value) for count, value in runs]).float(), False
        )
        # PyTorch would share it among its own threads.
        self._ops = backend_of_construction().ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.multiply(x, self.factors.expand_as(x))
