"""A KV cache in 8 bits: it stores what the definition gives, to the bit, and attention reads each code with its scale.

tests/kernels/test_kernels_attention.py holds attention over it against float64 and the twin, and its bits against
batches, chunks and instruction sets.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import Pages, Shape, normal

from llm.forward import QUANTIZED_CACHE_DTYPES, KVCacheSpec
from llm.kernels.reference.attention import dequantize_heads, quantize_heads, stored

pytestmark = needs_compiler
KV_HEADS, SIZE, BLOCKS, BLOCK = 3, 22, 11, 8
PADDED = 24
TOLERANCE = 4e-4  # as in test_kernels_attention.py, of int8

Stored = tuple[torch.Tensor, torch.Tensor]


def awkward(seed: int, tokens: int) -> torch.Tensor:
    """Keys of many magnitudes; ties of int8; heads that are zero, tiny, huge, infinite, NaN."""
    x = normal(seed, tokens, KV_HEADS, SIZE) * 10.0 ** (torch.arange(tokens) % 9 - 4)[:, None, None]
    x[0], x[1], x[2, 0], x[3, 1, 5], x[4, 2, 0] = 0, 1e-42, 3e38, float("inf"), float("nan")
    x[5] = torch.arange(SIZE) + 0.5
    x[5, :, 0] = 127
    return x


def records(cache: torch.Tensor, dtype: torch.dtype, is_key: bool) -> Stored:
    """(codes [slots, kv_heads, size], scales bfloat16 [slots, kv_heads]) of the kernels' layout, quantized_cache.h."""
    raw = cache.view(torch.uint8)
    scales, codes = raw[..., :32].contiguous().view(torch.bfloat16), raw[..., 32:].contiguous().view(dtype)
    if dtype == torch.int8 and is_key:
        codes = codes.unflatten(2, (PADDED // 4, 16, 4)).permute(0, 3, 1, 2, 4).flatten(3)
    elif dtype == torch.int8:
        codes = codes.unflatten(2, (4, PADDED, 4)).permute(0, 2, 4, 1, 3).flatten(1, 2)
    elif is_key:
        codes = codes.unflatten(2, (PADDED, 16)).permute(0, 3, 1, 2)
    else:
        codes = codes[..., : 16 * SIZE].unflatten(2, (16, SIZE)).permute(0, 2, 1, 3)
    return codes.reshape(-1, KV_HEADS, codes.shape[-1])[..., :SIZE], scales.transpose(1, 2).flatten(0, 1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.uint8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", QUANTIZED_CACHE_DTYPES)
@pytest.mark.parametrize("static", [False, True])
def test_the_cache_holds_what_the_definition_gives(isa: str, dtype: torch.dtype, static: bool) -> None:
    kernels, tokens = kernel_set(isa), 60
    given = Shape(kv_heads=KV_HEADS, head_size=SIZE, dtype=dtype, static=static).static_scales(3)
    shapes = kernels.op("kv_cache_shapes")(KVCacheSpec(KV_HEADS, SIZE, dtype), BLOCKS, BLOCK)
    caches = [torch.full(shape, 7, dtype=torch.uint8).view(dtype) for shape in shapes]
    key, value = awkward(0, tokens), awkward(1, tokens)
    slots = torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(2))[:tokens]
    kernels.op("write_kv_cache")(key, value, *caches, slots, static_scales=given)
    others = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    others[slots] = False
    for part, (cache, x) in enumerate(zip(caches, (key, value), strict=True)):
        codes, scales = records(cache, dtype, is_key=part == 0)
        expected = quantize_heads(x, dtype, None if given is None else given[2 * part : 2 * part + 2])
        assert torch.equal(bits(codes)[slots], bits(expected[0]))
        assert torch.equal(bits(scales)[slots], bits(expected[1]))
        untouched = torch.cat(
            (bits(codes[: len(others)][others]).flatten(), bits(scales[: len(others)][others]).flatten())
        )
        assert set(untouched.tolist()) == {7, 0x0707}


@pytest.mark.parametrize("dtype", QUANTIZED_CACHE_DTYPES)
def test_a_token_errs_by_half_a_step_of_its_own_scale(dtype: torch.dtype) -> None:
    """The definition against float64; a head that is not finite is NaN everywhere, and no other head is."""
    x = awkward(0, 40)
    back = dequantize_heads(stored(*quantize_heads(x, dtype)), dtype).double()
    finite = x.isfinite().all(dim=-1)
    assert back[~finite].isnan().all() and not back[finite].isnan().any()
    largest = x.abs().amax(dim=-1, keepdim=True).double().expand_as(x)[finite]
    error, size = (back - x.double()).abs()[finite], x.abs().double()[finite]
    step = largest * (1 + 2**-7)  # a scale is rounded up to bfloat16
    # int8: half of 1 / 127. e4m3: half of a place in 2^-3, and below 2^-6 of the scale half of 2^-9.
    most = step / 254 if dtype == torch.int8 else torch.maximum(size / 16, step / 448 * 2**-10)
    assert (error <= most * (1 + 1e-6) + 2e-40).all()
    assert (error[largest > 0] / largest[largest > 0]).max() > 1e-3


def planted(shape: Shape, plant: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention as it is, attention after `plant` changed the cache)."""
    pages = Pages(shape, [(71, 1), (4, 20)], seed, kernel_set(ISAS[-1]))
    right = pages.attend()
    plant(pages)
    return right, pages.attend_again()


def scales_of_neighbours(pages: Pages) -> None:
    """The scales of two neighbouring slots trade places, in every panel."""
    for cache in (pages.key_cache, pages.value_cache):
        scales = cache.view(torch.uint8)[..., :32].unflatten(2, (8, 2, 2))
        scales.copy_(scales.flip(3))


def scale_of_another_value(pages: Pages) -> None:
    """Keys get their scale before they are final: of half of what is stored."""
    key, value = pages._new(pages.keys), pages._new(pages.values)
    slots = pages.slot_mapping()
    before = pages.key_cache.view(torch.uint8)[..., 32:].clone()
    pages.write(key * 0.5, value, slots)
    pages.key_cache.view(torch.uint8)[..., 32:] = before


@pytest.mark.parametrize("dtype", QUANTIZED_CACHE_DTYPES)
@pytest.mark.parametrize("plant", [scales_of_neighbours, scale_of_another_value])
def test_a_wrong_scale_is_seen(dtype: torch.dtype, plant: Any) -> None:
    """The negative control of the comparisons with float64."""
    right, wrong = planted(Shape(head_size=32, block_size=16, dtype=dtype), plant)
    assert (right - wrong).abs().max() > 20 * TOLERANCE
    assert torch.equal(*planted(Shape(head_size=32, block_size=16, dtype=dtype), lambda pages: None))


@pytest.mark.parametrize("factor", [1e-30, 1e-18, 1e18, 1e30])
def test_scales_of_any_magnitude(factor: float) -> None:
    """Values, and queries against keys, of extreme magnitudes: what is multiplied are scales, which do not overflow."""
    shape, rows = Shape(dtype=torch.int8, block_size=16), [(70, 1), (5, 20)]
    plain, pages = (Pages(shape, rows, 0, kernel_set(ISAS[-1])) for _ in range(2))
    pages.query /= factor
    pages.keys = [key * factor for key in pages.keys]
    pages.values = [value * factor for value in pages.values]
    pages.refill()
    expected = plain.attend()
    assert (pages.attend() / factor - expected).abs().max() <= 0.02 * expected.abs().max()


def test_wide_heads_stay_within_int32() -> None:
    shape, rows = Shape(heads=1, kv_heads=1, head_size=4096, block_size=16, dtype=torch.int8), [(3, 1)]
    pages = Pages(shape, rows, 0, kernel_set(ISAS[-1]))
    pages.query[:] = 1.0
    pages.keys = [torch.ones_like(key) for key in pages.keys]
    pages.refill()
    assert (pages.attend() - pages.expected()).abs().max() <= TOLERANCE * pages.expected().abs().max()
