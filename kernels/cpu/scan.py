"""State-space recurrences in C++; `kernels/reference/scan.py` defines them."""

from __future__ import annotations

import torch

from llm.forward import RecurrentMetadata
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.recurrent import no_such_row, row_arguments
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import pointer
from llm.kernels.reference.scan import NO_LIMIT, check_mamba2_scan, check_selective_scan

_SELECTIVE = KERNELS["llm_selective_scan"]
_MAMBA2 = KERNELS["llm_mamba2_scan"]


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
    """As `kernels.reference.scan.selective_scan`.

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
    """As `kernels.reference.scan.mamba2_scan`.

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
