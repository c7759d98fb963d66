"""Three short requests, in chunks and steps as the engine makes them, with which a skeleton is tried.

Owns the requests, the batches of the steps, and the comparison with transformers' own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from llm.forward import AttentionMetadata, ForwardBatch, LatentCacheSpec, RecurrentMetadata, RecurrentSpec, StateSpec
from llm.kernels.reference.backend import REFERENCE
from llm.models.transformers_backend.trace import Misfit

# Tokens of each request in each step.
_STEPS = ((7, 3, 0), (0, 1, 2), (5, 2, 1))
_BLOCK = 16
_TOLERANCE = 1e-3
Tensors = list[torch.Tensor]


def make_requests() -> Tensors:
    """Token ids int64 [N] of each request; the first few ids mean padding and the like, and some models skip them."""
    generator = torch.Generator().manual_seed(3)
    counts = [sum(step[row] for step in _STEPS) for row in range(len(_STEPS[0]))]
    return [torch.randint(5, 64, (count,), generator=generator) for count in counts]


def run_steps(
    requests: Tensors, specs: Sequence[StateSpec], compute: Callable[[ForwardBatch], torch.Tensor]
) -> Tensors:
    """The requests' hidden states [N, H], computed together in steps; `compute` gets each step's batch."""
    states = [_state(spec, len(requests) + 1) for spec in specs]
    done = [0] * len(requests)
    parts: list[Tensors] = [[] for _ in requests]
    for step in _STEPS:
        rows = [row for row, length in enumerate(step) if length]
        hidden = compute(_batch(requests, done, step, specs, states))
        for row, part in zip(rows, hidden.split([step[row] for row in rows]), strict=True):
            parts[row].append(part)
            done[row] += len(part)
    return [torch.cat(part) for part in parts]


def _state(spec: StateSpec, blocks: int) -> tuple[torch.Tensor, ...]:
    if isinstance(spec, RecurrentSpec):
        pairs = zip(spec.shapes, spec.dtypes, strict=True)
        return tuple(torch.zeros(blocks, *shape, dtype=dtype) for shape, dtype in pairs)
    if isinstance(spec, LatentCacheSpec):
        return (torch.zeros(spec.shape(blocks, _BLOCK)),)
    return tuple(torch.zeros(shape) for shape in REFERENCE.op("kv_cache_shapes")(spec, blocks, _BLOCK))


def _batch(
    requests: Tensors,
    done: Sequence[int],
    step: Sequence[int],
    specs: Sequence[StateSpec],
    states: list[tuple[torch.Tensor, ...]],
) -> ForwardBatch:
    """The next `step[row]` tokens of each request, of which row r has block and slot r + 1."""
    rows = [row for row, length in enumerate(step) if length]
    ranges = [torch.arange(done[row], done[row] + step[row]) for row in rows]
    lengths, ends = [step[row] for row in rows], [done[row] + step[row] for row in rows]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor(ends, dtype=torch.int32)
    paged = AttentionMetadata(
        torch.tensor([[row + 1] for row in rows], dtype=torch.int32),
        torch.cat([_BLOCK * (row + 1) + positions for row, positions in zip(rows, ranges, strict=True)]),
        starts,
        seq_lens,
        _BLOCK,
        lengths,
        ends,
    )
    slots = RecurrentMetadata(torch.tensor([row + 1 for row in rows]), starts, seq_lens, lengths, ends)
    # A kernel's plan is of one window: each state has its own metadata.
    metadata = [slots if isinstance(spec, RecurrentSpec) else replace(paged) for spec in specs]
    ids = torch.cat([requests[row][positions] for row, positions in zip(rows, ranges, strict=True)])
    return ForwardBatch(ids, torch.cat(ranges), metadata, states, torch.empty(0, dtype=torch.int64))


def compare(alone: Sequence[torch.Tensor], together: Sequence[torch.Tensor], name: str) -> None:
    for expected, found in zip(alone, together, strict=True):
        size, worst = expected.abs().max().item(), (expected - found).abs().max().item()
        if not worst <= _TOLERANCE * size:  # NaN is no equality
            raise Misfit(
                f"{name} does not compute each token from its own row: in a batch of several requests its hidden "
                f"states differ from transformers' own by {worst:.1e} of {size:.1e}"
            )
