"""Operations over the vocabulary: one program walks a row in blocks, whatever other rows there are."""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from llm.kernels.reference import vocabulary as definition
from llm.kernels.triton.launch import INTERPRETED, launch, power_of_two, side_by_side

# Tokens that a program takes at a time.
_BLOCK = 256 if INTERPRETED else 4096


@triton.jit
def _order(value):
    """float32 as int32 of the same order; NaN is the largest, and both zeros are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def find_largest(logits, values, ids, vocab, stride, BLOCK: tl.constexpr):
    """The largest of a row, and the lowest id of its equals."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -2147483648, tl.int32)
    where = tl.zeros((BLOCK,), tl.int32) + vocab
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        order = _order(tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32))
        is_better = (at < vocab) & ((order > best) | (where == vocab))
        best = tl.where(is_better, order, best)
        where = tl.where(is_better, at, where)
    found = tl.min(tl.where(best == tl.max(best, axis=0), where, vocab), axis=0)
    tl.store(ids + row, found.to(tl.int64))
    tl.store(values + row, tl.load(logits + row * stride + found))


@triton.jit
def normaliser(logits, out, vocab, stride, BLOCK: tl.constexpr):
    """(the largest logit, log(sum of e^(logit - largest))) of a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        largest = tl.maximum(largest, tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")))
    most = tl.max(largest, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        total += tl.exp(tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")) - most)
    tl.store(out + 2 * row, most)
    tl.store(out + 2 * row + 1, tl.log(tl.sum(total, axis=0)))


@triton.jit
def normalise(logits, stats, out, vocab, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + at, mask=at < vocab, other=0.0)
    value = (value - tl.load(stats + 2 * row)) - tl.load(stats + 2 * row + 1)
    tl.store(out + row * vocab + at, value, mask=at < vocab)


@triton.jit
def chosen_values(logits, stats, ids, values, ranks, vocab, stride, count, ranked, BLOCK: tl.constexpr):
    """One chosen token of a row: its value, and how many of the row are at least as large."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    most = 0.0
    log_sum = 0.0
    if stats is not None:
        most = tl.load(stats + 2 * row)
        log_sum = tl.load(stats + 2 * row + 1)
    own = (tl.load(logits + row * stride + tl.load(ids + row * count + place)) - most) - log_sum
    tl.store(values + row * count + place, own)
    if place < ranked:
        larger = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = (tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")) - most) - log_sum
            larger += ((value >= own) & (at < vocab)).to(tl.int32)
        tl.store(ranks + row * ranked + place, tl.sum(larger, axis=0).to(tl.int64))


@triton.jit
def sum_blocks(logits, largest, out, vocab, stride, size, BLOCK: tl.constexpr):
    """The sum of e^(logit - largest) over one block of a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    at = tl.program_id(1) * size + lanes
    inside = (lanes < size) & (at < vocab)
    value = tl.exp(tl.load(logits + row * stride + at, mask=inside, other=float("-inf")) - tl.load(largest + row))
    tl.store(out + row * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.where(inside, value, 0.0), axis=0))


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels/reference/vocabulary.py`."""
    logits = side_by_side(logits)
    values = torch.empty(len(logits), dtype=logits.dtype, device=logits.device)
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    launch(
        find_largest, (len(logits),), logits, values, ids, logits.shape[1], logits.stride(0), BLOCK=_BLOCK,
        device=logits.device, num_warps=8,
    )  # fmt: skip
    return values, ids


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """See `kernels/reference/vocabulary.py`."""
    logits = side_by_side(logits.float())
    out, vocab = torch.empty(logits.shape, dtype=torch.float32, device=logits.device), logits.shape[1]
    launch(
        normalise, (len(logits), -(-vocab // _BLOCK)), logits, _normaliser(logits), out, vocab, logits.stride(0),
        BLOCK=_BLOCK, device=logits.device, num_warps=8,
    )  # fmt: skip
    return out


def gather_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, ranked: int, normalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels/reference/vocabulary.py`."""
    logits, ids = side_by_side(logits), ids.contiguous()
    rows, count = ids.shape
    values = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, ranked, dtype=torch.int64, device=logits.device)
    launch(
        chosen_values, (rows, count), logits, _normaliser(logits) if normalise else None, ids, values, ranks,
        logits.shape[1], logits.stride(0), count, ranked, BLOCK=_BLOCK, device=logits.device, num_warps=8,
    )  # fmt: skip
    return values, ranks


def block_sums(logits: torch.Tensor, largest: torch.Tensor, block: int) -> torch.Tensor:
    """See `kernels/reference/vocabulary.py`."""
    logits, vocab = side_by_side(logits), logits.shape[1]
    out = torch.empty(len(logits), -(-vocab // block), dtype=torch.float32, device=logits.device)
    launch(
        sum_blocks, tuple(out.shape), logits, largest.contiguous(), out, vocab, logits.stride(0), block,
        BLOCK=power_of_two(block), device=logits.device, num_warps=4,
    )  # fmt: skip
    return out


def draw_nucleus(
    logits: torch.Tensor, largest: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels/reference/vocabulary.py`, which computes it on the CPU, a row by itself: the CPU's draws."""
    device = logits.device
    rows = zip(*(item.cpu().split(1) for item in (logits, largest, top_p, uniform)), strict=True)
    drawn = [definition.draw_nucleus(*row) for row in rows]
    tokens, edges = (torch.cat(parts).to(device) for parts in zip(*drawn, strict=True))
    return tokens, edges


def _normaliser(logits: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device)
    launch(
        normaliser, (len(logits),), logits, out, logits.shape[1], logits.stride(0), BLOCK=_BLOCK, device=logits.device,
        num_warps=8,
    )  # fmt: skip
    return out
