"""Attention patterns by their definition: how much of each position's value a position gets, of every head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from llm.inside.names import Scoring


def pattern(
    queries: np.ndarray, positions: np.ndarray, keys: np.ndarray, scoring: Scoring, heads: Sequence[int] | None = None
) -> np.ndarray:
    """float32 [N, heads, keys]: rows sum to 1, and to less where a head has a sink.

    Args:
        queries: float32 [N, all heads, size], at `positions`, int64 [N].
        keys: float32 [positions from 0 on, KV heads, size]; those up to the last of `positions` are weighed.
        heads: which heads; None: all.
    """
    chosen = list(range(queries.shape[1]) if heads is None else heads)
    length = int(positions.max(initial=-1)) + 1
    rounded = torch.from_numpy(np.ascontiguousarray(keys[:length])).to(getattr(torch, scoring.cache_dtype)).double()
    found = np.zeros((len(queries), len(chosen), length), dtype=np.float32)
    query_heads_per_key = max(1, queries.shape[1] // scoring.num_kv_heads)
    for place, head in enumerate(chosen):
        own = torch.from_numpy(queries[:, head]).double()
        scores = own @ rounded[:, head // query_heads_per_key].T * scoring.scale
        found[:, place] = _weights(scores, torch.from_numpy(positions), head, scoring).float().numpy()
    return found


def _weights(scores: torch.Tensor, positions: torch.Tensor, head: int, scoring: Scoring) -> torch.Tensor:
    """The softmax of one head's scores, float64 [N, keys]."""
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    behind = positions[:, None] - torch.arange(scores.shape[1])
    if scoring.alibi_slopes is not None:
        scores = scores - float(scoring.alibi_slopes[head]) * behind
    seen = behind >= 0
    if scoring.sliding_window is not None:
        seen &= behind < scoring.sliding_window
    if scoring.attention_chunk is not None:
        chunk = scoring.attention_chunk
        seen &= positions[:, None] // chunk == torch.arange(scores.shape[1]) // chunk
    scores = scores.masked_fill(~seen, -torch.inf)
    if scoring.sinks is None:
        return scores.softmax(-1)
    sink = scores.new_full((len(scores), 1), float(scoring.sinks[head]))
    return torch.cat([scores, sink], dim=-1).softmax(-1)[:, :-1]
