"""Operations that keep a state per request, in C++; `kernels/reference/recurrent.py` defines them."""

from __future__ import annotations

import torch

from llm.forward import RecurrentMetadata
from llm.kernels.cpu.library import KINDS, Library, pointer
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference.recurrent import (
    NO_LIMIT,
    check_convolution,
    check_delta_rule,
    check_mamba2_scan,
    check_selective_scan,
)

_CONV = KERNELS["llm_causal_conv1d"]
_DELTA = KERNELS["llm_gated_delta_rule"]
_SELECTIVE = KERNELS["llm_selective_scan"]
_MAMBA2 = KERNELS["llm_mamba2_scan"]


def row_arguments(metadata: RecurrentMetadata) -> tuple[int, int, int, int | None, int | None, int]:
    """`StateRows` of recurrent.h: addresses of slots, starts, lengths, counts and stored, and the number of rows.
    `metadata` keeps the tensors alive."""
    slots, starts = metadata.slots, metadata.query_start_loc
    rows, given = len(slots), (starts, metadata.seq_lens, metadata.counts, metadata.stored)
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise TypeError(f"slots are contiguous int64; got {slots.dtype}")
    for tensor in given:
        if tensor is None:
            continue
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise TypeError(f"starts, lengths and counts are contiguous int32; got {tensor.dtype}")
        if len(tensor) != rows + (tensor is starts):
            raise ValueError(f"{rows} rows have {len(tensor)} starts, lengths or counts")
    addresses = slots.data_ptr(), starts.data_ptr(), metadata.seq_lens.data_ptr()
    return *addresses, pointer(metadata.counts), pointer(metadata.stored), rows


def no_such_row(metadata: RecurrentMetadata, row: int, num_slots: int, tokens: int) -> IndexError:
    return IndexError(
        f"row {row} is out of range: slot {int(metadata.slots[row])} of {num_slots}, tokens "
        f"{metadata.query_start_loc[row : row + 2].tolist()} of {tokens}, length {int(metadata.seq_lens[row])}"
    )


def causal_conv1d(
    library: Library,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    metadata: RecurrentMetadata,
    activation: str | None = None,
) -> torch.Tensor:
    """As `kernels.reference.recurrent.causal_conv1d`. Weight and state may have any strides: channels side by side
    (`weight.t()` of a contiguous [K, C]) are read fastest.

    Raises:
        IndexError: a row's slot or tokens do not exist; nothing was written.
    """
    check_convolution(x, weight, bias, conv_state, activation)
    x = x if x.stride(1) == 1 else x.contiguous()
    if bias is not None and (bias.dtype != weight.dtype or not bias.is_contiguous()):
        raise ValueError(f"the bias is contiguous and of the weight's type {weight.dtype}, got {bias.dtype}")
    (tokens, channels), num_slots = x.shape, len(conv_state)
    out = library.empty(tokens, channels)
    bad = library.call(
        *(_CONV, *row_arguments(metadata), num_slots, x.data_ptr(), x.stride(0), tokens),
        *(KINDS[weight.dtype], weight.data_ptr(), *weight.stride(), pointer(bias)),
        *(conv_state.data_ptr(), *conv_state.stride(), channels, weight.shape[1], activation == "silu"),
        *(out.data_ptr(), torch.get_num_threads()),
    )
    if bad >= 0:
        raise no_such_row(metadata, bad, num_slots, tokens)
    return out


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
    """As `kernels.reference.recurrent.gated_delta_rule`. Tokens may have any stride.

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


def selective_scan(
    library: Library,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
) -> torch.Tensor:
    """As `kernels.reference.recurrent.selective_scan`.

    Raises:
        IndexError: a row's slot or tokens do not exist; nothing was written.
    """
    check_selective_scan(x, dt, a, b, c, d, dt_bias, gate, state)
    _check_dense(a, d, dt_bias, state)
    (tokens, channels), num_slots, states = x.shape, len(state), state.shape[1]
    out = library.empty(tokens, channels)
    inputs = [_rows(item) for item in (x, dt, b, c)]
    last = (None, 0) if gate is None else _rows(gate)
    bad = library.call(
        *(_SELECTIVE, *row_arguments(metadata), num_slots, tokens),
        *(value for item, stride in inputs for value in (item.data_ptr(), stride)),
        *(pointer(last[0]), last[1], a.data_ptr(), d.data_ptr(), pointer(dt_bias)),
        *(state.data_ptr(), channels, states, out.data_ptr(), torch.get_num_threads()),
    )
    if bad >= 0:
        raise no_such_row(metadata, bad, num_slots, tokens)
    return out


def mamba2_scan(
    library: Library,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:
    """As `kernels.reference.recurrent.mamba2_scan`.

    Raises:
        IndexError: a row's slot or tokens do not exist; nothing was written.
    """
    check_mamba2_scan(x, dt, a, b, c, d, dt_bias, state)
    _check_dense(a, d, dt_bias, state)
    tokens, (num_slots, heads, states, channels) = len(x), state.shape
    out = library.empty(tokens, heads * channels)
    inputs = [_rows(item) for item in (x, dt, b, c)]
    bad = library.call(
        *(_MAMBA2, *row_arguments(metadata), num_slots, tokens),
        *(value for item, stride in inputs for value in (item.data_ptr(), stride)),
        *(a.data_ptr(), d.data_ptr(), len(d) != heads, pointer(dt_bias), *dt_limit, state.data_ptr()),
        *(heads, b.shape[1] // states, states, channels, out.data_ptr(), torch.get_num_threads()),
    )
    if bad >= 0:
        raise no_such_row(metadata, bad, num_slots, tokens)
    return out


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(float32 [T, width], contiguous within a token; the stride between tokens)."""
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


def _check_dense(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"parameters and state are contiguous, got strides {tensor.stride()}")
