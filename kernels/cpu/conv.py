"""Causal convolution with state, in C++; `kernels/reference/conv.py` defines it."""

from __future__ import annotations

import torch

from llm.forward import RecurrentMetadata
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.recurrent import no_such_row, row_arguments
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import KINDS, pointer
from llm.kernels.reference.conv import check_convolution

_CONV = KERNELS["llm_causal_conv1d"]


def causal_conv1d(
    library: Library,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    metadata: RecurrentMetadata,
    activation: str | None = None,
) -> torch.Tensor:
    """As `kernels.reference.conv.causal_conv1d`. Weight and state may have any strides: channels side by side
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
