"""Attention over a paged KV cache: the layer, and its backend, which a platform chooses.

The layer declares its state, writes this step's keys and values and attends. The backend owns the layout of the KV
cache, which comes in the `ForwardBatch`, and the arithmetic: no other code reads the cache. A platform names another
backend by class path in `Platform.get_attn_backend_cls`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from llm.base.construction import construction
from llm.base.watch import Counted, Patchable
from llm.errors import UnsupportedModelError
from llm.forward import AttentionMetadata, ForwardBatch, ImageTokens, KVCacheSpec
from llm.kernels.select import backend_for, backend_of_construction
from llm.layers.linear import QKVParallelLinear
from llm.platforms.interface import Platform, called_by_name
from llm.plugins import load_class


class Attention(Patchable):
    """Grouped-query attention of layer `layer_index`.

    Args:
        layer_index: position of this layer's state among the model's.
        scale: factor on the scores before the softmax.
        sliding_window: how many positions a token sees, itself included; None: all.
        attention_chunk: a token sees only its own chunk of so many positions; None: all. Without a window.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: no cap.
        sinks: float32 [num_heads], scores of one more key, whose value is zero; None: there is none.
        alibi_slopes: float32 [num_heads]: slope * (position of the key - position of the query) is added to a score,
            after the soft cap; None: nothing is. Only if `causal`.
        causal: False: a token also sees the positions after it, of which `sliding_window` bounds the distance likewise.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        layer_index: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        causal: bool = True,
        attention_chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.layer_index = layer_index
        self.sliding_window = sliding_window
        params = AttentionParams(
            num_heads,
            num_kv_heads,
            head_size,
            scale,
            sliding_window,
            soft_cap,
            sinks,
            alibi_slopes,
            causal,
            attention_chunk,
        )
        self._device = construction().device
        self.backend = attention_backend(construction().platform, head_size)(params)

    @property
    def operations_per_pair(self) -> int:
        """Of one query token with one key token, a multiply-add being two."""
        return 4 * self.num_heads * self.head_size

    def kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        return KVCacheSpec(self.num_kv_heads, self.head_size, dtype, self.sliding_window)

    def take_static_scales(self, dtype: torch.dtype, scales: torch.Tensor) -> None:
        """The checkpoint's scales and offsets for a KV cache of `dtype`, float32 [4, kv_heads, head_size]."""
        self.backend.static_scales = dtype, scales.to(self._device)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """query [N, heads * head_size], key and value [N, kv_heads * head_size] -> [N, heads * head_size]."""
        kv_cache, metadata = self.state(batch)
        heads = (query.shape[0], self.num_kv_heads, self.head_size)
        # All keys are written before any batch row reads: batch rows of one step may share blocks (prefix hits).
        self.backend.write(key.view(heads), value.view(heads), kv_cache, metadata)
        return self.attend(query, batch)

    def attend(self, query: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """query [N, heads * head_size] over the cache, which has this step's keys and values -> the same shape."""
        tokens = query.shape[0]
        heads = query.view(tokens, self.num_heads, self.head_size)
        out = self.backend.attend(heads, *self.state(batch), batch)
        if batch.images is not None and batch.images.both_ways is not None:
            out = self._both_ways(heads, out, batch.images, batch)
        return out.view(tokens, -1)

    def _both_ways(
        self, query: torch.Tensor, out: torch.Tensor, images: ImageTokens, batch: ForwardBatch
    ) -> torch.Tensor:
        """`out` with the tokens that see those after them in their run, whose keys have been written."""
        metadata = images.metadata[self.layer_index]
        if metadata is None or images.both_ways is None:
            return out
        own = self.backend.attend_both_ways(query[images.both_ways], self.state(batch)[0], metadata)
        return out.index_copy(0, images.both_ways, own)

    def state(self, batch: ForwardBatch) -> tuple[tuple[torch.Tensor, torch.Tensor], AttentionMetadata]:
        """This layer's (key cache, value cache) and where the step's tokens are in it."""
        key_cache, value_cache = batch.states[self.layer_index]
        return (key_cache, value_cache), batch.metadata[self.layer_index]


PAGED_ATTENTION = "llm.layers.attention.PagedAttention"


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

    def attend_both_ways(
        self, query: torch.Tensor, kv_cache: tuple[torch.Tensor, torch.Tensor], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """As `attend`, for batch rows whose tokens also see those after them. Models that read images need it."""
        raise UnsupportedModelError(f"{type(self).__name__} computes no attention in both directions.")


class PagedAttention(AttentionBackend):
    """The kernels of this package."""

    reads_quantized = True

    def __init__(self, params: AttentionParams) -> None:
        super().__init__(params)
        backend = backend_of_construction()
        self.reason = backend.source("paged_attention")
        self._ops = backend.ops

    @staticmethod
    def kv_cache_shapes(
        platform: Platform, spec: KVCacheSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return backend_for(platform).ops.kv_cache_shapes(spec, num_blocks, block_size)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> None:
        self._ops.write_kv_cache(key, value, *kv_cache, metadata.slot_mapping, static_scales=self._scales(kv_cache))

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        return self._attend(query, kv_cache, metadata, self.params.causal)

    def attend_both_ways(
        self, query: torch.Tensor, kv_cache: tuple[torch.Tensor, torch.Tensor], metadata: AttentionMetadata
    ) -> torch.Tensor:
        return self._attend(query, kv_cache, metadata, False)

    def _attend(
        self,
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        causal: bool,
    ) -> torch.Tensor:
        return self._ops.paged_attention(
            query,
            *kv_cache,
            metadata,
            scale=self.params.scale,
            sliding_window=self.params.sliding_window,
            attention_chunk=self.params.attention_chunk,
            soft_cap=self.params.soft_cap,
            sinks=self.params.sinks,
            alibi_slopes=self.params.alibi_slopes,
            causal=causal,
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


class GatedQKVParallelLinear(QKVParallelLinear):
    """Queries, gates, keys and values, stacked. A rank has its heads' queries, then their gates.

    A checkpoint's query matrix has each head's query and, behind it, the head's gate. Arguments are those of
    `QKVParallelLinear`, where queries and gates count as heads.
    """

    def shard_restacked(self, loaded: torch.Tensor, dim: int, shard_id: str) -> torch.Tensor:
        """A checkpoint's tensor of one shard with its rows, along `dim`, in this layer's order."""
        return self._exchanged(loaded, dim, (self.tp_size, self.num_heads // 2, 2)) if shard_id == "q" else loaded

    def as_stored(self, rows: torch.Tensor, shard_id: str) -> torch.Tensor:
        """The opposite, of a rank that has all heads."""
        return self._exchanged(rows, 0, (1, 2, self.num_heads // 2)) if shard_id == "q" else rows

    def _exchanged(self, rows: torch.Tensor, dim: int, sizes: tuple[int, int, int]) -> torch.Tensor:
        count = sizes[0] * sizes[1] * sizes[2]
        if rows.dim() <= dim or rows.shape[dim] % count:
            raise ValueError(f"has shape {list(rows.shape)}, the model needs {count} heads of queries and gates")
        by_head = rows.unflatten(dim, (*sizes, rows.shape[dim] // count))
        return by_head.transpose(dim + 1, dim + 2).flatten(dim, dim + 3)


class OutputGate:
    """float32 x and gate [N, width], rows of any stride -> x * sigmoid(gate)."""

    def __init__(self) -> None:
        self._ops = backend_of_construction().ops

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self._ops.gated_rms_norm(x, gate, None, 0.0, activation="sigmoid")
