"""Attention over an image with decomposed relative positions (arXiv:2112.01526): SAM's encoder and DeepSeek-OCR."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from llm.base.custom_op import PluggableLayer
from llm.errors import ValidationError
from llm.layers.linear import QKVParallelLinear, RowParallelLinear
from llm.quantization.base import QuantizationConfig


@PluggableLayer.register("rel_pos_attention")
class RelPosAttention(PluggableLayer):
    """x float [B, H, W, dim] -> the same shape and type; every position of an image sees all others.

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
        qkv = self.qkv(x.float()).view(batch, height * width, 3, self.num_heads, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, H * W, head_size]
        bias = self._bias(query, height, width) if self.use_rel_pos else None
        out = F.scaled_dot_product_attention(query, key, value, bias)
        return self.proj(out.transpose(1, 2).reshape(batch, height, width, dim)).to(x.dtype)

    def _bias(self, query: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The scores' terms for relative positions: [B, heads, H * W, H * W]."""
        places = query.unflatten(2, (height, width))
        rows = torch.einsum("bnhwc,hkc->bnhwk", places, _relative(self.rel_pos_h, height))
        columns = torch.einsum("bnhwc,wkc->bnhwk", places, _relative(self.rel_pos_w, width))
        return (rows[..., :, None] + columns[..., None, :]).flatten(4, 5).flatten(2, 3)


def _relative(table: torch.Tensor, size: int) -> torch.Tensor:
    """Entry [i, j] is the table's vector for distance i - j: float32 [size, size, head_size]."""
    wanted = 2 * size - 1
    if table.shape[0] != wanted:
        table = F.interpolate(table.float().t()[None], size=wanted, mode="linear")[0].t()
    places = torch.arange(size, device=table.device)
    return table.float()[places[:, None] - places[None, :] + size - 1]
