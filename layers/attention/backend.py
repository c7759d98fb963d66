"""How attention stores keys and values and how it computes: the part of an attention layer that a platform chooses.

Owns `AttentionBackend` and this package's `PagedAttention`. A platform names another by class path in
`Platform.get_attn_backend_cls`. The backend owns the layout of the KV cache: no other code reads the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from llm.base.watch import Counted
from llm.forward import AttentionMetadata, ForwardBatch, KVCacheSpec
from llm.kernels.select import backend_for, backend_of_construction
from llm.platforms.interface import Platform
from llm.platforms.vllm_hooks import called_by_name
from llm.plugins import load_class

PAGED_ATTENTION = "llm.layers.attention.backend.PagedAttention"


@dataclass(frozen=True)
class AttentionParams:
    """A layer's parameters for its backend, as `Attention` documents them."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    causal: bool = True
    attention_chunk: int | None = None


class AttentionBackend(Counted):
    """The backend of one attention layer, constructed with the layer's parameters.

    Attributes:
        reason: why it computes as it does, in a few words, for `llm.explain()`.
        static_scales: of a checkpoint with a quantized KV cache: (the cache's dtype, float32 [4, kv_heads, head_size]:
            scales and offsets of keys, then of values). With another dtype they are not used.
        reads_quantized: it also has KV caches of `llm.forward.QUANTIZED_CACHE_DTYPES`.
    """

    reason: str = "the platform's backend"
    reads_quantized: bool = False
    static_scales: tuple[torch.dtype, torch.Tensor] | None = None

    def __init__(self, params: AttentionParams) -> None:
        self.params = params

    @staticmethod
    def kv_cache_shapes(
        platform: Platform, spec: KVCacheSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one layer's key and value cache, both of `spec.dtype`. Block 0 is never read."""
        raise NotImplementedError

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> None:
        """Store key and value [N, kv_heads, head_size] of this step's tokens at `metadata.slot_mapping`."""
        raise NotImplementedError

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Attend with query [N, heads, head_size] over the cache, this step's tokens included -> the same shape.

        `batch.extensions` has what the platform's model runner added for this step.
        """
        raise NotImplementedError


class PagedAttention(AttentionBackend):
    """The kernels of this package."""

    reads_quantized = True

    def __init__(self, params: AttentionParams) -> None:
        super().__init__(params)
        backend = backend_of_construction()
        self.reason = backend.source("paged_attention")
        self._write_kv_cache = backend.op("write_kv_cache")
        self._paged_attention = backend.op("paged_attention")

    @staticmethod
    def kv_cache_shapes(
        platform: Platform, spec: KVCacheSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return backend_for(platform).op("kv_cache_shapes")(spec, num_blocks, block_size)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> None:
        self._write_kv_cache(key, value, *kv_cache, metadata.slot_mapping, static_scales=self._scales(kv_cache))

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        return self._paged_attention(
            query,
            *kv_cache,
            metadata,
            scale=self.params.scale,
            sliding_window=self.params.sliding_window,
            attention_chunk=self.params.attention_chunk,
            soft_cap=self.params.soft_cap,
            sinks=self.params.sinks,
            alibi_slopes=self.params.alibi_slopes,
            causal=self.params.causal,
            static_scales=self._scales(kv_cache),
        )

    def _scales(self, kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor | None:
        """The static scales, if this cache has them."""
        if self.static_scales is None:
            return None
        dtype, scales = self.static_scales
        return scales if dtype == kv_cache[0].dtype else None


def attention_backend(platform: Platform | None, head_size: int) -> type[AttentionBackend]:
    """The class that `platform` names for heads of this size; for None, `PagedAttention`."""
    path = PAGED_ATTENTION if platform is None else called_by_name(platform.get_attn_backend_cls, _known(head_size))
    plugin = None if platform is None else platform.plugin
    return load_class(path, AttentionBackend, f"{type(platform).__name__}.get_attn_backend_cls", plugin)


def _known(head_size: int) -> dict[str, object]:
    """vLLM's arguments of `get_attn_backend_cls`, as far as they are known where a layer is made."""
    layer = {
        "head_size": head_size,
        "dtype": torch.float32,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "attn_type": "decoder",
    }
    asked = {"selected_backend": None, "attn_selector_config": SimpleNamespace(**layer), "num_heads": None}
    return {**layer, **asked, "use_v1": True}
