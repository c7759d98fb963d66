"""The attention layer: declares its state, writes this step's keys and values, attends over the KV cache.

Does not own the cache, which comes in the `ForwardBatch`; the attention backend owns its layout and the arithmetic.
"""

from __future__ import annotations

import torch

from llm.base.construction import construction
from llm.base.watch import Patchable
from llm.forward import AttentionMetadata, ForwardBatch, KVCacheSpec
from llm.layers.attention.backend import AttentionParams, attention_backend


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
        self.backend = attention_backend(construction().platform, head_size)(params)

    @property
    def operations_per_pair(self) -> int:
        """Of one query token with one key token, a multiply-add being two."""
        return 4 * self.num_heads * self.head_size

    def kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        return KVCacheSpec(self.num_kv_heads, self.head_size, dtype, self.sliding_window)

    def take_static_scales(self, dtype: torch.dtype, scales: torch.Tensor) -> None:
        """The checkpoint's scales and offsets for a KV cache of `dtype`, float32 [4, kv_heads, head_size]."""
        self.backend.static_scales = dtype, scales

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
        heads = (tokens, self.num_heads, self.head_size)
        return self.backend.attend(query.view(heads), *self.state(batch), batch).view(tokens, -1)

    def state(self, batch: ForwardBatch) -> tuple[tuple[torch.Tensor, torch.Tensor], AttentionMetadata]:
        """This layer's (key cache, value cache) and where the step's tokens are in it."""
        key_cache, value_cache = batch.states[self.layer_index]
        return (key_cache, value_cache), batch.metadata[self.layer_index]
