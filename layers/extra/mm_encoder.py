"""Attention of multimodal encoders: not causal, and without a KV cache."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from llm.base.custom_op import CustomOp
from llm.errors import ValidationError


@CustomOp.register("mm_encoder_attn")
class MMEncoderAttention(CustomOp):
    """softmax(scale q k^T) v within each sequence, computed in float32, returned in the query's type.

    Args:
        num_heads, head_size: of the query.
        scale: factor on the scores; None: head_size ** -0.5.
        num_kv_heads: of key and value, a divisor of `num_heads`; None: `num_heads`.
        prefix: dotted path of the layer in the model.
        multimodal_config: not read. In vLLM it chooses among implementations; here there is one.
    """

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

    def forward_native(
        self,
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
        heads = [
            self._heads(x, n)
            for x, n in ((query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads))
        ]
        ends = [length] * batch if cu_seqlens is None else _lengths(cu_seqlens, batch * length)
        out = [self._attend(*parts) for parts in zip(*(x.split(ends, dim=1) for x in heads), strict=True)]
        joined = torch.cat(out, dim=1) if out else heads[0]
        return joined.transpose(0, 1).reshape(query.shape).to(query.dtype)

    def _heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """float32 [heads, B * N, head_size]."""
        return x.reshape(x.shape[0] * x.shape[1], heads, self.head_size).float().transpose(0, 1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One sequence: [heads, n, head_size]."""
        return F.scaled_dot_product_attention(query, key, value, scale=self.scale, enable_gqa=True)


def _lengths(cu_seqlens: torch.Tensor, tokens: int) -> list[int]:
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to the {tokens} tokens, got {bounds}.")
    return lengths
