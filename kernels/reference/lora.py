"""What adapters add to a layer's result, in plain PyTorch: a loop over the terms."""

from __future__ import annotations

import torch

from llm.kernels.reference.linear import embedding, linear
from llm.kernels.weight import LoraTerm, LoraTerms


def lora(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, terms: LoraTerms) -> torch.Tensor:
    """y[t] += scale * up(down(x[t])) for each term and the tokens in its slot; returns y, which is changed.

    The product with `up`, its bias included, is multiplied by the scale, and then added: each is rounded by itself.

    Shapes: y float32 [..., width], x float32 [..., K], slots int64 [tokens], 0: no adapter.
    """
    rows, flat = y.view(-1, terms.width), x.reshape(-1, terms.inputs)
    check_slots(rows, flat, slots)
    for term in terms.terms:
        tokens = tokens_of(slots, term.slot)
        products = linear(linear(flat[tokens], term.down), term.up)
        add_products(rows, slots, term, tokens, products)
    return y


def lora_embedding(y: torch.Tensor, token_ids: torch.Tensor, slots: torch.Tensor, terms: LoraTerms) -> torch.Tensor:
    """The same where down(x) is the row of `down` of each token's id: token_ids int64 [...].

    Raises:
        IndexError: an id that `down` does not have.
    """
    rows, ids = y.view(-1, terms.width), token_ids.flatten()
    check_slots(rows, ids, slots)
    if len(ids) and ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < terms.inputs:
        raise IndexError(f"token ids must be in [0, {terms.inputs}), got {int(ids.min())} to {int(ids.max())}")
    for term in terms.terms:
        tokens = tokens_of(slots, term.slot)
        products = linear(embedding(ids[tokens], term.down), term.up)
        add_products(rows, slots, term, tokens, products)
    return y


def tokens_of(slots: torch.Tensor, slot: int) -> torch.Tensor | slice:
    """Those of a slot; on a device, whose answer the host would have to wait for, all of them."""
    return (slots == slot).nonzero(as_tuple=True)[0] if slots.device.type == "cpu" else slice(None)


def add_products(
    rows: torch.Tensor, slots: torch.Tensor, term: LoraTerm, tokens: torch.Tensor | slice, products: torch.Tensor
) -> None:
    """Add the products of these tokens to those of them that are in the term's slot."""
    added = products * term.scale
    if isinstance(tokens, slice):
        added = torch.where((slots == term.slot)[:, None], added, 0)
    rows[tokens, term.first : term.first + term.up.n] += added.to(rows.dtype)


def check_slots(rows: torch.Tensor, inputs: torch.Tensor, slots: torch.Tensor) -> None:
    if slots.dtype != torch.int64 or slots.dim() != 1 or not len(slots) == len(rows) == len(inputs):
        raise ValueError(f"{len(rows)} results of {len(inputs)} tokens need one slot each, got {list(slots.shape)}")
