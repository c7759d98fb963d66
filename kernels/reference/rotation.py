"""Rotating rows in blocks by a Hadamard matrix, so that no single channel is far larger than the others.

Quantizing a row by its largest value leaves few of 256 steps to all others where one channel is an outlier. A rotation
spreads each value over its block: y = (x H)(W H)^T = x W^T, as H is orthogonal (QuaRot, arXiv:2404.00456).
"""

from __future__ import annotations

import math

import torch

# Blocks that the kernels rotate: from one vector of lanes to all of their registers.
LEAST_BLOCK, LARGEST_BLOCK = 16, 256


def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """x H for each run of `block` columns, H = Sylvester's Hadamard matrix / sqrt(block); float32, shapes [..., K].

    H is symmetric and its own inverse: rotating twice gives x but for rounding. Sums and differences of pairs, first of
    values 16, 32, ... apart, then 1, 2, 4 and 8 apart; each is rounded, and at last the product with 1 / sqrt(block).
    """
    out = x.float().reshape(-1, block)
    apart = LEAST_BLOCK
    for stride in [*_doubled(LEAST_BLOCK, block), *_doubled(1, min(apart, block))]:
        pairs = out.view(len(out), -1, 2, stride)
        out = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
    return out.reshape(x.shape) * (1 / math.sqrt(block))


def hadamard(block: int) -> torch.Tensor:
    """H of `rotate`, float32 [block, block]."""
    return rotate(torch.eye(block), block)


def check_block(block: int, columns: int) -> None:
    """ValueError for blocks that the kernels do not rotate."""
    if block & (block - 1) or not LEAST_BLOCK <= block <= LARGEST_BLOCK or columns % block:
        raise ValueError(
            f"columns are rotated in blocks of a power of two from {LEAST_BLOCK} to {LARGEST_BLOCK} that divides their "
            f"number, {columns}; got {block}"
        )


def block_for(columns: int) -> int:
    """The largest block that divides `columns`; 0: none."""
    block = math.gcd(columns, LARGEST_BLOCK)
    return block if block >= LEAST_BLOCK else 0


def _doubled(start: int, end: int) -> list[int]:
    return [start << shift for shift in range((max(start, end) // start).bit_length() - 1)]
