"""Quantizing float weights to integers with a scale per row and group of columns, in plain PyTorch.

Owns the definition; `kernels/cpu` gives the same bits. Sums have an order of their own, because the scale of 4 bits
depends on them, and PyTorch's depends on the processor.
"""

from __future__ import annotations

import torch

from llm.kernels.reference.rotation import rotate

NOT_FINITE = "holds NaN or infinite values and cannot be quantized"
# Scales tried for a group, as fractions of the scale that clips nothing. Clipping the largest weights a little costs
# less than a coarser grid for all others, the more so the larger the group.
CLIP_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
# A weight is quantized this many elements at a time, so that temporaries stay in the cache.
CHUNK_ELEMENTS = 1 << 16
# Of the order of sums: sums side by side, those added at once, and how many stripes are summed before their sums are.
_STRIPE, _VECTOR, _RUN, _LEVELS = 32, 8, 16, 4


def quantize_weight(
    weight: torch.Tensor,
    bits: int,
    group_size: int,
    search: bool,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    rotation: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """A float weight [N, K] -> (q int8 [N, K], scale float32 [N, K / group_size], sum of W^2, sum of (W - q scale)^2).

    Rounds to nearest with scale = max|w| / (2**(bits - 1) - 1), 1 for a group of zeros. `search` tries several smaller
    scales per group, refits each by least squares to the integers it gives, rounds it to bfloat16, and keeps the scale
    with the least squared error. `out` is written to, and returned, as q and scale. `rotation`: the rows are rotated in
    blocks of so many columns first (`rotation.rotate`), and so is the weight that q and scale stand for.

    Raises:
        ValueError: a weight is not finite.
    """
    rows, columns = weight.shape
    q, scale = out or (
        weight.new_empty(rows, columns, dtype=torch.int8),
        weight.new_empty(rows, columns // group_size, dtype=torch.float32),
    )
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    signal = noise = 0.0
    for start in range(0, rows, step):
        part = weight[start : start + step].float().contiguous()
        if rotation:
            part = rotate(part, rotation)
        part = part.view(-1, columns // group_size, group_size)
        part_q, part_scale = quantize_groups(part, bits, CLIP_SHARES if search else (1.0,))
        q[start : start + step] = part_q.view(-1, columns)
        scale[start : start + step] = part_scale
        signal += float(part.square().sum())
        noise += float(torch.addcmul(part, part_q.float(), part_scale[..., None], value=-1).square_().sum())
    return q, scale, signal, noise


def quantize_groups(
    x: torch.Tensor, bits: int, shares: tuple[float, ...], importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [R, G, size] -> (q int8 of the same shape, scale [R, G]). Errors are weighted by `importance`."""
    high = 2 ** (bits - 1) - 1
    largest = largest_of(x)
    full = torch.where(largest == 0, torch.ones_like(largest), largest / high)
    if len(shares) == 1:
        return torch.round(x / full).clamp_(-high, high).to(torch.int8), full[..., 0]
    best_error = torch.full_like(full, torch.inf)
    best_q, best_scale = torch.zeros_like(x), full.clone()
    for share in shares:
        q = torch.round(x / (full * share)).clamp_(-high - 1, high)
        weighted = q if importance is None else q * importance
        norm = ordered_sum(weighted * q)
        # 16 bits: beside 4 bits for each of 32 weights, 32 would be a fifth of all that a token reads.
        scale = torch.where(norm > 0, ordered_sum(weighted * x) / norm, full).bfloat16().float()
        error = torch.addcmul(x, q, scale, value=-1).square_()
        error = ordered_sum(error if importance is None else error * importance)
        better = (error < best_error) & (scale > 0)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_q = torch.where(better, q, best_q)
    return best_q.to(torch.int8), best_scale[..., 0]


def largest_of(groups: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each group, [..., 1]. Raises ValueError: a value is not finite."""
    largest = groups.abs().amax(dim=-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError(NOT_FINITE)
    return largest


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """The sums over the last dimension, which stays with size 1, in one order on every processor.

    That is the order of PyTorch's own sums with vectors of 8: 32 sums side by side, from stripes of 32. Runs of 16
    stripes are summed by themselves, and runs of 16 such sums again. Then the 32 are added as vectors of 8, after the
    vectors that fill no stripe, and at last what fills no vector and the 8, one after the other.
    """
    stripes = x.shape[-1] // _STRIPE
    levels = [x.new_zeros(*x.shape[:-1], _STRIPE) for _ in range(_LEVELS)]
    for count in range(1, stripes + 1):
        levels[0] = levels[0] + x[..., (count - 1) * _STRIPE : count * _STRIPE]
        size = _RUN
        for level in range(1, _LEVELS):
            if count % size:
                break
            levels[level] = levels[level] + levels[level - 1]
            levels[level - 1] = torch.zeros_like(levels[0])
            size *= _RUN
    first, *others = (levels[0] + levels[1] + levels[2] + levels[3]).split(_VECTOR, dim=-1)
    rest = x[..., stripes * _STRIPE :]
    vectors = rest.shape[-1] // _VECTOR
    for vector in [*rest[..., : vectors * _VECTOR].split(_VECTOR, dim=-1), *others]:
        if vector.shape[-1]:
            first = first + vector
    total = torch.zeros_like(first[..., :1])
    for value in [*rest[..., vectors * _VECTOR :].split(1, dim=-1), *first.split(1, dim=-1)]:
        if value.shape[-1]:
            total = total + value
    return total
