"""Layers of image encoders: attention within sequences of any lengths, convolutions, SAM's attention.

Vision towers have them (`llm/models/vision/`). Import them by vLLM's paths, `llm.model_executor.layers.*`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from llm.base.custom_op import CustomOp, PluggableLayer
from llm.errors import ValidationError
from llm.forward import AttentionMetadata, KVCacheSpec
from llm.kernels.backend import Operations
from llm.kernels.weight import Weight
from llm.layers.custom_op import KernelOp
from llm.layers.linear import QKVParallelLinear, RowParallelLinear
from llm.quantization.base import QuantizationConfig


def product_type(x: torch.Tensor) -> torch.dtype:
    """In which x is multiplied by matrices: a CPU's kernels take float32, a device's the type of activations."""
    return torch.float32 if x.device.type == "cpu" else x.dtype


# Tokens of a block of the KV cache that a call of `attend_sequences` makes for itself.
_BLOCK = 16


def attend_sequences(
    ops: Operations,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """softmax(scale q k^T) v within each of several sequences, none of which is padded.

    Args:
        query: [N, heads, head_size]. key, value: [M, kv_heads, head_size]. All float32, or on a device of one float
            type; scores and sums are float32.
        queries: how many of the N each sequence has; 0 or more. keys: the same of the M; no fewer than its queries.

    Returns:
        Of the query's shape and type. A sequence's bits depend on nothing else where those of `paged_attention` do not.
    """
    rows = [(count, length) for count, length in zip(queries, keys, strict=True) if count]
    if not rows:
        return torch.empty_like(query)
    kv_heads, head_size = key.shape[1:]
    lengths = np.array([length for _, length in rows], dtype=np.int64)
    blocks = -(-lengths // _BLOCK)
    first = np.cumsum(blocks) - blocks + 1  # block 0 is never read
    widest = int(blocks.max())
    table = np.minimum(first[:, None] + np.arange(widest), (first + blocks - 1)[:, None])
    inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    starts = np.concatenate([[0], np.cumsum([count for count, _ in rows])])

    def there(numbers: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(query.device, dtype)

    metadata = AttentionMetadata(
        block_table=there(table, torch.int32),
        slot_mapping=there(np.repeat(first * _BLOCK, lengths) + inside, torch.int64),
        query_start_loc=there(starts, torch.int32),
        seq_lens=there(lengths, torch.int32),
        block_size=_BLOCK,
        query_lens_list=[count for count, _ in rows],
        seq_lens_list=lengths.tolist(),
    )
    spec = KVCacheSpec(kv_heads, head_size, query.dtype)
    caches = [
        torch.zeros(shape, dtype=query.dtype, device=query.device)
        for shape in ops.kv_cache_shapes(spec, int(blocks.sum()) + 1, _BLOCK)
    ]
    used = [length if count else 0 for count, length in zip(queries, keys, strict=True)]
    if used != list(keys):  # of a sequence without queries no key is read
        kept = there(np.repeat(np.array(used) > 0, keys), torch.bool)
        key, value = key[kept], value[kept]
    ops.write_kv_cache(key, value, *caches, metadata.slot_mapping)
    found: torch.Tensor = ops.paged_attention(query, *caches, metadata, scale=scale, causal=False)
    return found


@CustomOp.register("mm_encoder_attn")
class MMEncoderAttention(KernelOp):
    """Attention of multimodal encoders, not causal and without a KV cache: softmax(scale q k^T) v within each sequence.

    Computed in float32, returned in the query's type.

    Args:
        num_heads, head_size: of the query.
        scale: factor on the scores; None: head_size ** -0.5.
        num_kv_heads: of key and value, a divisor of `num_heads`; None: `num_heads`.
        prefix: dotted path of the layer in the model.
        multimodal_config: not read. In vLLM it chooses among implementations; here there is one.
    """

    operations = ("paged_attention", "write_kv_cache")

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
        multimodal_config: object = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = head_size**-0.5 if scale is None else scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.prefix = prefix
        if num_heads % self.num_kv_heads:
            raise ValidationError(
                f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}.",
                parameter="num_kv_heads",
                value=num_kv_heads,
            )

    def compute(
        self,
        ops: Operations,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query float [B, N, heads * head_size] or [B, N, heads, head_size], key and value likewise -> query's shape.

        Args:
            cu_seqlens: int [S + 1], from 0 to B * N: where sequences start in the flattened batch; None: each batch
                row is a sequence.
            max_seqlen: a hint for kernels that size their work by it.

        Raises:
            ValueError: shapes or boundaries that do not fit.
        """
        if query.dim() not in (3, 4):
            raise ValueError(f"query has shape {list(query.shape)}, must have 3 or 4 dimensions.")
        batch, length = query.shape[:2]
        lengths = [length] * batch if cu_seqlens is None else _lengths(cu_seqlens, batch * length)
        own, keys, values = (
            x.reshape(batch * length, count, self.head_size).float()
            for x, count in ((query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads))
        )
        out = attend_sequences(ops, own, keys, values, lengths, lengths, self.scale)
        return out.reshape(query.shape).to(query.dtype)


def _lengths(cu_seqlens: torch.Tensor, tokens: int) -> list[int]:
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to the {tokens} tokens, got {bounds}.")
    return lengths


# Scores that are in memory at once, of whole heads.
_SCORES = 1 << 24


@PluggableLayer.register("rel_pos_attention")
class RelPosAttention(PluggableLayer):
    """Attention over an image with decomposed relative positions (arXiv:2112.01526): SAM's encoder and DeepSeek-OCR.

    x float [B, H, W, dim] -> the same shape and type; every position of an image sees all others.
    `use_rel_pos` adds q . rel_pos_h[h - h'] + q . rel_pos_w[w - w'] to the score of positions (h, w) and (h', w').

    Args:
        dim: channels.
        num_heads: a divisor of `dim`.
        qkv_bias: whether the projections of query, key and value have a bias; the output projection always has one.
        use_rel_pos: have tables of relative positions, `rel_pos_h` [2H - 1, dim / heads] and `rel_pos_w`.
        input_size: (H, W) of the tables, needed with `use_rel_pos`; they are interpolated for other sizes of x.
        params_dtype, quant_config, prefix: as in `LinearBase`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        use_rel_pos: bool = False,
        input_size: tuple[int, int] | None = None,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValidationError(
                f"num_heads={num_heads} does not divide dim={dim}.", parameter="num_heads", value=num_heads
            )
        if use_rel_pos and input_size is None:
            raise ValidationError(
                "use_rel_pos=True needs input_size, the (height, width) of its tables.",
                parameter="input_size",
                value=input_size,
            )
        self.num_heads = num_heads
        self.head_size = dim // num_heads
        self.use_rel_pos = use_rel_pos
        self.qkv = QKVParallelLinear(
            dim,
            self.head_size,
            num_heads,
            bias=qkv_bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv",
            return_bias=False,
        )
        self.proj = RowParallelLinear(
            dim, dim, params_dtype=params_dtype, quant_config=quant_config, prefix=f"{prefix}.proj", return_bias=False
        )
        if use_rel_pos and input_size is not None:
            self.rel_pos_h, self.rel_pos_w = (
                nn.Parameter(torch.zeros(2 * size - 1, self.head_size, dtype=params_dtype), requires_grad=False)
                for size in input_size
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, dim = x.shape
        computed = product_type(x)
        qkv = self.qkv(x.to(computed)).float().view(batch, height * width, 3, self.num_heads, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).flatten(1, 2)  # each [B * heads, H * W, head_size]
        tables = [(self.rel_pos_h, height), (self.rel_pos_w, width)] if self.use_rel_pos else []
        relative = [_relative(table, size) for table, size in tables]
        out = torch.empty_like(query)
        at_once = max(1, _SCORES // (height * width) ** 2)
        for start in range(0, len(query), at_once):
            part = slice(start, start + at_once)
            scores = query[part] @ key[part].transpose(1, 2) * self.head_size**-0.5
            if relative:
                scores += _places(query[part].unflatten(1, (height, width)), *relative)
            out[part] = scores.softmax(-1) @ value[part]
        joined = out.unflatten(0, (batch, self.num_heads)).transpose(1, 2).reshape(batch, height, width, dim)
        return self.proj(joined.to(computed)).to(x.dtype)


def _places(query: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The scores' terms for relative positions, of queries [heads, H, W, head_size]: [heads, H * W, H * W]."""
    across = torch.einsum("nhwc,hkc->nhwk", query, rows)
    along = torch.einsum("nhwc,wkc->nhwk", query, columns)
    return (across[..., :, None] + along[..., None, :]).flatten(3, 4).flatten(1, 2)


def _relative(table: torch.Tensor, size: int) -> torch.Tensor:
    """Entry [i, j] is the table's vector for distance i - j: float32 [size, size, head_size]."""
    wanted = 2 * size - 1
    if table.shape[0] != wanted:
        table = F.interpolate(table.float().t()[None], size=wanted, mode="linear")[0].t()
    places = torch.arange(size, device=table.device)
    return table.float()[places[:, None] - places[None, :] + size - 1]


Sizes = int | tuple[int, ...]


class ConvLayerBase(KernelOp):
    """A convolution over images or video: one GEMM if patches do not overlap, as in patch embeddings.

    x float [B, in_channels, *space] -> [B, out_channels, *space'] of x's type; on a CPU computed in float32.

    Arguments are those of torch.nn.Conv2d and Conv3d; `padding_mode` is "zeros". The weight is
    [out_channels, in_channels / groups, *kernel_size]. `enable_linear` is True if kernel and stride are equal and there
    is no padding, dilation or grouping: then each patch is a row of one GEMM.

    Args:
        params_dtype: of weight and bias; None: torch's default.
    """

    operations = ("linear",)
    num_dim: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | Literal["same", "valid"] = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        params_dtype: torch.dtype | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if padding_mode != "zeros":
            raise ValidationError(
                f"padding_mode={padding_mode!r} is not supported; use 'zeros'.",
                parameter="padding_mode",
                value=padding_mode,
            )
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if groups < 1 or channels % groups:
                raise ValidationError(
                    f"groups={groups} does not divide {name}={channels}.", parameter="groups", value=groups
                )
        self.kernel_size = self._per_dimension("kernel_size", kernel_size)
        self.stride = self._per_dimension("stride", stride)
        self.dilation = self._per_dimension("dilation", dilation)
        self.padding = padding if isinstance(padding, str) else self._per_dimension("padding", padding)
        self.groups = groups
        pads = self.padding != "valid" and self.padding != (0,) * self.num_dim
        dilates = self.dilation != (1,) * self.num_dim
        self.enable_linear = self.kernel_size == self.stride and groups == 1 and not pads and not dilates
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_channels, dtype=params_dtype), requires_grad=False) if bias else None
        self._as_matrix: tuple[Operations, tuple[int, int, torch.dtype], Weight] | None = None

    def _per_dimension(self, name: str, value: Sizes) -> tuple[int, ...]:
        values = (value,) * self.num_dim if isinstance(value, int) else tuple(value)
        if len(values) != self.num_dim:
            raise ValidationError(f"{name}={value} must have {self.num_dim} numbers.", parameter=name, value=value)
        return values

    def compute(self, ops: Operations, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != self.num_dim + 2:
            raise ValueError(f"{self.name} takes x of {self.num_dim + 2} dimensions, got shape {list(x.shape)}.")
        computed = product_type(x)
        bias = None if self.bias is None else self.bias.to(computed)
        if self.enable_linear:
            return self._multiply(ops, x.to(computed), bias).to(x.dtype)
        convolution = F.conv2d if self.num_dim == 2 else F.conv3d
        found = convolution(
            x.to(computed), self.weight.to(computed), bias, self.stride, self.padding, self.dilation, self.groups
        )
        return found.to(x.dtype)

    def extra_repr(self) -> str:
        way = "as a matrix product" if self.enable_linear else f"padding={self.padding}, dilation={self.dilation}"
        return f"weight={list(self.weight.shape)}, stride={self.stride}, {way}"

    def _multiply(self, ops: Operations, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Each patch as a row of one GEMM; a remainder at the far edges is in no patch, as in a convolution."""
        counts = [size // kernel for size, kernel in zip(x.shape[2:], self.kernel_size, strict=True)]
        pairs = list(zip(counts, self.kernel_size, strict=True))
        for dim, (count, kernel) in enumerate(pairs, start=2):
            x = x.narrow(dim, 0, count * kernel)
        x = x.reshape(*x.shape[:2], *(size for pair in pairs for size in pair))  # [B, C, n1, k1, n2, k2 ...]
        places = range(2, 2 + 2 * self.num_dim, 2)
        x = x.permute(0, *places, 1, *(place + 1 for place in places))
        rows = x.reshape(x.shape[0] * math.prod(counts), x.shape[1 + self.num_dim] * math.prod(self.kernel_size))
        found: torch.Tensor = ops.linear(rows, replace(self._packed(ops, x.dtype), bias=bias))
        return found.view(x.shape[0], *counts, self.weight.shape[0]).movedim(-1, 1)

    def _packed(self, ops: Operations, dtype: torch.dtype) -> Weight:
        """The weight as that of a GEMM, packed anew where it was changed."""
        version = self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version, dtype
        if self._as_matrix is None or self._as_matrix[:2] != (ops, version):
            self._as_matrix = ops, version, ops.pack(self.weight.detach().to(dtype).flatten(1))
        return self._as_matrix[2]


@CustomOp.register("conv2d")
class Conv2dLayer(ConvLayerBase):
    """x [B, in_channels, H, W]."""

    num_dim = 2


@CustomOp.register("conv3d")
class Conv3dLayer(ConvLayerBase):
    """x [B, in_channels, T, H, W]."""

    num_dim = 3
