"""The GEMM and the embedding in C++, for weights of any kind, and what adapters add to their results in one call;
`kernels/reference/linear.py` defines them.

Quantization of activations is a separate operation for other callers: GEMMs quantize theirs themselves.
"""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.packed import PanelWeight, WeightArray, panels
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.weight import LoraTerms

_LINEAR = KERNELS["llm_linear"]
_EMBEDDING = KERNELS["llm_embedding"]
_PER_TOKEN = KERNELS["llm_quantize_per_token"]
_STATIC = KERNELS["llm_quantize_static"]


def quantize_per_token(lib: Library, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [M, K] -> q int8 [M, K], scale float32 [M]: the largest magnitude of each row becomes 127."""
    x = _checked(x)
    q, scale = torch.empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1])
    threads = torch.get_num_threads()
    lib.call(_PER_TOKEN, x.data_ptr(), q.data_ptr(), scale.data_ptr(), scale.numel(), x.shape[-1], threads)
    return q, scale


def quantize_static(lib: Library, x: torch.Tensor, scale: float, offset: int) -> torch.Tensor:
    """clamp(round(x / scale) + offset, -128, 127); float32 -> int8 of the same shape."""
    x = _checked(x)
    q = torch.empty(x.shape, dtype=torch.int8)
    lib.call(_STATIC, x.data_ptr(), q.data_ptr(), scale, offset, x.numel(), torch.get_num_threads())
    return q


def _checked(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise ValueError(f"activations are float32, got {x.dtype}")
    return x.contiguous()


def linear(library: Library, x: torch.Tensor, weight: PanelWeight) -> torch.Tensor:
    """y = x W^T + bias: x float32 [..., K] -> float32 [..., N].

    With float activations each output is one chain of FMAs over k = 0 ... K-1, then the bias; with AMX and a bfloat16
    weight it is the chain of gemm_tiles.h. With int8 activations the bits are those of the reference.
    """
    if x.dtype != torch.float32 or x.shape[-1] != weight.k:
        raise ValueError(f"activations are float32 [..., {weight.k}], got {x.dtype} {list(x.shape)}")
    if not x.is_contiguous():
        x = x.contiguous()
    out = library.empty(*x.shape[:-1], weight.n)
    rows = x.numel() // weight.k if weight.k else out.numel() // max(1, weight.n)
    # `Library.call` inlined: this is the most frequent call of a step, and a frame less.
    entry = library.entries[_LINEAR]
    slots = _LINEAR.pack(weight.address, x.data_ptr(), out.data_ptr(), rows, torch.get_num_threads())
    if entry(slots) if library.recorder is None else library.recorder.call(entry, slots):
        raise ValueError(f"a weight of {weight.kind} needs its scales")
    if library.recorder is not None:
        library.recorder.kept.append(weight)
    return out


def embedding(library: Library, token_ids: torch.Tensor, weight: PanelWeight) -> torch.Tensor:
    """Rows of W: ids int64 [...] -> float32 [..., K]; IndexError for an id outside [0, N).

    The weight is float, or has its scales, and its columns are in order.
    """
    if weight.columns is not None:
        raise ValueError("an embedding table has its columns in order")
    if not weight.is_float and weight.scale is None:
        raise ValueError(f"a weight of {weight.kind} needs its scales")
    ids = token_ids.to(torch.int64).contiguous()
    out = library.empty(*ids.shape, weight.k)
    address, threads = weight.address, torch.get_num_threads()
    if library.call(_EMBEDDING, address, ids.data_ptr(), out.data_ptr(), ids.numel(), threads):
        raise IndexError(f"token ids must be in [0, {weight.n}), got {int(ids.min())} to {int(ids.max())}")
    if library.recorder is not None:
        library.recorder.kept.append(weight)
    return out


_LORA = KERNELS["llm_lora"]


class _Arrays:
    """The terms as the kernel reads them."""

    def __init__(self, terms: LoraTerms) -> None:
        self.down = WeightArray(panels([term.down for term in terms.terms]))
        self.up = WeightArray(panels([term.up for term in terms.terms]))
        self.places = torch.tensor([(term.slot, term.first) for term in terms.terms], dtype=torch.int64)
        self.scales = torch.tensor([term.scale for term in terms.terms], dtype=torch.float32)


def lora(library: Library, y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, terms: LoraTerms) -> torch.Tensor:
    """y[t] += scale * up(down(x[t])); each product is that of `linear`, so a token's bits are those of it alone."""
    if x.dtype != torch.float32 or x.shape[-1] != terms.inputs or terms.is_lookup:
        raise ValueError(f"activations are float32 [..., {terms.inputs}], got {x.dtype} {list(x.shape)}")
    x = x.contiguous()
    _add(library, y, x, x.numel() // max(1, terms.inputs), slots, terms)
    return y


def lora_embedding(
    library: Library, y: torch.Tensor, token_ids: torch.Tensor, slots: torch.Tensor, terms: LoraTerms
) -> torch.Tensor:
    """The same where down(x) is a row of `down`; IndexError for an id that it does not have."""
    if not terms.is_lookup:
        raise ValueError("the terms are of a layer that multiplies")
    ids = token_ids.to(torch.int64).contiguous()
    if _add(library, y, ids, ids.numel(), slots, terms):
        raise IndexError(f"token ids must be in [0, {terms.inputs}), got {int(ids.min())} to {int(ids.max())}")
    return y


def _add(
    library: Library, y: torch.Tensor, inputs: torch.Tensor, tokens: int, slots: torch.Tensor, terms: LoraTerms
) -> int:
    if y.dtype != torch.float32 or not y.is_contiguous() or y.shape[-1] != terms.width:
        raise ValueError(f"results are contiguous float32 [..., {terms.width}], got {y.dtype} {list(y.shape)}")
    if (
        slots.dtype != torch.int64
        or slots.dim() != 1
        or not len(slots) * terms.width == y.numel() == tokens * terms.width
    ):
        raise ValueError(f"{list(y.shape)} results of {tokens} tokens need one slot each, got {list(slots.shape)}")
    arrays = terms.derived(_Arrays)
    x, ids = (0, inputs.data_ptr()) if terms.is_lookup else (inputs.data_ptr(), 0)
    result = library.call(
        _LORA,
        *(arrays.down.address, arrays.up.address, len(terms.terms), arrays.places.data_ptr()),
        *(arrays.scales.data_ptr(), slots.contiguous().data_ptr(), tokens, x, ids, y.data_ptr(), terms.width),
        torch.get_num_threads(),
    )
    if library.recorder is not None:
        library.recorder.kept.append(terms)
    return result
