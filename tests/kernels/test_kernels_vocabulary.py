"""The operations over the vocabulary: each against its definition, its twin and float64, and a row's result the same
alone, in company, at any place, on any number of threads and on any instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import ISAS, kernel_set, needs_compiler

from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_core")]
BEST = ISAS[-1]
# One, odd, around a vector, around four, around a block of sums, above the width that threads share a row from.
VOCABS = (1, 2, 15, 17, 63, 65, 130, 511, 513, 2049, 5001, 33_000, 70_001)
KINDS = ("random", "ties", "rising", "barred", "denormal", "extreme", "nan", "mostly nan", "all barred")
seeds = st.integers(0, 2**31)
rows_of_any_kind = {"seed": seeds, "vocab": st.sampled_from(VOCABS), "kind": st.sampled_from(KINDS)}


def logits_of(kind: str, seed: int, rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator) * 3
    chance = torch.rand(rows, vocab, generator=generator)
    if kind == "ties":
        x = x.round() * 0.0 if seed % 2 else x.round()  # -0 and 0 are equals
    elif kind == "rising":
        x = x.sort(dim=-1).values
    elif kind == "barred":
        x[chance < 0.9] = -math.inf
    elif kind == "denormal":
        x = x * 1e-42
    elif kind == "extreme":
        x = torch.where(chance < 0.3, torch.where(chance < 0.1, math.inf, 3.4e38), x)
    elif kind == "nan":
        x[chance < 2 / vocab] = math.nan
    elif kind == "mostly nan":
        x[chance < 0.7] = math.nan
    elif kind == "all barred":
        x[:] = -math.inf
    return x


def sorted_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sort(x, dim=-1, descending=True, stable=True)


def same(one: Any, other: Any) -> bool:
    """Equal bits, any NaN for any NaN."""
    if isinstance(one, tuple):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool(((one.view(torch.int32) == other.view(torch.int32)) | (one.isnan() & other.isnan())).all())


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal numbers (-0 is 0), NaN for NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def ids_for(x: torch.Tensor, count: int) -> torch.Tensor:
    """Ids that depend on the row alone."""
    return (torch.arange(count) * 7919 % x.shape[1]).expand(len(x), count)


def drawable(x: torch.Tensor) -> torch.Tensor:
    """Logits as `draw_nucleus` takes them: no NaN, no inf, a token above -inf."""
    x = torch.where(x.isnan() | (x == math.inf), 0.5, x)
    x[:, x.shape[1] // 2] = 1.0
    return x


def nucleus(kernels: Backend, x: torch.Tensor, top_p: float = 0.8, uniform: float = 0.4) -> Any:
    x = drawable(x)
    numbers = (torch.full((len(x),), number, dtype=torch.float64) for number in (top_p, uniform))
    return kernels.op("draw_nucleus")(x, x.amax(dim=-1), *numbers)


CALLS: dict[str, Callable[[Backend, torch.Tensor], Any]] = {
    "argmax": lambda kernels, x: kernels.op("argmax")(x),
    "top_k 1": lambda kernels, x: kernels.op("top_k")(x, 1),
    "top_k 40": lambda kernels, x: kernels.op("top_k")(x, min(40, x.shape[1])),
    "top_k 1024": lambda kernels, x: kernels.op("top_k")(x, min(1024, x.shape[1])),
    "gather_logprobs": lambda kernels, x: kernels.op("gather_logprobs")(x, ids_for(x, 11), 10),
    "gather of logits": lambda kernels, x: kernels.op("gather_logprobs")(x, ids_for(x, 3), 1, False),
    "block_sums": lambda kernels, x: kernels.op("block_sums")(x, x.amax(dim=-1), 512),
    "draw_nucleus": nucleus,
    "cut_below_largest": lambda kernels, x: kernels.op("cut_below_largest")(x.clone(), torch.full((len(x),), -2.0)),
    "divide_rows": lambda kernels, x: kernels.op("divide_rows")(x.clone(), torch.full((len(x),), 0.7)),
}
by_name = pytest.mark.parametrize("name", CALLS)


@pytest.mark.parametrize("kernels", [REFERENCE, *map(kernel_set, ISAS)], ids=["torch", *ISAS])
@settings(max_examples=40)
@given(**rows_of_any_kind, k=st.sampled_from([1, 2, 5, 50, 64, 1000, 1024]))
def test_the_largest_are_those_of_a_stable_sort(kernels: Backend, seed: int, vocab: int, kind: str, k: int) -> None:
    """Ties to the lowest id, a NaN before anything, -inf last."""
    x = logits_of(kind, seed, 2, vocab)
    values, ids = sorted_rows(x)
    k = min(k, vocab)
    found_values, found_ids = kernels.op("top_k")(x, k)
    assert torch.equal(found_ids, ids[:, :k]) and equal(found_values, values[:, :k])
    best, best_ids = kernels.op("argmax")(x)
    assert torch.equal(best_ids, ids[:, 0]) and equal(best, values[:, 0])
    # What the sampler reads of it: no token is left, or one is NaN.
    assert torch.equal(best == -math.inf, (x == -math.inf).all(-1)) and torch.equal(best.isnan(), x.isnan().any(-1))


@settings(max_examples=60)
@given(**rows_of_any_kind)
def test_what_is_gathered_is_of_the_whole_log_softmax(seed: int, vocab: int, kind: str) -> None:
    """Bit for bit, and the ranks count in it; against float64 within rounding."""
    x = logits_of(kind, seed, 2, vocab)
    ids = torch.randint(vocab, (2, 10), generator=torch.Generator().manual_seed(seed))
    for kernels in (kernel_set(BEST), REFERENCE):
        for normalise in (True, False):
            whole = kernels.op("log_softmax")(x) if normalise else x
            values, ranks = kernels.op("gather_logprobs")(x, ids, 9, normalise)
            chosen = whole.gather(1, ids)
            assert same(values, chosen)
            assert torch.equal(ranks, (whole.unsqueeze(1) >= chosen[:, :9].unsqueeze(2)).sum(-1))
    exact = x.double().log_softmax(-1).gather(1, ids)
    values, _ = kernel_set(BEST).op("gather_logprobs")(x, ids, 0)
    if kind == "extreme":  # float64 holds what float32 gives as -inf
        values, exact = values.nan_to_num(0.0), exact.float().nan_to_num(0.0).double()
    torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=4e-6, equal_nan=True)


@settings(max_examples=40)
@given(seed=seeds, vocab=st.sampled_from(VOCABS), kind=st.sampled_from(("random", "ties", "barred", "denormal")))
def test_sums_of_blocks(seed: int, vocab: int, kind: str) -> None:
    x = logits_of(kind, seed, 3, vocab)
    x[:, 0] = 0.0  # a row has a token
    largest = x.amax(dim=-1)
    weights = (x.double() - largest.double().unsqueeze(1)).exp()
    for block in (16, 512):
        padded = torch.nn.functional.pad(weights, (0, -vocab % block))
        exact = padded.unflatten(1, (-1, block)).sum(-1)
        for kernels in (kernel_set(BEST), REFERENCE):
            torch.testing.assert_close(
                kernels.op("block_sums")(x, largest, block).double(), exact, rtol=2e-6, atol=512 * math.exp(-87)
            )


@pytest.mark.parametrize("kernels", [REFERENCE, kernel_set(BEST)], ids=["torch", BEST])
@settings(max_examples=60)
@given(
    **rows_of_any_kind,
    top_p=st.sampled_from([5e-324, 1e-6, 0.3, 0.9, 0.999, 1 - 1e-9, 1.0]),
    uniform=st.sampled_from([0.0, 1e-7, 0.31, 0.77, 1 - 2**-53]),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_draws_among_the_fewest_that_weigh_enough(
    kernels: Backend, seed: int, vocab: int, kind: str, top_p: float, uniform: float, scale: float
) -> None:
    """Against float64: no fewer weigh top_p, none of them is too many; the token is at `uniform` of what they weigh."""
    x = drawable(logits_of(kind, seed, 2, vocab) * scale)
    tokens, edges = nucleus(kernels, x, top_p, uniform)
    for row, token, edge in zip(x, tokens.tolist(), edges.tolist(), strict=True):
        _, order = sorted_rows(row.unsqueeze(0))
        weights = (row.double() - row.double().max()).exp()
        count = order[0].tolist().index(edge) + 1
        in_order = weights[order[0]].cumsum(0) / weights.sum()
        slack = 1e-5
        assert in_order[count - 1] >= top_p - slack
        assert count == 1 or in_order[count - 2] <= top_p + slack
        kept = order[0, :count].sort().values
        reached = weights[kept].cumsum(0) / weights[kept].sum()
        place = kept.tolist().index(token)
        assert reached[place] >= uniform - slack and (reached[place - 1] if place else 0.0) <= uniform + slack
        assert weights[token].float() > 0  # what weighs nothing is never drawn


def test_a_token_too_many_or_too_few_would_be_seen() -> None:
    """The control: the test above tells the neighbours of the right edge from it."""
    x = drawable(logits_of("random", 3, 1, 901))
    edge = int(nucleus(kernel_set(BEST), x, 0.9)[1])
    _, order = sorted_rows(x)
    share = x.double().softmax(-1)[0, order[0]].cumsum(0)
    place = order[0].tolist().index(edge)
    assert share[place - 1] < 0.9 - 1e-5 and share[place] >= 0.9 and share[place] - share[place - 1] > 2e-5


@settings(max_examples=60)
@given(**rows_of_any_kind, offset=st.sampled_from([0.0, -0.5, -3.0, -1e30, -math.inf]))
def test_what_is_below_the_bound_is_barred(seed: int, vocab: int, kind: str, offset: float) -> None:
    x = logits_of(kind, seed, 3, vocab)
    offsets = torch.tensor([offset, -math.inf, -1.0])
    bound = torch.where(offsets == -math.inf, -math.inf, x.amax(dim=-1) + offsets)
    expected = torch.where(x < bound.unsqueeze(1), -math.inf, x)
    for kernels in (REFERENCE, kernel_set(BEST)):
        work = x.clone()
        assert kernels.op("cut_below_largest")(work, offsets).data_ptr() == work.data_ptr()
        assert same(work, expected)


@settings(max_examples=60)
@given(**rows_of_any_kind, divisor=st.sampled_from([1.0, 0.7, 1e-5, 1e30]))
def test_each_row_is_divided_in_its_place(seed: int, vocab: int, kind: str, divisor: float) -> None:
    x = logits_of(kind, seed, 3, vocab)
    divisors = torch.tensor([divisor, 1.0, 3.0])
    for kernels in (REFERENCE, kernel_set(BEST)):
        work = x.clone()
        assert kernels.op("divide_rows")(work, divisors).data_ptr() == work.data_ptr()
        assert same(work, x / divisors.unsqueeze(1))


@by_name
@settings(max_examples=20)
@given(**rows_of_any_kind, rows=st.integers(1, 9))
def test_a_row_alone_has_the_same_bits(name: str, seed: int, vocab: int, kind: str, rows: int) -> None:
    """Within any number of rows, at any place, on any instruction set; memory need not be aligned."""
    x = logits_of(kind, seed, rows, vocab)
    shifted = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    whole = CALLS[name](kernel_set(BEST), shifted)
    row = seed % rows
    own = tuple(part[row : row + 1] for part in whole) if isinstance(whole, tuple) else whole[row : row + 1]
    for isa in ISAS:
        assert same(CALLS[name](kernel_set(isa), x[row : row + 1].clone()), own)


@by_name
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_threads_change_no_bit(name: str, rows: int) -> None:
    """Few rows are cut into chunks that are merged: equals and NaN on both sides of the cuts."""
    for kind in ("random", "ties", "barred", "rising", "nan", "all barred"):
        x = logits_of(kind, 4, rows, 152_065)
        alone = CALLS[name](kernel_set(BEST), x)
        try:
            for threads in (2, 5):
                torch.set_num_threads(threads)
                assert same(CALLS[name](kernel_set(BEST), x), alone)
        finally:
            torch.set_num_threads(1)


def test_without_rows() -> None:
    x = torch.empty(0, 40)
    for name, call in CALLS.items():
        ours, theirs = call(kernel_set(BEST), x), call(REFERENCE, x)
        assert same(ours, theirs), name


@by_name
def test_the_tests_see_a_defect(name: str) -> None:
    """The control: swap two tokens of one row, or move one logit by its last place, and the result is another."""
    x = logits_of("random", 1, 3, 901)
    result = CALLS[name](kernel_set(BEST), x)
    assert same(result, CALLS[name](kernel_set(BEST), x.clone()))
    place = int(x[1].argmax())
    x[1, place] = torch.nextafter(x[1, place], torch.tensor(math.inf))
    if name == "gather of logits":
        x[1, 0] = 77.0
    elif name in ("gather_logprobs", "block_sums", "draw_nucleus"):
        x[1] = x[1].roll(1)
    assert not same(result, CALLS[name](kernel_set(BEST), x))


def test_the_lowest_of_equals_is_not_the_highest() -> None:
    """The control of the ties: the other rule gives other ids on the same rows."""
    x = logits_of("ties", 2, 2, 2049)
    ids = kernel_set(BEST).op("top_k")(x, 50)[1]
    flipped = 2048 - kernel_set(BEST).op("top_k")(x.flip(1), 50)[1]
    assert equal(x.gather(1, ids), x.gather(1, flipped)) and not torch.equal(ids, flipped)


@pytest.mark.parametrize("bad", [-1, 40])
def test_ids_out_of_the_vocabulary_are_refused(bad: int) -> None:
    with pytest.raises(IndexError, match=rf"\[0, 40\), got .*{bad}"):
        kernel_set(BEST).op("gather_logprobs")(torch.zeros(1, 40), torch.tensor([[3, bad]]), 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda op: op("argmax")(torch.zeros(2, 0)),
        lambda op: op("top_k")(torch.zeros(2, 8), 0),
        lambda op: op("top_k")(torch.zeros(2, 8), 9),
        lambda op: op("gather_logprobs")(torch.zeros(2, 8), torch.zeros(1, 3, dtype=torch.int64), 1),
        lambda op: op("gather_logprobs")(torch.zeros(2, 8), torch.zeros(2, 3, dtype=torch.int64), 4),
        lambda op: op("gather_logprobs")(torch.zeros(2, 8), torch.zeros(2, 3, dtype=torch.int32), 1),
        lambda op: op("block_sums")(torch.zeros(2, 8), torch.zeros(2), 24),
        lambda op: op("block_sums")(torch.zeros(2, 8), torch.zeros(1), 16),
        lambda op: op("cut_below_largest")(torch.zeros(2, 8), torch.zeros(3)),
        lambda op: op("divide_rows")(torch.zeros(2, 8), torch.ones(3)),
        lambda op: op("draw_nucleus")(torch.zeros(2, 8), torch.zeros(2), torch.ones(2), torch.zeros(1)),
        lambda op: op("draw_nucleus")(torch.zeros(2, 0), torch.zeros(2), torch.ones(2), torch.zeros(2)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError):
        call(kernel_set(BEST).op)
