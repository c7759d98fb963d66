"""The attention kernel is its definition, and gives a token the same bits whatever is around it, on every machine.

Held against float64 and against the PyTorch twin; every slot that a row must not read is NaN (tests/pages.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import Pages, Shape, normal

from llm.forward import QUANTIZED_CACHE_DTYPES, KVCacheSpec

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_core")]
# Relative to the largest element: a float32 softmax over some hundred keys, and the twin's rounding beside it.
TOLERANCE = 4e-6
# Queries and probabilities are rounded to 15 bits: 10 times what int8 of unit normals would err at random.
TOLERANCES = {torch.int8: 4e-4}

seeds = st.integers(0, 2**31)
# (cached, new): rows that cross the kernel's steps of 64 keys, its panels of 16 and its tiles of rows.
row_lengths = st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 70)))
batches = st.lists(row_lengths, min_size=1, max_size=5)


@st.composite
def shapes(draw: st.DrawFn, **fixed: Any) -> Shape:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    drawn = {
        # Most queries of one key: with several keys they cost more and are in no other loop.
        "heads": kv_heads * draw(st.sampled_from([1, 2, 7, 60] if kv_heads == 1 else [1, 2, 7])),
        "kv_heads": kv_heads,
        "head_size": draw(st.sampled_from([8, 10, 32, 64, 72, 80, 128, 256])),
        "block_size": draw(st.sampled_from([1, 3, 16, 32, 48, 64, 80])),
        "window": draw(st.sampled_from([None, None, 1, 3, 17, 64, 65, 1000])),
        "soft_cap": draw(st.sampled_from([None, None, 2.0])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, *QUANTIZED_CACHE_DTYPES])),
        "sinks": draw(st.booleans()),
        "alibi": draw(st.booleans()),
        "chunk": draw(st.sampled_from([None, None, 7, 70])),
    }
    shape = Shape(**{**drawn, **fixed})
    return replace(shape, static=draw(st.booleans())) if shape.is_quantized else shape


def attend(shape: Shape, rows: list[tuple[int, int]], seed: int, isa: str = ISAS[-1]) -> torch.Tensor:
    return Pages(shape, rows, seed, kernel_set(isa)).attend()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


@settings(max_examples=60)
@given(shape=shapes(), rows=batches, seed=seeds)
@example(shape=Shape(heads=60, kv_heads=1, head_size=256), rows=[(0, 70), (64, 1), (63, 2)], seed=0)
def test_it_is_the_definition(shape: Shape, rows: list[tuple[int, int]], seed: int) -> None:
    twin = Pages(shape, rows, seed)
    actual = attend(shape, rows, seed)
    tolerance = TOLERANCES.get(shape.dtype, TOLERANCE)
    assert_close(actual, twin.expected(), tolerance)
    assert_close(actual, twin.attend(), tolerance)


@pytest.mark.parametrize("isa", ISAS[:-1])
@settings(max_examples=30)
@given(shape=shapes(), rows=batches, seed=seeds)
def test_instruction_sets_give_the_same_bits(isa: str, shape: Shape, rows: list[tuple[int, int]], seed: int) -> None:
    assert torch.equal(attend(shape, rows, seed, isa), attend(shape, rows, seed))


def history(shape: Shape, seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one sequence."""
    query = normal(seed, length, shape.heads, shape.head_size)
    keys, values = (normal(seed + 1 + i, length, shape.kv_heads, shape.head_size) for i in range(2))
    return query, keys, values


def one_sequence(shape: Shape, isa: str, seed: int, chunks: list[int], companions: int = 0) -> torch.Tensor:
    """A sequence computed in chunks, each among `companions` other rows; what it answers to all of its tokens."""
    query, keys, values = history(shape, seed, sum(chunks))
    answers, done = [], 0
    for step, chunk in enumerate(chunks):
        others = [(7 * i + step, 1 + (i + step) % 5) for i in range(companions)]
        place = (seed + step) % (companions + 1)
        rows = [*others[:place], (done, chunk), *others[place:]]
        pages = Pages(shape, rows, seed + step, kernel_set(isa))
        start = sum(new for _, new in rows[:place])
        pages.query[start : start + chunk] = query[done : done + chunk]
        pages.keys[place], pages.values[place] = keys[: done + chunk], values[: done + chunk]
        pages.sinks = normal(seed, shape.heads) if shape.sinks else None
        pages.static_scales = shape.static_scales(seed)
        pages.refill()
        answers.append(pages.attend()[start : start + chunk])
        done += chunk
    return torch.cat(answers)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=20)
@given(shape=shapes(), seed=seeds, length=st.integers(60, 140), chunk=st.sampled_from([1, 5, 17, 64]))
def test_decode_chunk_and_whole_prefill_give_the_same_bits(
    isa: str, shape: Shape, seed: int, length: int, chunk: int
) -> None:
    whole = one_sequence(shape, isa, seed, [length])
    parts = [chunk] * (length // chunk) + [1] * (length % chunk)
    if chunk == 1:
        parts = [length - 25] + [1] * 25
    other_blocks = replace(shape, block_size=16 if shape.block_size != 16 else 3)
    assert torch.equal(one_sequence(shape, isa, seed, parts, companions=2), whole)
    assert torch.equal(one_sequence(other_blocks, isa, seed, [length]), whole)


@settings(max_examples=12)
@given(
    shape=shapes(causal=False, alibi=False, chunk=None),
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    seed=seeds,
)
def test_tokens_see_what_follows_them(shape: Shape, lengths: list[int], seed: int) -> None:
    rows = [(0, length) for length in lengths]
    twin, actual = Pages(shape, rows, seed), attend(shape, rows, seed)
    tolerance = TOLERANCES.get(shape.dtype, TOLERANCE)
    assert_close(actual, twin.expected(), tolerance)
    assert_close(actual, twin.attend(), tolerance)
    alone = Pages(shape, rows[-1:], seed, kernel_set(ISAS[-1]))
    batched = Pages(shape, rows, seed, kernel_set(ISAS[-1]))
    alone.query, alone.keys, alone.values = batched.query[-lengths[-1] :], batched.keys[-1:], batched.values[-1:]
    alone.sinks = batched.sinks
    assert torch.equal(alone.attend(), batched.attend()[-lengths[-1] :])
    if max(lengths) > 1 and shape.window != 1:
        assert not torch.equal(attend(replace(shape, causal=True), rows, seed), actual)


@settings(max_examples=20)
@given(shape=shapes(), rows=batches, seed=seeds)
def test_threads_change_no_bit(shape: Shape, rows: list[tuple[int, int]], seed: int) -> None:
    alone = attend(shape, rows, seed)
    try:
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert torch.equal(attend(shape, rows, seed), alone)
    finally:
        torch.set_num_threads(1)


def test_the_comparison_of_bits_sees_a_reordering() -> None:
    """The negative control: two keys trade places, which is the same sum in another order."""
    shape = Shape(head_size=64)
    query, keys, values = history(shape, 0, 130)
    outputs = []
    for order in (list(range(130)), [1, 0, *range(2, 130)]):
        pages = Pages(shape, [(129, 1)], 0, kernel_set(ISAS[-1]))
        pages.query[:] = query[-1:]
        pages.keys[0], pages.values[0] = keys[order], values[order]
        pages.refill()
        outputs.append(pages.attend())
    assert not torch.equal(*outputs)
    assert_close(*outputs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, *QUANTIZED_CACHE_DTYPES])
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_what_a_later_token_stores_reaches_no_earlier_one(isa: str, dtype: torch.dtype, poison: float) -> None:
    shape, rows = Shape(head_size=24, heads=14, dtype=dtype), [(10, 40), (0, 3)]
    pages, poisoned = (Pages(shape, rows, 0, kernel_set(isa)) for _ in range(2))
    poisoned.keys[0][30], poisoned.values[0][30] = poison, poison
    clean, actual = pages.attend(), poisoned.attend()
    assert torch.equal(actual[:20], clean[:20]) and torch.equal(actual[40:], clean[40:])
    assert actual[20:40].isnan().any(dim=-1).all()


def test_extreme_scores() -> None:
    """The largest score is subtracted: no overflow however large they are, and the largest key wins."""
    pages = Pages(Shape(), [(30, 1), (0, 70)], 0, kernel_set(ISAS[-1]))
    pages.query *= 1e6
    expected = pages.expected()
    assert (pages.attend() - expected).abs().max() <= 0.05


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cache_holds_what_torch_would_store(isa: str, dtype: torch.dtype) -> None:
    """Rounding to nearest even, overflow, denormals and NaN as `Tensor.to`; other slots are left alone."""
    kernels = kernel_set(isa)
    shapes, write = kernels.op("kv_cache_shapes"), kernels.op("write_kv_cache")
    tokens, heads, size = 80, 3, 20
    bits = torch.randint(-(2**31), 2**31, (2, tokens, heads, size), generator=torch.Generator().manual_seed(0))
    near = 2.0 ** torch.arange(-26, 18).float()
    ties = torch.cat([near * factor for factor in (1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11)])
    both = bits.int().view(torch.float32).clone()
    both[0].view(-1)[: len(ties)], both[1].view(-1)[: len(ties)] = ties, -ties
    both[0].view(-1)[-6:] = torch.tensor([65519.996, 65520, -65536, float("inf"), -float("inf"), float("nan")])
    key_shape, value_shape = shapes(KVCacheSpec(heads, size, dtype), 41, 4)
    keys, values = torch.full(key_shape, 7, dtype=dtype), torch.full(value_shape, 7, dtype=dtype)
    slots = torch.randperm(41 * 4, generator=torch.Generator().manual_seed(1))[:tokens]
    write(both[0], both[1], keys, values, slots)
    stored_keys, stored_values = keys.permute(0, 3, 1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1)
    for stored, given_values in ((stored_keys, both[0]), (stored_values, both[1])):
        torch.testing.assert_close(stored[slots], given_values.to(dtype), rtol=0, atol=0, equal_nan=True)
        others = torch.ones(len(stored), dtype=torch.bool)
        others[slots] = False
        assert (stored[others] == 7).all()


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("block_table", (1, 0), 10**6),
        ("block_table", (0, 1), -1),
        ("seq_lens", 1, 4000),
        ("seq_lens", 0, 2),
        ("query_start_loc", 1, -5),
        ("query_start_loc", 2, 5),
    ],
)
def test_what_is_out_of_range_is_refused(name: str, index: Any, value: int) -> None:
    pages = Pages(Shape(block_size=16), [(20, 3), (40, 1)], 0, kernel_set(ISAS[-1]))
    pages.attend()
    metadata = pages.metadata()
    getattr(metadata, name)[index] = value
    with pytest.raises(IndexError, match=r"row [01] of the attention step is out of range"):
        pages.attend_again(metadata)


@pytest.mark.parametrize("slot", [-1, 10**6])
def test_slots_out_of_range_are_refused(slot: int) -> None:
    pages = Pages(Shape(), [(20, 3)], 0, kernel_set(ISAS[-1]))
    before = pages.key_cache.clone()
    new = torch.zeros(2, 2, 8)
    with pytest.raises(IndexError, match=rf"slot_mapping\[1\] is {slot}"):
        kernel_set(ISAS[-1]).op("write_kv_cache")(new, new, pages.key_cache, pages.value_cache, torch.tensor([1, slot]))
    assert torch.equal(pages.key_cache.nan_to_num(7), before.nan_to_num(7))
