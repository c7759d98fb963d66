"""Latent attention in plain PyTorch: GEMMs with a matrix per head, its KV cache, and attention over that.

Owns the definitions (DeepSeek-V2, arXiv:2405.04434, in the form that multiplies the query where the paper multiplies
the key). The KV cache is that of `llm.forward.LatentCacheSpec`, in every backend: [blocks, block_size, latent + rope].
In 8 bits a row has two scales behind its codes, of the latent and of the rotated key (`quantized_cache.py`).
"""

from __future__ import annotations

import torch

from llm.forward import QUANTIZED_CACHE_DTYPES, SCALE_BYTES, AttentionMetadata
from llm.kernels.reference.attention import paged_attention
from llm.kernels.reference.quantized_cache import dequantize_heads, quantize_heads, stored


def heads_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[t, h] = x[t, h] W_h: x float [N, heads, k], weight float [heads, k, n] -> [N, heads, n] of the type of x."""
    return torch.bmm(x.transpose(0, 1), weight.to(x.dtype)).transpose(0, 1).contiguous()


def write_latent_cache(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store latents float [N, latent] and rotated keys float [N, rope], side by side, at the slots int64 [N]."""
    if cache.dtype not in QUANTIZED_CACHE_DTYPES:
        both = torch.cat((latent, rope), dim=-1).to(cache.dtype)
        cache.view(-1, cache.shape[-1]).index_copy_(0, slot_mapping, both)
        return
    parts = [stored(*quantize_heads(part.unsqueeze(1), cache.dtype))[:, 0] for part in (latent, rope)]
    codes, scales = ([part[:, where] for part in parts] for where in (slice(-SCALE_BYTES), slice(-SCALE_BYTES, None)))
    row = torch.cat([*codes, *scales], dim=1)
    cache.view(torch.uint8).view(-1, cache.shape[-1]).index_copy_(0, slot_mapping, row)


def latent_attention(
    query: torch.Tensor, query_rope: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, *, scale: float
) -> torch.Tensor:
    """Causal attention in which a token's row of the cache is its key for every head, and its latent its value.

    Shapes: query float [N, heads, latent], query_rope float [N, heads, rope] -> [N, heads, latent].
    """
    keys = cache.view(1, -1, cache.shape[-1])
    if cache.dtype in QUANTIZED_CACHE_DTYPES:
        keys = _dequantized(keys.view(torch.uint8), cache.dtype, query.shape[-1])
    values = keys[..., : query.shape[-1]]
    return paged_attention(torch.cat((query, query_rope), dim=-1), keys, values, metadata, scale=scale)


def _dequantized(rows: torch.Tensor, dtype: torch.dtype, latent_size: int) -> torch.Tensor:
    """uint8 [1, slots, latent + rope + scales] -> float32 [1, slots, latent + rope]."""
    codes, scales = rows[..., : -2 * SCALE_BYTES], rows[..., -2 * SCALE_BYTES :]
    parts = codes.split([latent_size, codes.shape[-1] - latent_size], dim=-1)
    both = zip(parts, scales.split(SCALE_BYTES, dim=-1), strict=True)
    return torch.cat([dequantize_heads(torch.cat(part, dim=-1), dtype) for part in both], dim=-1)
