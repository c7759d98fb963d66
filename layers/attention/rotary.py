"""Attention behind a rotary embedding: one kernel rotates and writes the cache, where both layers are this package's.

Owns the choice between that kernel and the two layers one after the other. Whoever replaced either of them, turned it
off or watches it gets the layers.
"""

from __future__ import annotations

import torch

from llm.base.custom_op import is_watched
from llm.forward import ForwardBatch
from llm.layers.attention.attention import Attention
from llm.layers.attention.backend import PagedAttention
from llm.layers.rotary import RotaryEmbedding


def rotate_and_attend(
    rotary: RotaryEmbedding,
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: ForwardBatch,
) -> torch.Tensor:
    """`attention(*rotary(batch.positions, query, key), value, batch)`, the same bits; shapes as `Attention.forward`."""
    if batch.positions.dim() == 1 and is_fused(rotary, attention):
        backend: PagedAttention = attention.backend  # type: ignore[assignment]
        query = backend.rotate_and_write(rotary, batch.positions, query, key, value, *attention.state(batch))
        return attention.attend(query, batch)
    query, key = rotary(batch.positions, query, key)
    return attention(query, key, value, batch)


def is_fused(rotary: RotaryEmbedding, attention: Attention) -> bool:
    """Whether one kernel stands for both: neither is replaced, derived from or watched, `rotary` runs its kernel."""
    return (
        type(rotary) is RotaryEmbedding
        and type(attention) is Attention
        and type(attention.backend) is PagedAttention
        and rotary.binding.method == "forward_cpu"
        and not is_watched((rotary, attention))
    )
