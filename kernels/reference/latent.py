"""Latent attention in plain PyTorch: GEMMs with a matrix per head, its KV cache, and attention over that.

Owns the definitions (DeepSeek-V2, arXiv:2405.04434, in the form that multiplies the query where the paper multiplies
the key). The KV cache is that of `llm.forward.LatentCacheSpec`, in every backend: [blocks, block_size, latent + rope].
"""

from __future__ import annotations

import torch

from llm.forward import AttentionMetadata
from llm.kernels.reference.attention import paged_attention


def heads_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[t, h] = x[t, h] W_h: x float32 [N, heads, k], weight float [heads, k, n] -> float32 [N, heads, n]."""
    return torch.bmm(x.transpose(0, 1), weight.float()).transpose(0, 1).contiguous()


def write_latent_cache(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store latents float32 [N, latent] and rotated keys float32 [N, rope], side by side, at the slots int64 [N]."""
    both = torch.cat((latent, rope), dim=-1).to(cache.dtype)
    cache.view(-1, cache.shape[-1]).index_copy_(0, slot_mapping, both)


def latent_attention(
    query: torch.Tensor, query_rope: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, *, scale: float
) -> torch.Tensor:
    """Causal attention in which a token's row of the cache is its key for every head, and its latent its value.

    Shapes: query float32 [N, heads, latent], query_rope float32 [N, heads, rope] -> [N, heads, latent].
    """
    keys = cache.view(1, -1, cache.shape[-1])
    values = keys[..., : query.shape[-1]]
    return paged_attention(torch.cat((query, query_rope), dim=-1), keys, values, metadata, scale=scale)
