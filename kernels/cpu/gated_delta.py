"""The gated delta rule in C++; `kernels/reference/gated_delta.py` defines it."""

from __future__ import annotations

import torch

from llm.forward import RecurrentMetadata
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.recurrent import no_such_row, row_arguments
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference.gated_delta import check_delta_rule

_DELTA = KERNELS["llm_gated_delta_rule"]


def gated_delta_rule(
    library: Library,
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
    """As `kernels.reference.gated_delta.gated_delta_rule`. Tokens may have any stride.

    Raises:
        IndexError: a row's slot or tokens do not exist; nothing was written.
    """
    check_delta_rule(query, key, value, decay, beta, a, dt_bias, state)
    if not (a.is_contiguous() and dt_bias.is_contiguous() and state.is_contiguous()):
        raise ValueError("a, dt_bias and the state are contiguous")
    query, key, value, decay, beta = (_by_token(item) for item in (query, key, value, decay, beta))
    (tokens, key_heads, size), heads, num_slots = key.shape, value.shape[1], len(state)
    out = library.empty(tokens, heads, value.shape[2])
    addresses = [(item.data_ptr(), item.stride(0)) for item in (query, key, value, decay, beta)]
    bad = library.call(
        *(_DELTA, *row_arguments(metadata), num_slots, tokens, *addresses[0], *addresses[1], *addresses[2]),
        *(*addresses[3], decay.dim() == 3, *addresses[4], beta_scale, a.data_ptr(), dt_bias.data_ptr()),
        *(state.data_ptr(), key_heads, heads, size, value.shape[2], out.data_ptr(), torch.get_num_threads()),
    )
    if bad >= 0:
        raise no_such_row(metadata, bad, num_slots, tokens)
    return out


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """Contiguous within a token."""
    inner = x.stride()[1:]
    dense = (x.shape[2], 1) if x.dim() == 3 else (1,)
    return x if inner == dense else x.contiguous()
