"""Random draws by inverting the cumulative distribution.

The token of a logit row depends on that row alone, bit for bit: every sum runs in one order, over blocks of fixed width
or over the row's own candidates.

A draw is a pure function of (logits, parameters, one uniform number).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE
from llm.kernels.reference.vocabulary import draw_in_order
from llm.sampling.logprobs import select_logit_rows

# Tokens of the vocabulary that are summed as one block.
_BLOCK = 512
# Up to this top_k the top tokens are selected for all logit rows at once; above it, one by one.
_TOPK_LIMIT = 1024


@dataclass
class Draws:
    """`tokens` int64 [n]; `kept`: logit row -> the ids it drew among, for the `wanted` logit rows."""

    tokens: np.ndarray
    kept: dict[int, np.ndarray]


def draw_rows(
    logits: torch.Tensor,
    largest: torch.Tensor,
    top_k: np.ndarray,
    top_p: np.ndarray,
    uniform: np.ndarray,
    wanted: set[int],
    backend: Backend = REFERENCE,
) -> Draws:
    """Draw from softmax(logits) cut to the top_k likeliest tokens, then to the fewest of those whose mass is top_p.

    Ties are broken by the lower token id. Each kind of cut is a separate pass, so the arithmetic of a logit row does
    not depend on how others are cut.

    Args:
        logits: float32 [n, vocab], temperature applied; every logit row has a token above -inf and no NaN.
        largest: float32 [n], the largest logit of each logit row.
        top_k: int64 [n], 0 for all.  top_p: float64 [n].  uniform: float64 [n] in [0, 1).
        wanted: the logit rows whose `Draws.kept` is needed.
        backend: what computes it.
    """
    logits, largest = _without_infinity(logits, largest)
    vocab = logits.shape[1]
    cut_k = (top_k > 0) & (top_k < vocab)
    few = cut_k & (top_k <= _TOPK_LIMIT)
    many = cut_k & ~few
    nucleus = ~cut_k & (top_p < 1.0)
    draws = Draws(np.empty(len(top_k), dtype=np.int64), {})
    every = ~cut_k & ~nucleus
    for chosen, draw in ((few, _draw_few), (many, _draw_many), (nucleus, _draw_nucleus), (every, _draw_any)):
        logit_rows = np.flatnonzero(chosen)
        if not len(logit_rows):
            continue
        rows = _Rows(
            select_logit_rows(logits, logit_rows, backend),
            select_logit_rows(largest, logit_rows, backend),
            top_k[logit_rows],
            top_p[logit_rows],
            uniform[logit_rows],
        )
        keep = [index for index, logit_row in enumerate(logit_rows.tolist()) if logit_row in wanted]
        tokens, kept = draw(rows, keep, backend)
        draws.tokens[logit_rows] = tokens
        draws.kept.update({int(logit_rows[index]): ids for index, ids in kept.items()})
    return draws


@dataclass
class _Rows:
    """The arguments of `draw_rows` for some of its logit rows."""

    logits: torch.Tensor
    largest: torch.Tensor
    top_k: np.ndarray
    top_p: np.ndarray
    uniform: np.ndarray


Drawn = tuple[np.ndarray, dict[int, np.ndarray]]


def _draw_few(rows: _Rows, keep: list[int], backend: Backend) -> Drawn:
    """Logit rows with a small top_k: one selection for all of them."""
    likeliest, all_ids = backend.ops.top_k(rows.logits, int(rows.top_k.max()))
    values, ids = likeliest.cpu().numpy(), all_ids.cpu().numpy()
    weights = np.exp((values - values[:, :1]).astype(np.float64))
    weights[np.arange(weights.shape[1]) >= rows.top_k[:, None]] = 0.0
    cumulative = np.cumsum(weights, axis=1)
    weights[cumulative - weights >= rows.top_p[:, None] * cumulative[:, -1:]] = 0.0
    cumulative = np.cumsum(weights, axis=1)
    picked = (cumulative <= rows.uniform[:, None] * cumulative[:, -1:]).sum(axis=1)
    # Rounding can put the target past the end: take the last token with any weight.
    picked = np.minimum(picked, (weights > 0).sum(axis=1) - 1)
    tokens = np.take_along_axis(ids, picked[:, None], axis=1)[:, 0]
    return tokens, {index: ids[index][weights[index] > 0] for index in keep}


def _draw_many(rows: _Rows, keep: list[int], backend: Backend) -> Drawn:
    """Logit rows with a large top_k, one by one; candidates are in order of id."""
    weights = (rows.logits - rows.largest.unsqueeze(1)).exp_()
    tokens = np.empty(len(weights), dtype=np.int64)
    kept = {}
    for logit_row in range(len(weights)):
        values, own = rows.logits[logit_row].cpu().numpy(), weights[logit_row].cpu().numpy()
        ids = _largest(values, own, int(rows.top_k[logit_row]), float(rows.top_p[logit_row]))
        cumulative = np.cumsum(own[ids], dtype=np.float64)
        picked = int(np.searchsorted(cumulative, rows.uniform[logit_row] * cumulative[-1], side="right"))
        tokens[logit_row] = ids[min(picked, len(ids) - 1)]
        if logit_row in keep:
            kept[logit_row] = ids
    return tokens, kept


def _largest(values: np.ndarray, weights: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Ids of the `top_k` likeliest, cut to top_p of their mass: values and weights [vocab] -> increasing ids."""
    ids = np.flatnonzero(weights > 0.0)
    if len(ids) > top_k:  # sorting these alone takes a fraction of sorting the vocabulary
        found = values[ids]
        least = np.partition(found, len(ids) - top_k)[len(ids) - top_k]
        above = ids[found > least]
        ids = np.concatenate((above, ids[found == least][: top_k - len(above)]))
    ids = ids[np.argsort(-values[ids], kind="stable")]
    own = weights[ids].astype(np.float64)
    cumulative = np.cumsum(own)
    return np.sort(ids[: max(1, int((cumulative - own < top_p * cumulative[-1]).sum()))])


def _draw_nucleus(rows: _Rows, keep: list[int], backend: Backend) -> Drawn:
    """Logit rows with top_p and no top_k: all at once."""
    numbers = (backend.upload(array) for array in (rows.top_p, rows.uniform))
    tokens, edges = (found.cpu().numpy() for found in backend.ops.draw_nucleus(rows.logits, rows.largest, *numbers))
    kept = {}
    for logit_row in keep:
        values, edge = rows.logits[logit_row].cpu().numpy(), edges[logit_row]
        equal = np.flatnonzero(values == values[edge])
        kept[logit_row] = np.sort(np.concatenate((np.flatnonzero(values > values[edge]), equal[equal <= edge])))
    return tokens, kept


def _draw_any(rows: _Rows, keep: list[int], backend: Backend) -> Drawn:
    """Logit rows without a cut: draw the block, then the token within it."""
    vocab = rows.logits.shape[1]
    by_block = _cumulative_blocks(rows, backend)
    target = rows.uniform * by_block[:, -1]
    last_block = np.diff(by_block, prepend=0.0).astype(bool).cumsum(axis=1).argmax(axis=1)
    block = np.minimum((by_block <= target[:, None]).sum(axis=1), last_block)
    before = np.where(block > 0, np.take_along_axis(by_block, np.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    ids = block[:, None] * _BLOCK + np.arange(_BLOCK)
    inside = torch.from_numpy(np.minimum(ids, vocab - 1)).to(rows.logits.device)
    own = np.exp((rows.logits.gather(1, inside) - rows.largest.unsqueeze(1)).cpu().numpy().astype(np.float64))
    own[ids >= vocab] = 0.0
    cumulative = np.cumsum(own, axis=1)
    picked = (cumulative <= (target - before)[:, None]).sum(axis=1)
    picked = np.minimum(picked, (own > 0).cumsum(axis=1).argmax(axis=1))
    tokens = np.take_along_axis(ids, picked[:, None], axis=1)[:, 0]
    return tokens, {index: np.arange(vocab) for index in keep}


def _cumulative_blocks(rows: _Rows, backend: Backend) -> np.ndarray:
    """Sums of e^(logits - largest) up to the end of each block: float64 [n, blocks]."""
    sums = backend.ops.block_sums(rows.logits, rows.largest, _BLOCK)
    return np.cumsum(sums.cpu().numpy().astype(np.float64), axis=1)


def _without_infinity(logits: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logit rows with +inf draw among those tokens alone: a logits processor forces a token that way."""
    infinite = largest == math.inf
    if not infinite.any():
        return logits, largest
    forced = torch.where(logits == math.inf, 0.0, -math.inf)
    return torch.where(infinite.unsqueeze(1), forced, logits), largest.masked_fill(infinite, 0.0)


def draw_on_device(
    logits: torch.Tensor,
    largest: torch.Tensor,
    top_k: np.ndarray,
    top_p: np.ndarray,
    uniform: np.ndarray,
    keeps: bool,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`draw_rows` on a device, which the host does not wait for: the same cuts, in the same order, of the same sums.

    Returns:
        int64 [n], the tokens; of a logit row without a token, or with a NaN, some id. bool [n, vocab], the ids that
        were drawn among; None unless `keeps`.
    """
    infinite = (largest == math.inf)[:, None]
    logits = torch.where(infinite, torch.where(logits == math.inf, 0.0, -math.inf), logits)
    largest = torch.where(infinite[:, 0], 0.0, largest)
    vocab = logits.shape[1]
    wide = np.float32 if logits.device.type == "mps" else np.float64  # which has no float64
    cut_k = (top_k > 0) & (top_k < vocab)
    kinds = cut_k, ~cut_k & (top_p < 1.0), ~cut_k & (top_p >= 1.0)
    tokens = torch.zeros_like(largest, dtype=torch.int64)
    kept = torch.zeros_like(logits, dtype=torch.bool) if keeps else None
    for logit_rows, draw in zip(map(np.flatnonzero, kinds), (_draw_top, _draw_share, _draw_all), strict=True):
        if not len(logit_rows):
            continue
        own, highest = (select_logit_rows(part, logit_rows, backend) for part in (logits, largest))
        shares, numbers = (backend.upload(part[logit_rows].astype(wide)) for part in (top_p, uniform))
        cut = _Cut(highest, backend.upload(top_k[logit_rows]), shares, numbers, int(top_k[logit_rows].max()))
        found, mask = draw(own, cut, backend)
        place = backend.upload(logit_rows)
        tokens.index_copy_(0, place, found)
        if kept is not None:
            kept.index_copy_(0, place, mask)
    return tokens, kept


class _Cut(NamedTuple):
    """How logit rows are drawn: their largest logits, cuts and uniform numbers, [n] each; `most`: the largest top_k."""

    largest: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor
    most: int


def _draw_top(logits: torch.Tensor, cut: _Cut, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Logit rows with a top_k. Up to `_TOPK_LIMIT` candidates are in order of likelihood, more in order of id."""
    top_k, top_p, uniform = cut.top_k, cut.top_p, cut.uniform
    values, ids = backend.ops.top_k(logits, cut.most)
    rank = torch.arange(cut.most, device=logits.device)
    weights = (values - values[:, :1]).to(uniform.dtype).exp()
    weights = torch.where(rank < top_k[:, None], weights, 0.0)
    cumulative = weights.cumsum(dim=-1)
    kept = (cumulative - weights < top_p[:, None] * cumulative[:, -1:]) & (weights > 0)
    weights = torch.where(kept, weights, 0.0)
    few = ids.gather(1, draw_in_order(weights, uniform)[:, None]).squeeze(1)
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, kept)
    if cut.most <= _TOPK_LIMIT:
        return few, mask
    mass = torch.zeros_like(logits, dtype=uniform.dtype).scatter_(1, ids, weights)
    return torch.where(top_k <= _TOPK_LIMIT, few, draw_in_order(mass, uniform)), mask


def _draw_share(logits: torch.Tensor, cut: _Cut, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Logit rows with top_p and no top_k."""
    tokens, edges = backend.ops.draw_nucleus(logits, cut.largest, cut.top_p, cut.uniform)
    edge = logits.gather(1, edges[:, None])
    before = torch.arange(logits.shape[1], device=logits.device) <= edges[:, None]
    return tokens, (logits > edge) | ((logits == edge) & before)


def _draw_all(logits: torch.Tensor, cut: _Cut, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Logit rows without a cut."""
    mass = (logits - cut.largest[:, None]).exp_().to(cut.uniform.dtype)
    return draw_in_order(mass, cut.uniform), torch.ones_like(logits, dtype=torch.bool)


# --- Random numbers. ---

_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., SC 2011): counters uint32 [n, 4] under keys uint32 [n, 2] -> uint32 [n, 4].

    A number is a pure function of key and counter: it cannot depend on the rest of the batch, and the user's global
    generators are not touched.
    """
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    k0, k1 = key.astype(np.uint64).T
    for _ in range(10):
        left, right = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniform(seeds: np.ndarray, sample_indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) with 53 random bits for each (seed uint64, sample index, position) [n]."""
    seeds = seeds.astype(np.uint64)
    key = np.stack((seeds & _LOW, seeds >> _SHIFT), axis=1)
    zeros = np.zeros(len(seeds), dtype=np.uint64)
    counter = np.stack((positions.astype(np.uint64), sample_indices.astype(np.uint64), zeros, zeros), axis=1)
    words = philox4x32(counter, key).astype(np.uint64)
    bits = ((words[:, 0] << _SHIFT) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) / float(1 << 53)
