"""What flows into a model and what state its layers need.

Owns `KVCacheSpec` (declared by layers) and `ForwardBatch` (built by the runner once a step). Tensors only travel here;
nothing in this file computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class KVCacheSpec:
    """The paged key and value state that one attention layer needs.

    Layers whose specs are equal form a group and share block tables. `sliding_window` is the number of positions a
    token sees, itself included; None: all of them.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int | None = None

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass
class AttentionMetadata:
    """Where the tokens of this step live, for one group of layers.

    Shapes: R rows, N tokens in all, row r owns tokens query_start_loc[r] : query_start_loc[r + 1].

    Attributes:
        block_table: int32 [R, blocks], the row's block ids in order of position; 0 is a block nobody reads.
        slot_mapping: int64 [N], block * block_size + offset where each token's key and value are written.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R], tokens of the row that are in the cache once this step's are written.
        block_size: tokens a block holds.
        query_lens_list, seq_lens_list: the same numbers as lists, so that nobody calls `.item()` inside a forward.
        plan: what an attention kernel derived from the above, once a step for all layers of the group.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int
    query_lens_list: list[int]
    seq_lens_list: list[int]
    plan: Any = None


@dataclass
class ForwardBatch:
    """One step's input: rows of different lengths, laid end to end.

    Attributes:
        input_ids: int64 [N].
        positions: int64 [N], or [3, N] for models with three position streams.
        attention: one `AttentionMetadata` per attention layer; the layers of a group share one object.
        kv_caches: (key, value) per attention layer, laid out as the attention kernel wants them.
        logits_indices: int64 [L], the tokens whose logits are needed; any number per row.
        inputs_embeds: float [N, hidden], used in place of `embed(input_ids)` when given.
        adapter_ids: int32 [R], 0 for none.
        extensions: what a plugin's runner adds for its own layers.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: list[AttentionMetadata]
    kv_caches: list[tuple[torch.Tensor, torch.Tensor]]
    logits_indices: torch.Tensor
    inputs_embeds: torch.Tensor | None = None
    adapter_ids: torch.Tensor | None = None
    extensions: dict[str, Any] = field(default_factory=dict)
