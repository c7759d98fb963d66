"""Attention over a cache in the Acme One's layout: one row of padded channels per token and head."""

from __future__ import annotations

import torch

from llm.forward import AttentionMetadata, ForwardBatch, KVCacheSpec
from llm.layers.attention import AttentionBackend
from llm.platforms.interface import Platform


class AcmeAttention(AttentionBackend):
    reason = "acme's layout"

    @staticmethod
    def kv_cache_shapes(
        platform: Platform, spec: KVCacheSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = (num_blocks * block_size, spec.num_kv_heads, spec.padded)
        return shape, shape

    def write(self, key, value, kv_cache, metadata: AttentionMetadata) -> None:
        for new, cache in zip((key, value), kv_cache, strict=True):
            cache[metadata.slot_mapping, :, : self.params.head_size] = new.to(cache.dtype)

    def attend(self, query, kv_cache, metadata: AttentionMetadata, batch: ForwardBatch) -> torch.Tensor:
        if batch.extensions["acme"] != query.shape[0]:
            raise RuntimeError("the step's context did not reach the attention backend")
        starts = metadata.query_start_loc.tolist()
        rows = [
            self._row(query[starts[row] : starts[row + 1]], kv_cache, metadata, row) for row in range(len(starts) - 1)
        ]
        return torch.cat(rows)

    def _row(self, query: torch.Tensor, kv_cache, metadata: AttentionMetadata, row: int) -> torch.Tensor:
        known, size = metadata.seq_lens_list[row], metadata.block_size
        at = torch.arange(known)
        slots = metadata.block_table[row].long()[at // size] * size + at % size
        group = self.params.num_heads // self.params.num_kv_heads
        key, value = (
            cache[slots, :, : self.params.head_size].float().repeat_interleave(group, dim=1) for cache in kv_cache
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.params.scale
        seen = at[None] <= torch.arange(known - len(query), known)[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(dim=-1), value)
