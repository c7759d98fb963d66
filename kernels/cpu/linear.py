"""Products with float weights, and rows of float tables.

Twins of the functions of the same names in `kernels/reference/linear.py`, the library first.
"""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.packed import FLOAT_KINDS, PanelWeight
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import pointer
from llm.kernels.reference.linear import rounded

_LINEAR = KERNELS["llm_linear_float"]
# Beside FLOAT_KINDS: a bfloat16 weight whose products read their activations rounded.
_ROUNDED = 3
_EMBEDDING = KERNELS["llm_embedding_float"]


def linear_float(lib: Library, x: torch.Tensor, packed: PanelWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + bias; each output is a chain of fused multiply-adds over k = 0 ... K-1, then the bias.

    Shapes: x float32 [..., K], bias float [N] or None, y float32 [..., N]. With matrix tiles the chain is that of
    gemm_tiles.h; they also round x where the weight says so, which costs a pass over x without them.
    """
    x = checked_input(x, packed.k)
    if packed.rounds_input and not lib.has_tiles:
        x = rounded(x)
    out = lib.empty(*x.shape[:-1], packed.n)
    bias = checked_vector(bias, packed.n)
    data = packed.data
    lib.call(
        _LINEAR,
        _kind(lib, packed),
        x.data_ptr(),
        data.data_ptr(),
        pointer(bias),
        out.data_ptr(),
        x.numel() // packed.k if packed.k else out.numel() // max(1, packed.n),
        packed.n,
        packed.k,
        torch.get_num_threads(),
    )
    return out


def _kind(lib: Library, packed: PanelWeight) -> int:
    return _ROUNDED if packed.rounds_input and lib.has_tiles else FLOAT_KINDS[packed.data.dtype]


def embedding_float(lib: Library, token_ids: torch.Tensor, packed: PanelWeight) -> torch.Tensor:
    """Rows of the table as float32: ids int64 [L] -> [L, K]; raises IndexError for an id that is none."""
    ids = token_ids.to(torch.int64).contiguous()
    out = lib.empty(*ids.shape, packed.k)
    kind, data, threads = FLOAT_KINDS[packed.data.dtype], packed.data.data_ptr(), torch.get_num_threads()
    if lib.call(_EMBEDDING, kind, ids.data_ptr(), data, out.data_ptr(), ids.numel(), packed.n, packed.k, threads):
        raise IndexError(f"token ids must be in [0, {packed.n}), got {int(ids.min())} to {int(ids.max())}")
    return out


def checked_input(x: torch.Tensor, k: int) -> torch.Tensor:
    """`x`, contiguous, when it is float32 [..., k]; else ValueError."""
    if x.dtype != torch.float32 or x.shape[-1] != k:
        raise ValueError(f"activations are float32 [..., {k}], got {x.dtype} {list(x.shape)}")
    return x if x.is_contiguous() else x.contiguous()


def checked_vector(vector: torch.Tensor | None, n: int) -> torch.Tensor | None:
    """A bias or per-channel scale, contiguous float32 [n]; ValueError for another shape."""
    if vector is None:
        return None
    if vector.shape != (n,):
        raise ValueError(f"one value per output is needed, [{n}], got {list(vector.shape)}")
    return vector if vector.dtype == torch.float32 and vector.is_contiguous() else vector.float().contiguous()
