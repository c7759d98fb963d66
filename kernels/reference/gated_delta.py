"""The gated delta rule: linear attention whose state is a matrix per head (arXiv:2412.06464)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llm.forward import RecurrentMetadata
from llm.kernels.reference.recurrent import state_rows

_NORM_EPS = 1e-6


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """For each token in order, with S the state [K, V] of a head: -> float32 [T, heads, V].

        S = e^(a softplus(decay + dt_bias)) S
        S = S + k^T (v - k S) sigmoid(beta) beta_scale
        y = q S

    k and q are divided by sqrt(sum of squares + 1e-6), and q by sqrt(K). Other types of what the tokens have are
    computed in float32, and the result is of the type of `value`.

    Args:
        query, key: float32 [T, key heads, K]; each is for heads / key heads consecutive heads.
        value: float32 [T, heads, V].
        decay: float32 [T, heads], or [T, heads, K]: of each row of the state by itself (arXiv:2510.26692).
        beta: float32 [T, heads], before the sigmoid.
        a: float32 [heads], -exp of a checkpoint's A_log; dt_bias: float32, of the shape of one token's `decay`.
        state: float32 [slots, heads, K, V], written in place. A row whose first token is at position 0 starts from
            zeros, not from what its slot has.

    Raises:
        IndexError: a row's slot does not exist.
    """
    dtype = value.dtype
    query, key, value, decay, beta = (item.float() for item in (query, key, value, decay, beta))
    check_delta_rule(query, key, value, decay, beta, a, dt_bias, state)
    repeats, size = value.shape[1] // key.shape[1], key.shape[2]
    query, key = (_normalised(item).repeat_interleave(repeats, dim=1) for item in (query, key))
    query = query * size**-0.5
    kept = (a.view(-1, *[1] * (decay.dim() - 2)) * F.softplus(decay + dt_bias)).exp()
    kept = kept[..., None, None] if decay.dim() == 2 else kept[..., None]
    share = beta.sigmoid()[..., None] * beta_scale
    out = torch.empty_like(value)
    for row in state_rows(metadata, len(state)):
        now = torch.zeros_like(state[row.slot]) if row.is_new else state[row.slot].clone()
        for seen, t in enumerate(range(row.tokens.start, row.tokens.stop), 1):
            now = now * kept[t]
            known = (now * key[t][..., None]).sum(-2)
            now = now + key[t][..., None] * ((value[t] - known) * share[t])[:, None]
            out[t] = (now * query[t][..., None]).sum(-2)
            if seen == row.stored:
                state[row.slot] = now
    return out.to(dtype)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def check_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """ValueError for shapes and types that do not fit."""
    tensors = (query, key, value, decay, beta, a, dt_bias, state)
    if any(item.dtype != torch.float32 for item in tensors):
        raise ValueError(f"the gated delta rule takes float32, got {[str(item.dtype) for item in tensors]}")
    if query.shape != key.shape or key.dim() != 3 or value.dim() != 3 or len(value) != len(key):
        raise ValueError(f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit")
    (tokens, key_heads, size), heads = key.shape, value.shape[1]
    if heads % key_heads or state.shape[1:] != (heads, size, value.shape[2]):
        raise ValueError(f"the state {list(state.shape)} does not fit {key_heads} key heads and {heads} heads")
    if decay.shape not in ((tokens, heads), (tokens, heads, size)) or dt_bias.shape != decay.shape[1:]:
        raise ValueError(f"decay {list(decay.shape)} and dt_bias {list(dt_bias.shape)} do not fit {heads} heads")
    if beta.shape != (tokens, heads) or a.shape != (heads,):
        raise ValueError(f"beta {list(beta.shape)} and a {list(a.shape)} do not fit {heads} heads")
