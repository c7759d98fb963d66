"""Latent attention's kernels are their definitions, and give a token the same bits whatever is around it.

Held against float64 and against the PyTorch twins; every slot that a row must not read is NaN (tests/pages.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import Pages, Shape, normal

from llm.forward import QUANTIZED_CACHE_DTYPES, LatentCacheSpec
from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_core")]
TOLERANCE = 4e-6
DTYPES = [torch.float32, torch.bfloat16, *QUANTIZED_CACHE_DTYPES]
MIXED = [(30, 1), (0, 9), (63, 2), (64, 40)]


class AsPaged:
    """Latent attention under the names and arguments of paged attention: its values are the first channels of its keys.

    `Pages` owns the cache and its poison.
    """

    def __init__(self, kernels: Backend, latent_size: int) -> None:
        self._ops, self._latent = kernels.ops, latent_size

    def op(self, name: str) -> Callable[..., Any]:
        return getattr(self, name)

    def kv_cache_shapes(self, spec: Any, num_blocks: int, block_size: int) -> Any:
        return LatentCacheSpec(spec.head_size, spec.dtype, scales=2).shape(num_blocks, block_size), (0,)

    def write_kv_cache(self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, _: Any, slots: Any) -> None:
        self._ops.write_latent_cache(key[:, 0, : self._latent], key[:, 0, self._latent :], cache, slots)

    def paged_attention(self, query: torch.Tensor, cache: torch.Tensor, _: Any, metadata: Any, **more: Any) -> Any:
        parts = query[..., : self._latent].contiguous(), query[..., self._latent :].contiguous()
        return self._ops.latent_attention(*parts, cache, metadata, scale=more["scale"])


class LatentPages(Pages):
    def __init__(self, shape: Shape, latent: int, rows: list[tuple[int, int]], seed: int, kernels: Any) -> None:
        super().__init__(shape, rows, seed, AsPaged(kernels, latent))  # type: ignore[arg-type]
        self.latent = latent
        self.values = [keys[..., :latent] for keys in self.keys]

    def rounded(self, x: torch.Tensor, part: int) -> torch.Tensor:
        """The latent and what is rotated have scales of their own."""
        parts = x.split([self.latent, x.shape[-1] - self.latent], dim=-1) if part == 0 else [x]
        return torch.cat([super(LatentPages, self).rounded(each, part) for each in parts], dim=-1)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, int]:
    latent, rope = draw(st.sampled_from([(8, 4), (20, 6), (64, 16), (33, 2), (512, 64)]))
    heads = draw(st.sampled_from([1, 3, 40] if latent < 512 else [1, 17]))
    block_size, dtype = draw(st.sampled_from([1, 3, 16, 48])), draw(st.sampled_from(DTYPES))
    return Shape(heads, 1, latent + rope, block_size, dtype=dtype), latent


row_lengths = st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 70)))
batches = st.lists(row_lengths, min_size=1, max_size=4)
seeds = st.integers(0, 2**31)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


@settings(max_examples=25)
@given(shape=shapes(), rows=batches, seed=seeds)
def test_attention_is_the_definition_on_every_instruction_set(
    shape: tuple[Shape, int], rows: list[tuple[int, int]], seed: int
) -> None:
    first, *others = (LatentPages(*shape, rows, seed, kernel_set(isa)).attend() for isa in ISAS)
    twin = LatentPages(*shape, rows, seed, REFERENCE)
    assert_close(first, twin.expected())
    assert_close(twin.attend(), twin.expected())
    assert all(torch.equal(other, first) for other in others)


def test_it_is_attention_over_keys_with_their_first_channels_as_values() -> None:
    """The bits of paged attention with one KV head, where keys are as wide as values."""
    kernels, shape = kernel_set(ISAS[-1]), Shape(6, 1, 24)
    latent = LatentPages(shape, 20, MIXED, 0, kernels)
    paged = Pages(shape, MIXED, 0, kernels)
    paged.values = paged.keys
    paged.refill()
    assert torch.equal(latent.attend(), paged.attend()[..., :20])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_decode_chunks_and_whole_prompts_give_the_same_bits(isa: str, dtype: torch.dtype) -> None:
    shape, latent, length = Shape(5, 1, 40, 16, dtype=dtype), 32, 140
    query, keys = normal(1, length, 5, 40), normal(2, length, 1, 40)

    def answers(chunks: list[int], companions: int = 0) -> torch.Tensor:
        found, done = [], 0
        for chunk in chunks:
            rows = [(done, chunk), *[(7 * i, 1 + i) for i in range(companions)]]
            pages = LatentPages(shape, latent, rows, done, kernel_set(isa))
            pages.query[:chunk], pages.keys[0] = query[done : done + chunk], keys[: done + chunk]
            pages.refill()
            found.append(pages.attend()[:chunk])
            done += chunk
        return torch.cat(found)

    whole = answers([length])
    assert torch.equal(answers([17] * 8 + [4], companions=2), whole)
    assert torch.equal(answers([length - 20, *[1] * 20], companions=3), whole)
    # The negative control: two keys trade places.
    keys[[3, 4]] = keys[[4, 3]]
    assert not torch.equal(answers([length])[10:], whole[10:])


def test_threads_change_no_bit() -> None:
    pages = LatentPages(Shape(40, 1, 24), 20, MIXED, 0, kernel_set(ISAS[-1]))
    x, weight = normal(3, 70, 5, 33), normal(4, 5, 33, 50)
    alone = pages.attend(), kernel_set(ISAS[-1]).ops.heads_linear(x, weight)
    try:
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(pages.attend_again(), alone[0])
            assert torch.equal(kernel_set(ISAS[-1]).ops.heads_linear(x, weight), alone[1])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=15)
@given(
    tokens=st.sampled_from([1, 2, 4, 7, 33, 70]),
    heads=st.sampled_from([1, 3]),
    n=st.sampled_from([1, 10, 16, 20, 64, 100]),
    k=st.sampled_from([1, 7, 64]),
    seed=seeds,
)
def test_heads_linear_is_the_definition_with_bits_of_each_token_alone(
    dtype: torch.dtype, tokens: int, heads: int, n: int, k: int, seed: int
) -> None:
    # Queries lie apart: behind each head's channels are those that are rotated.
    x, weight = normal(seed, tokens, heads, k + 3)[..., :k], normal(seed + 1, heads, k, n).to(dtype)
    first, *others = (kernel_set(isa).ops.heads_linear(x, weight) for isa in ISAS)
    expected = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    assert_close(first, expected, 1e-5)
    assert_close(REFERENCE.ops.heads_linear(x, weight), expected, 1e-5)
    assert all(torch.equal(other, first) for other in others)
    alone = [kernel_set(ISAS[-1]).ops.heads_linear(x[i : i + 1], weight) for i in range(tokens)]
    assert torch.equal(torch.cat(alone), first)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cache_holds_what_torch_would_store_and_nothing_else(isa: str, dtype: torch.dtype) -> None:
    both = normal(0, 9, 1, 26)[:, 0]
    cache = torch.full(LatentCacheSpec(26, dtype).shape(5, 4), 7, dtype=dtype)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:9]
    kernel_set(isa).ops.write_latent_cache(both[:, :20], both[:, 20:], cache, slots)
    stored, others = cache.view(-1, 26), torch.ones(20, dtype=torch.bool)
    others[slots] = False
    assert torch.equal(stored[slots], both.to(dtype)) and (stored[others] == 7).all()
    assert cache.nbytes == 20 * LatentCacheSpec(26, dtype).bytes_per_token()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", QUANTIZED_CACHE_DTYPES)
def test_codes_and_scales_are_those_of_the_definition(isa: str, dtype: torch.dtype) -> None:
    """To the bit, with rows that are zero, tiny, huge, infinite and NaN; other slots stay as they are."""
    both, spec = normal(0, 12, 26) * 10.0 ** (torch.arange(12) % 9 - 4)[:, None], LatentCacheSpec(26, dtype, scales=2)
    both[0], both[1], both[2, 3], both[3, 5], both[4, 21] = 0, 1e-42, 3e38, float("inf"), float("nan")
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:12]
    caches = []
    for kernels in (kernel_set(isa), REFERENCE):
        cache = torch.full(spec.shape(5, 4), 7, dtype=torch.uint8).view(dtype)
        kernels.ops.write_latent_cache(both[:, :20], both[:, 20:], cache, slots)
        caches.append(cache.view(torch.uint8).view(20, 30))
    assert torch.equal(*caches) and caches[0].nbytes == 20 * spec.bytes_per_token()
    scales = caches[0][slots, 26:].contiguous().view(torch.bfloat16).float()
    assert scales[3].isnan().tolist() == [True, False] and scales[4].isnan().tolist() == [False, True]
    # The negative control: one scale for the row would be another.
    largest = both[5:].abs()
    assert (largest[:, :20].amax(1) != largest[:, 20:].amax(1)).all() and (scales[5:, 0] != scales[5:, 1]).any()


@pytest.mark.parametrize("isa", ISAS)
def test_what_a_later_token_stores_reaches_no_earlier_one(isa: str) -> None:
    clean, poisoned = (LatentPages(Shape(7, 1, 24), 20, [(10, 40), (0, 3)], 0, kernel_set(isa)) for _ in range(2))
    poisoned.keys[0][30] = float("nan")
    expected, actual = clean.attend(), poisoned.attend()
    assert torch.equal(actual[:20], expected[:20]) and torch.equal(actual[40:], expected[40:])
    assert actual[20:40].isnan().any(dim=-1).all()


def test_what_is_out_of_range_is_refused() -> None:
    pages = LatentPages(Shape(3, 1, 24), 20, [(20, 3), (40, 1)], 0, kernel_set(ISAS[-1]))
    pages.attend()
    metadata = pages.metadata()
    metadata.block_table[1, 0] = 10**6
    with pytest.raises(IndexError, match="row 1 of the attention step is out of range"):
        pages.attend_again(metadata)
    ops, before = kernel_set(ISAS[-1]).ops, pages.key_cache.clone()
    with pytest.raises(IndexError, match=r"slot_mapping\[1\] is -1"):
        ops.write_latent_cache(torch.zeros(2, 20), torch.zeros(2, 4), pages.key_cache, torch.tensor([1, -1]))
    assert torch.equal(pages.key_cache.nan_to_num(7), before.nan_to_num(7))
    for wrong in ((torch.zeros(2, 19), torch.zeros(2, 4)), (torch.zeros(2, 20), torch.zeros(3, 4))):
        with pytest.raises(ValueError, match="does not hold"):
            ops.write_latent_cache(*wrong, pages.key_cache, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="is not of"):
        ops.latent_attention(torch.zeros(4, 3, 20), torch.zeros(4, 3, 5), pages.key_cache, metadata, scale=1.0)
    with pytest.raises(ValueError, match="does not fit"):
        ops.heads_linear(torch.zeros(2, 3, 4), torch.zeros(3, 5, 6))
