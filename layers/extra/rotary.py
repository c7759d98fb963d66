"""Rotary embeddings that no model here uses: with given cosines and sines, and for dual chunk attention."""

from __future__ import annotations

import torch

from llm.base.custom_op import CustomOp
from llm.errors import ValidationError
from llm.kernels.reference.rotary import apply_rotary
from llm.layers.rotary import base_wavelengths, cos_sin_table


@CustomOp.register("apply_rotary_emb")
class ApplyRotaryEmb(CustomOp):
    """Rotation by given cosines and sines, as vision encoders use it.

    Args:
        enforce_enable: enable the operation whatever `custom_ops` says.
        is_neox_style: as in `RotaryEmbedding`.
    """

    def __init__(self, enforce_enable: bool = False, is_neox_style: bool = True) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.is_neox_style = is_neox_style

    def forward_native(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x float [(batch,) N, heads, head_size], cos and sin [N, d] with 2d <= head_size -> the shape of x."""
        return apply_rotary(x, cos.float(), sin.float(), self.is_neox_style)


@CustomOp.register("dual_chunk_rotary_embedding")
class DualChunkRotaryEmbedding(CustomOp):
    """Rotary embedding for dual chunk attention (arXiv:2402.17463): keys are rotated once, queries five times.

    With L = chunk_size - local_size, a key is rotated by its position in its chunk, p = position mod L. A query is
    rotated by p (keys of its own chunk), min(p + L, chunk_size) (the previous chunk), min(2L - 1, chunk_size) (earlier
    chunks), p + L and p + chunk_size (the previous and earlier chunks in the sparse pattern, not clamped).

    Args:
        head_size, rotary_dim: channels of a head, and how many of them are rotated.
        max_position_embeddings: the longest sequence; the tables wrap, so it does not size them.
        base: theta of the frequencies.
        is_neox_style: as in `RotaryEmbedding`.
        chunk_size, local_size: of dual chunk attention, local_size < chunk_size.
    """

    cos_sin_cache: torch.Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool = True,
        *,
        chunk_size: int,
        local_size: int,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if not 0 <= local_size < chunk_size:
            raise ValidationError(
                f"local_size={local_size} must be from 0 to below chunk_size={chunk_size}.",
                parameter="local_size",
                value=local_size,
            )
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.is_neox_style = is_neox_style
        self.chunk_size = chunk_size
        self.chunk_len = chunk_size - local_size
        cache = cos_sin_table(1.0 / base_wavelengths(base, rotary_dim), chunk_size + self.chunk_len)
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [N], query [N, heads * head_size], key [N, kv_heads * head_size], offsets added to positions.

        Returns the five queries concatenated in the order above, [N, 5 * heads * head_size], and the key.
        """
        place = (positions if offsets is None else positions + offsets) % self.chunk_len
        last = min(2 * self.chunk_len - 1, self.chunk_size)
        of_queries = (
            place,
            (place + self.chunk_len).clamp(max=self.chunk_size),
            torch.full_like(place, last),
            place + self.chunk_len,
            place + self.chunk_size,
        )
        return torch.cat([self._rotate(query, rows) for rows in of_queries], dim=-1), self._rotate(key, place)

    def _rotate(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos_sin_cache.index_select(0, rows).chunk(2, dim=-1)
        heads = x.view(x.shape[0], x.shape[1] // self.head_size, self.head_size)
        return apply_rotary(heads, cos, sin, self.is_neox_style).view(x.shape)
