"""What adapters add to a layer's result, in one call; `kernels/reference/lora.py` defines it."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.packed import WeightArray, panels
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.weight import LoraTerms

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
