"""Drafts and the operations that keep a state: it is stored without them, and then sees those that are accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import normal
from test_kernels_gated_delta import Inputs
from test_kernels_scan import mamba, mamba2

from llm.forward import RecurrentMetadata
from llm.kernels.backend import Operations
from llm.kernels.reference.backend import REFERENCE

pytestmark = pytest.mark.usefixtures("one_core")

BACKENDS = ["reference", *(pytest.param(isa, marks=needs_compiler) for isa in ISAS)]
Run = Callable[[Operations, slice, torch.Tensor, RecurrentMetadata], torch.Tensor]
# Slot, tokens before the step, known tokens, drafts, accepted drafts.
ROWS = [(3, 4, 1, 4, 0), (0, 2, 1, 0, 0), (4, 0, 2, 2, 2), (1, 9, 1, 5, 3), (2, 1, 3, 0, 0)]


def convolution(ops: Operations, tokens: slice, state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
    return ops.causal_conv1d(normal(1, 30, 40)[tokens], normal(2, 40, 4), None, state, metadata, "silu")


def delta_rule(ops: Operations, tokens: slice, state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
    inputs = Inputs((1, 2, 5, 40), tokens=30)
    return ops.gated_delta_rule(*(item[tokens] for item in inputs.of_tokens), *inputs.of_heads, state, metadata)


def scan(name: str) -> Run:
    case = mamba(70, 5) if name == "selective_scan" else mamba2(2, 21, 7)

    def run(ops: Operations, tokens: slice, state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
        parts = {name: tensor[tokens] for name, tensor in case.tokens.items()}
        return getattr(ops, name)(**parts, **case.constants, state=state, metadata=metadata)

    return run


OPERATIONS: dict[str, tuple[Run, tuple[int, ...]]] = {
    "causal_conv1d": (convolution, (40, 3)),
    "gated_delta_rule": (delta_rule, (2, 5, 40)),
    "selective_scan": (scan("selective_scan"), (5, 70)),
    "mamba2_scan": (scan("mamba2_scan"), (2, 7, 21)),
}


def without_drafts(run: Run, ops: Operations, state: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """The first `counts` of the tokens of `ROWS`, each row by itself."""
    found, first = [], 0
    for (slot, before, known, drafts, _), count in zip(ROWS, counts, strict=True):
        found.append(run(ops, slice(first, first + count), state, RecurrentMetadata.of_rows((slot, before, count))))
        first += known + drafts
    return found


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_sees_known_tokens_and_then_accepted_drafts(backend: str, name: str) -> None:
    ops = REFERENCE.ops if backend == "reference" else kernel_set(backend).ops
    run, shape = OPERATIONS[name]
    start = normal(7, 5, *shape)
    metadata = RecurrentMetadata.of_rows(*((slot, before, known + drafts) for slot, before, known, drafts, _ in ROWS))
    metadata.stored = torch.tensor([row[2] for row in ROWS], dtype=torch.int32)
    accepted = torch.tensor([row[4] for row in ROWS], dtype=torch.int32)

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-4, atol=1e-5) if ops is REFERENCE.ops else torch.equal(one, other)

    state, expected = start.clone(), start.clone()
    out = metadata.run(lambda of: run(ops, slice(0, 19), state, of))
    assert same(out, torch.cat(without_drafts(run, ops, start.clone(), [row[2] + row[3] for row in ROWS])))
    without_drafts(run, ops, expected, metadata.stored.tolist())
    assert same(state, expected)
    metadata.store_accepted(accepted.numpy(), torch.from_numpy)
    assert not same(state, expected)
    expected = start.clone()
    without_drafts(run, ops, expected, (metadata.stored + accepted).tolist())
    assert same(state, expected)


@needs_compiler
def test_counts_that_do_not_fit_are_refused() -> None:
    ops, (run, shape) = kernel_set(ISAS[0]).ops, OPERATIONS["causal_conv1d"]
    state = torch.zeros(2, *shape)
    for counts, stored in (([3], [4]), ([3], [-1]), ([31], [3]), ([-1], [0])):
        metadata = RecurrentMetadata.of_rows((1, 0, 3))
        metadata.counts, metadata.stored = (torch.tensor(item, dtype=torch.int32) for item in (counts, stored))
        with pytest.raises(IndexError, match="row 0 is out of range"):
            run(ops, slice(0, 30), state, metadata)
    metadata.counts = torch.tensor([1, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="1 rows have 2"):
        run(ops, slice(0, 30), state, metadata)
    assert not state.any()
