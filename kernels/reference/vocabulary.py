"""Operations over the vocabulary: softmax, maxima, ranks and draws, in plain PyTorch."""

from __future__ import annotations

import math

import numpy as np
import torch

# Tokens per block. torch finds the maxima of blocks several times as fast as the index of a row's maximum.
_BLOCK = 512
# Up to this many largest logits are searched for only in the blocks with the largest maxima.
_FEW = 32
# Bins per unit of logit, of the histogram that finds the cut of top_p.
_BINS = 64.0
# Bound on the relative error of a row's sum of float32 weights; the true error is far smaller.
_SUM_SLACK = 1e-4
# Ranks are computed for this many chosen tokens of a row at a time.
_RANKED_AT_ONCE = 16


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """float [n, vocab] -> float32 [n, vocab]: logits - log(sum of e^logits)."""
    return logits.float().log_softmax(dim=-1)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row, the lowest id if tied: float32 [n, vocab] -> (values float32 [n], ids int64 [n]).

    A NaN counts as the largest: the value is NaN if the row has one, and -inf if the row has only -inf.
    """
    vocab = logits.shape[1]
    if vocab < 4 * _BLOCK:
        ids = logits.argmax(dim=-1, keepdim=True)
    else:
        block = _block_amax(logits).argmax(dim=-1, keepdim=True)
        inside = (block * _BLOCK + torch.arange(_BLOCK, device=logits.device)).clamp_(max=vocab - 1)
        ids = inside.gather(1, logits.gather(1, inside).argmax(dim=-1, keepdim=True))
    return logits.gather(1, ids).squeeze(1), ids.squeeze(1)


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits of each row, descending: float32 [n, vocab] -> (values [n, k], ids int64 [n, k]).

    Ties go to the lower ids; a NaN is larger than anything. 1 <= k <= vocab.

    `torch.topk` breaks ties arbitrarily, and differently for different widths. So its ids are sorted, and a row with
    a possible tie at the k-th value is sorted whole.
    """
    vocab = logits.shape[1]
    if not 1 <= k <= vocab:
        raise ValueError(f"k must be from 1 to {vocab}, got {k}")
    if k == vocab or logits.device.type != "cpu":  # without a question that the host would have to wait for
        return _sorted(logits, k)
    ids = _some_largest(logits, k + 1).sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    edge, beyond = values[:, k - 1], values[:, k]
    barred = edge == -math.inf
    tied = ((edge == beyond) | edge.isnan()) & ~barred
    values, ids = values[:, :k].contiguous(), ids[:, :k].contiguous()
    for line in barred.nonzero().flatten().tolist():
        count = int((values[line] != -math.inf).sum())
        ids[line, count:] = (logits[line] == -math.inf).nonzero().flatten()[: k - count]
    if tied.any():
        values[tied], ids[tied] = _sorted(logits[tied], k)
    return values, ids


def gather_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, ranked: int, normalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of chosen tokens, and the ranks of the first `ranked` of them.

    Args:
        logits: float32 [n, vocab].
        ids: int64 [n, m], in [0, vocab).
        normalise: False: the logits themselves in place of their log-softmax.

    Returns:
        float32 [n, m] and int64 [n, ranked]; a rank is how many values of the row are at least as large.
    """
    values = log_softmax(logits) if normalise else logits
    chosen = values.gather(1, ids)
    if logits.device.type != "cpu":
        counts = [(values >= chosen[:, place, None]).sum(dim=-1) for place in range(ranked)]
        return chosen, torch.stack(counts, dim=1)
    ranks = np.empty((len(ids), ranked), dtype=np.int64)
    for start in range(0, ranked, _RANKED_AT_ONCE):
        for line, own in enumerate(chosen[:, start : min(ranked, start + _RANKED_AT_ONCE)]):
            larger = (values[line] >= own.unsqueeze(1)).cpu().numpy()
            # NumPy counts a boolean mask several times as fast as torch sums it.
            ranks[line, start : start + len(own)] = [np.count_nonzero(mask) for mask in larger]
    return chosen, torch.from_numpy(ranks).to(logits.device)


def block_sums(logits: torch.Tensor, largest: torch.Tensor, block: int) -> torch.Tensor:
    """Sums of e^(logits - largest) over blocks of each row: float32 [n, vocab], [n] -> [n, ceil(vocab / block)].

    `block` is a multiple of 16; if it does not divide vocab, the last block is shorter. A term below e^-87 may be 0.
    """
    weights = (logits - largest.unsqueeze(1)).exp_()
    whole = weights.shape[1] // block * block
    sums = [weights[:, :whole].unflatten(1, (-1, block)).sum(dim=-1)] if whole else []
    if whole < weights.shape[1]:
        sums.append(weights[:, whole:].sum(dim=-1, keepdim=True))
    return torch.cat(sums, dim=1)


def draw_nucleus(
    logits: torch.Tensor, largest: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-p sampling: draw from the smallest set of most likely tokens whose mass is top_p of the row's.

    A token's mass is e^(logit - largest); ties go to the lower ids. The kept tokens are walked in order of id, and the
    first whose cumulative mass exceeds `uniform` times their total is drawn.

    Args:
        logits: float32 [n, vocab], without NaN and inf, each row with one above -inf.
        largest: float32 [n], the largest logit of each row.
        top_p: float64 [n], in (0, 1].  uniform: float64 [n], in [0, 1). float32 where a device has no float64.

    Returns:
        int64 [n], the tokens drawn; int64 [n], the last token kept in each row, in descending order of logits.
    """
    weights = (logits - largest.unsqueeze(1)).exp_()
    if logits.device.type != "cpu":
        return _draw_sorted(logits, weights.to(uniform.dtype), top_p, uniform)
    masses = np.cumsum(block_sums(logits, largest, _BLOCK).cpu().numpy().astype(np.float64), axis=1)[:, -1]
    tokens, edges = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.int64)
    for line, (share, number) in enumerate(zip(top_p.tolist(), uniform.tolist(), strict=True)):
        values, own = logits[line].cpu().numpy(), weights[line].cpu().numpy()
        ids = _nucleus(values, own, share, float(masses[line]))
        cumulative = np.cumsum(own[ids], dtype=np.float64)
        # Rounding can put the target past the last token.
        picked = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
        tokens[line] = ids[min(picked, len(ids) - 1)]
        edges[line] = ids[values[ids] == values[ids].min()][-1]
    return torch.from_numpy(tokens).to(logits.device), torch.from_numpy(edges).to(logits.device)


def cut_below_largest(logits: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Set logits below the row's largest + offset to -inf, in place: float32 [n, vocab], [n] -> `logits`.

    An offset of -inf leaves its row unchanged.
    """
    bound = torch.where(offset == -math.inf, -math.inf, logits.amax(dim=-1) + offset)
    return logits.masked_fill_(logits < bound.unsqueeze(1), -math.inf)


def divide_rows(logits: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Divide each row, in place: float32 [n, vocab], [n] -> `logits`."""
    return logits.div_(divisor.unsqueeze(1))


def _draw_sorted(
    logits: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_nucleus` by a sort, without reading a number of it on the host."""
    _, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = weights.gather(1, order)
    before = ordered.cumsum(dim=-1) - ordered
    kept = before < top_p[:, None] * ordered.sum(dim=-1, keepdim=True)
    kept[:, 0] = True
    edges = order.gather(1, kept.sum(dim=-1, keepdim=True) - 1).squeeze(1)
    mass = torch.zeros_like(weights).scatter_(1, order, torch.where(kept, ordered, 0.0))
    return draw_in_order(mass, uniform), edges


def draw_in_order(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first column at which the sum of `mass` float64 [n, m] exceeds `uniform` float64 [n] times its total; int64
    [n]. Columns without mass are never drawn."""
    cumulative = mass.cumsum(dim=-1)
    picked = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(dim=-1)
    # Rounding can put the target past the last column with mass.
    columns = torch.arange(mass.shape[1], device=mass.device)
    last = torch.where(mass > 0, columns, 0).amax(dim=-1)
    return torch.minimum(picked, last)


def _nucleus(values: np.ndarray, weights: np.ndarray, top_p: float, mass: float) -> np.ndarray:
    """Ids of the smallest set with top_p of `mass`: values and weights [vocab] -> ids, ascending.

    Tokens lighter than (1 - top_p) / vocab of the mass have less than 1 - top_p of it together, so none is needed. A
    histogram of the rest finds the bin of the cut, and only that bin is sorted.
    """
    lightest = (1.0 - top_p) * (1.0 - _SUM_SLACK) * mass / len(weights)
    candidates = np.flatnonzero(weights >= lightest if lightest > 0.0 else weights > 0.0)
    own = weights[candidates].astype(np.float64)
    values = values[candidates]
    bins = ((values.max() - values) * _BINS).astype(np.int64)
    by_bin = np.bincount(bins, weights=own)
    before = np.cumsum(by_bin) - by_bin
    cut = int(np.flatnonzero((before < top_p * mass) & (by_bin > 0))[-1])
    around = np.flatnonzero(bins == cut)
    around = around[np.argsort(-values[around], kind="stable")]
    cumulative = before[cut] + np.cumsum(own[around])
    inside = around[cumulative - own[around] < top_p * mass]
    kept = bins < cut
    kept[inside if len(inside) else around[:1]] = True
    return candidates[kept]


def _sorted(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def _some_largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest logits of each row [n, count], unsorted, ties broken arbitrarily."""
    vocab = logits.shape[1]
    blocks = vocab // _BLOCK
    if count > _FEW or blocks < 4 * count:
        return torch.topk(logits, count, dim=-1).indices
    whole = blocks * _BLOCK
    chosen = logits[:, :whole].unflatten(1, (blocks, _BLOCK)).amax(dim=-1).topk(count, dim=-1).indices
    ids = (chosen.unsqueeze(2) * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    ids = torch.cat((ids, torch.arange(whole, vocab, device=logits.device).expand(len(logits), -1)), dim=1)
    return ids.gather(1, torch.topk(logits.gather(1, ids), count, dim=-1).indices)


def _block_amax(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each block [n, blocks]; the last block may be shorter."""
    whole = logits.shape[1] // _BLOCK * _BLOCK
    parts = []
    if whole:
        parts.append(logits[:, :whole].unflatten(1, (-1, _BLOCK)).amax(dim=-1))
    if whole < logits.shape[1]:
        parts.append(logits[:, whole:].amax(dim=-1, keepdim=True))
    return torch.cat(parts, dim=1)
