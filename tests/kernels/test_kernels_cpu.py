"""The CPU kernels against their definitions, bit for bit, and those against float64 within a proven bound; and each
row's bits against its company, its place and the number of threads.

Every test runs on each instruction set of kernel_sets.TARGETS.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from definitions import add_groups, chain, group_sums, rounded_chain, scaled_sums, unscaled
from kernel_sets import needs_compiler

from llm.kernels.cpu import build, library, linear, packed
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference import linear as reference
from llm.kernels.reference.linear import quantize_per_token, quantize_static
from llm.kernels.reference.rotation import rotate
from llm.kernels.weight import LEAST, MAX_INTEGER_K, Weight, dequantize

pytestmark = [needs_compiler, pytest.mark.usefixtures("seeded")]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# m, n, k: empty, one, odd, around the 16 lanes, the tiles' heights and the steps of k.
SHAPES = [
    (0, 16, 8),
    (1, 1, 1),
    (1, 16, 4),
    (2, 17, 3),
    (3, 15, 5),
    (4, 33, 7),
    (5, 48, 31),
    (7, 31, 64),
    (8, 16, 33),
    (9, 80, 12),
    (11, 48, 20),
    (13, 130, 40),
    (16, 40, 24),
    (25, 47, 65),
    (1, 300, 260),
    (31, 64, 0),
]


@pytest.fixture(scope="module")
def plain() -> library.Library:
    return library.load_library("plain")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, except that any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integers = {4: torch.int32, 2: torch.int16}[a.element_size()]
    equal = a.view(integers) == b.view(integers)
    return bool((equal | (a.isnan() & b.isnan())).all())


def product(lib: library.Library, x: torch.Tensor, weight: packed.PanelWeight, **parts: Any) -> torch.Tensor:
    """With these parts of the weight in place of its own."""
    return linear.linear(lib, x, dataclasses.replace(weight, **parts))


def pair(
    lib: library.Library, values: torch.Tensor, kind: str, scale: torch.Tensor, group_size: int = 0, **parts: Any
) -> tuple[packed.PanelWeight, Weight]:
    """The same weight in panels and as the definition keeps it."""
    zero = parts.pop("zero", None)
    ours = packed.pack(lib, values, kind).scaled(scale, zero, group_size)
    theirs = reference.pack(values, kind).scaled(scale, zero, group_size)
    return dataclasses.replace(ours, **parts), dataclasses.replace(theirs, **parts)


def groups_of(k: int, group_size: int) -> int:
    return max(1, -(-k // group_size))


def cut_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of float32."""
    return (x.view(torch.int32) & -65536).view(torch.float32)


def tile_chain(x: torch.Tensor, weight: torch.Tensor, rounded: bool = False) -> torch.Tensor:
    """The definition of a product with a bfloat16 weight in matrix tiles (gemm_tiles.h), for normal numbers.

    `rounded`: of the activations' nearest bfloat16. Products of two bfloat16 are exact in float32, so a sum with one
    needs no fused multiply-add.
    """
    steps = -(-x.shape[1] // 32)
    missing = (0, 32 * steps - x.shape[1])
    x, weight = torch.nn.functional.pad(x, missing), torch.nn.functional.pad(weight.float(), missing)
    first = cut_to_bfloat16(x)
    second = cut_to_bfloat16(x - first)
    parts = (x.bfloat16().float(),) if rounded else (first, second, x - first - second)
    out = torch.zeros(x.shape[0], weight.shape[0])
    for step in range(steps):
        for part in parts:
            even, odd = torch.zeros_like(out), torch.zeros_like(out)
            for k in range(32 * step, 32 * step + 32, 2):
                even = even + part[:, k : k + 1] * weight[:, k]
                odd = odd + part[:, k + 1 : k + 2] * weight[:, k + 1]
            out = out + (even + odd)
    return out


def uses_tiles(lib: library.Library, dtype: torch.dtype) -> bool:
    return lib.target == "amx" and dtype == torch.bfloat16


def definition(lib: library.Library, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return tile_chain(x, weight) if uses_tiles(lib, weight.dtype) else chain(x, weight)


def random_int8(n: int, k: int, low: int = -128, high: int = 127) -> torch.Tensor:
    """Half random, half of the extremes."""
    values = torch.randint(low, high + 1, (n, k), dtype=torch.int8)
    extremes = torch.where(torch.rand(n, k) < 0.5, low, high).to(torch.int8)
    return torch.where(torch.rand(n, k) < 0.5, extremes, values)


# Packing


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (16, 5), (16, 6), (17, 1), (37, 23)])
@pytest.mark.parametrize("reuse", [False, True])
def test_float_packing_is_exact(lib: library.Library, shape: tuple, dtype: torch.dtype, reuse: bool) -> None:
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
    weight = bits.view(dtype) if dtype != torch.float32 else (bits.to(torch.int32) << 16 | 77).view(torch.float32)
    before = weight.clone()
    held = packed.pack(lib, weight, reuse=reuse)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(held.unpack().view(integers), before.view(integers))  # NaN payloads too
    assert torch.equal(held.rows(3, 20).view(integers), before[3:20].view(integers))
    if shape[0]:
        whole = shape[0] % 16 == 0 and (dtype != torch.bfloat16 or shape[1] % 2 == 0)
        assert (held.data.data_ptr() == weight.data_ptr()) == (reuse and whole)


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (16, 4), (17, 6), (37, 23)])
def test_int8_packing_is_exact(lib: library.Library, shape: tuple) -> None:
    weight = random_int8(*shape)
    held = packed.pack(lib, weight, "int8")
    assert torch.equal(held.unpack(), weight)
    assert torch.equal(held.rows(2, 19), weight[2:19])
    assert held.sums is not None and torch.equal(held.sums[: shape[0]], weight.sum(1, dtype=torch.int32))


def test_what_cannot_be_packed_is_refused(lib: library.Library) -> None:
    with pytest.raises(ValueError, match=r"torch\.float64"):
        packed.pack(lib, torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="int32"):
        packed.pack(lib, torch.zeros(1, MAX_INTEGER_K + 1, dtype=torch.int8), "int8")
    with pytest.raises(ValueError, match=r"torch\.int8 \[N, K\], got torch\.float32"):
        packed.pack(lib, torch.zeros(2, 2), "int8")
    with pytest.raises(ValueError, match=r"got torch\.int8"):
        packed.pack(lib, torch.zeros(2, 2, dtype=torch.int8))
    for x in (torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"float32 \[\.\.\., 4\]"):
            linear.linear(lib, x, packed.pack(lib, torch.zeros(2, 4)))
    with pytest.raises(ValueError, match="a weight of int8 needs its scales"):
        linear.linear(lib, torch.zeros(2, 4), packed.pack(lib, torch.zeros(2, 4, dtype=torch.int8), "int8"))


# Float products


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_float_product_is_its_chain(lib: library.Library, shape: tuple, dtype: torch.dtype) -> None:
    m, n, k = shape
    x, weight, bias = torch.randn(m, k), torch.randn(n, k).to(dtype), torch.randn(n)
    held = packed.pack(lib, weight)
    expected = definition(lib, x, weight)
    assert same(linear.linear(lib, x, held), expected)
    assert same(product(lib, x, held, bias=bias), expected + bias)
    exact = x.double() @ weight.double().t()
    bound = (k + 1) * 2.0**-24 * (x.double().abs() @ weight.double().abs().t())
    assert ((expected - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_stay_in_their_row_and_column(lib: library.Library, dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 20), torch.randn(35, 20).to(dtype)
    clean = linear.linear(lib, x, packed.pack(lib, weight))
    x[3, 5], x[4, 6], x[5, :] = float("nan"), float("inf"), 1e-41
    weight[34, 2] = float("inf")
    y = linear.linear(lib, x, packed.pack(lib, weight))
    rest = torch.tensor([0, 1, 2, 6, 7, 8])
    assert y[3].isnan().all() and (y[4].isinf() | y[4].isnan()).all() and not y[:3, 34].isfinite().any()
    assert same(y[rest, :34], clean[rest, :34])
    if uses_tiles(lib, dtype):  # they flush denormals, and an infinite weight times a part that is 0 is NaN
        assert y[4, :34].isinf().all() and (y[5, :34] == 0).all()
    else:
        assert same(y, chain(x, weight))
        assert (y[5, :34] != 0).any()  # denormals are not flushed


def test_a_flushing_thread_changes_nothing(lib: library.Library, threads: Callable[[int], None]) -> None:
    x, held = torch.full((8, 4), 1e-39), packed.pack(lib, torch.ones(40, 4))
    expected = linear.linear(lib, x, held)
    assert (expected > 0).all()
    if torch.set_flush_denormal(True):
        try:
            assert same(linear.linear(lib, x, held), expected)
            assert torch.tensor([1e-39]).mul(1.0).item() == 0.0  # the caller's own setting is back
        finally:
            torch.set_flush_denormal(False)


def test_matrix_tiles_keep_every_bit_of_an_activation(lib: library.Library) -> None:
    """Selecting one activation by a weight of 1 gives it back, down to where its third part is a denormal."""
    x = torch.randn(40, 64) * torch.logspace(-26, 38, 40)[:, None].clamp(max=3e37)
    held = packed.pack(lib, torch.eye(64).bfloat16())
    assert same(linear.linear(lib, x, held), x)
    tiny = torch.full((1, 64), 1.2345678e-36)
    assert (linear.linear(lib, tiny, held) - tiny).abs().max() < 2.0**-126


def test_a_planted_defect_in_the_parts_is_seen(lib: library.Library) -> None:
    x, weight = torch.randn(5, 96), torch.randn(16, 96).bfloat16()
    rounded = x.bfloat16().float()  # as if there were one part
    assert not same(linear.linear(lib, x, packed.pack(lib, weight)), definition(lib, rounded, weight))


@pytest.mark.parametrize("shape", [(0, 3, 5), (1, 17, 5), (16, 65, 33), (19, 130, 70), (33, 16, 64)])
def test_activations_are_rounded_where_the_weight_says_so(lib: library.Library, shape: tuple) -> None:
    m, n, k = shape
    x, weight, bias = torch.randn(m, k), torch.randn(n, k).bfloat16(), torch.randn(n)
    held = dataclasses.replace(packed.pack(lib, weight), activations="bfloat16")
    expected = tile_chain(x, weight, rounded=True) if lib.has_tiles else rounded_chain(x, weight)
    assert same(linear.linear(lib, x, held), expected)
    assert same(product(lib, x, held, bias=bias), expected + bias)
    twin = reference.linear(x, dataclasses.replace(reference.pack(weight), activations="bfloat16"))
    assert torch.allclose(twin, expected, atol=1e-4)
    if m:
        assert not same(linear.linear(lib, x, packed.pack(lib, weight)), expected)
    if k > 32:  # sums of few products of bfloat16 are exact in any order
        assert not same(chain(x.bfloat16().float(), weight), expected)


def test_rounding_keeps_what_is_not_finite_in_its_row(lib: library.Library) -> None:
    x, weight = torch.randn(5, 70), torch.randn(20, 70).bfloat16()
    x[1, 3], x[3, 69] = float("nan"), float("inf")
    held = dataclasses.replace(packed.pack(lib, weight), activations="bfloat16")
    y = linear.linear(lib, x, held)
    assert y[1].isnan().all() and y[3].isinf().all() and y[[0, 2, 4]].isfinite().all()


def test_many_steps_of_k_and_many_rows(lib: library.Library) -> None:
    """More than one block of k, of rows and of panels, each with a rest."""
    x, weight = torch.randn(150, 1100), torch.randn(150, 1100).bfloat16()
    y = linear.linear(lib, x, packed.pack(lib, weight))
    some = torch.tensor([0, 15, 16, 127, 128, 149])
    assert same(y[some], definition(lib, x[some], weight))
    assert (y - x.double() @ weight.double().t()).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_a_table(lib: library.Library, dtype: torch.dtype) -> None:
    table = torch.randn(53, 19).to(dtype)
    held = packed.pack(lib, table)
    ids = torch.tensor([0, 52, 16, 15, 7, 7])
    assert same(linear.embedding(lib, ids, held), table[ids].float())
    assert linear.embedding(lib, ids[:0], held).shape == (0, 19)
    for bad in (53, -1):
        with pytest.raises(IndexError, match=rf"\[0, 53\), got .*{bad}"):
            linear.embedding(lib, torch.tensor([1, bad]), held)


# Integer products


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_products_are_the_twins(lib: library.Library, shape: tuple) -> None:
    m, n, k = shape
    x, weight = torch.randn(m, k) * 3, random_int8(n, k)
    if m > 2 and k:
        x[1] = 0
        x[2] = torch.where(torch.rand(k) < 0.5, -1.0, 1.0)  # every activation is -127 or 127
    scale, bias = torch.rand(n, 1), torch.randn(n)
    for b in (None, bias):
        for parts in ({}, *({"input_scale": 0.0625, "input_offset": offset} for offset in (0, -128, 127, 5))):
            ours, theirs = pair(lib, weight, "int8", scale, bias=b, activations="int8", **parts)
            assert same(linear.linear(lib, x, ours), reference.linear(x, theirs))


def int4(n: int, k: int) -> torch.Tensor:
    return random_int8(n, k, -8, 7)


def test_int4_packing_is_exact(lib: library.Library) -> None:
    for n, k in ((0, 3), (1, 1), (16, 8), (17, 6), (37, 23)):
        weight = int4(n, k)
        held = packed.pack(lib, weight, "int4")
        assert torch.equal(held.unpack(), weight)
        assert torch.equal(held.rows(2, 19), weight[2:19])
    with pytest.raises(ValueError, match=r"\[-8, 7\], got \[0, 8\]"):
        packed.pack(lib, torch.arange(9, dtype=torch.int8)[None], "int4")


def test_large_weights_are_exact_and_begin_with_a_page(lib: library.Library) -> None:
    """Memory past 2 MiB is asked for in large pages: nothing of it may be left out or overlap."""
    weight, small = random_int8(2053, 1100), int4(2053, 2100)
    held = [packed.pack(lib, weight, "int8"), packed.pack(lib, small, "int4"), packed.pack(lib, weight.float())]
    for ours, theirs in zip(held, (weight, small, weight.float()), strict=True):
        assert ours.data.data_ptr() % (2 << 20) == 0
        assert torch.equal(ours.unpack(), theirs)
    reused = weight[:2048].float()
    assert torch.equal(packed.pack(lib, reused.clone(), reuse=True).unpack(), reused)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [None, 8, 32, 40, 64, 128])
def test_int4_products_are_the_twins(lib: library.Library, shape: tuple, group: int | None) -> None:
    m, n, k = shape
    group_size = group or max(1, k)
    x, weight = torch.randn(m, k) * 3, int4(n, k)
    if m > 2 and k:
        x[1] = 0
        x[2] = torch.where(torch.rand(k) < 0.5, -1.0, 1.0)
    scale, bias = torch.rand(n, groups_of(k, group_size)), torch.randn(n)
    for s in (scale, scale.t().contiguous().t(), scale.half(), scale.bfloat16()):
        ours, theirs = pair(lib, weight, "int4", s, group_size, bias=bias, activations="int8")
        assert same(linear.linear(lib, x, ours), reference.linear(x, theirs))
        assert same(product(lib, x, ours, bias=None), reference.linear(x, dataclasses.replace(theirs, bias=None)))


# Rows: around where matrix tiles begin, and more than one block of them, each with a rest; of k and of panels too.
@pytest.mark.parametrize(("m", "n", "k"), [(18, 70, 2100), (27, 33, 1120), (44, 33, 1120), (600, 70, 1056)])
def test_integer_products_in_many_blocks_are_the_twins(lib: library.Library, m: int, n: int, k: int) -> None:
    x, weight, small = torch.randn(m, k), random_int8(n, k), int4(n, k)
    ours, theirs = pair(lib, weight, "int8", torch.rand(n, 1), activations="int8")
    assert same(linear.linear(lib, x, ours), reference.linear(x, theirs))
    for group in (32, 64, 96, 128, 1024, k):
        ours, theirs = pair(lib, small, "int4", torch.rand(n, groups_of(k, group)), group, activations="int8")
        assert same(linear.linear(lib, x, ours), reference.linear(x, theirs))


def test_the_worst_int4_sums_do_not_overflow(lib: library.Library) -> None:
    for activation, value in ((1.0, 7), (-1.0, 7), (1.0, -8), (-1.0, -8)):
        x, weight = torch.full((2, 4096), activation), torch.full((17, 4096), value, dtype=torch.int8)
        held = packed.pack(lib, weight, "int4").scaled(torch.ones(17, 1))
        y = product(lib, x, held, activations="int8")
        assert same(y, torch.full((2, 17), activation * 127 * value * 4096 * (1 / 127)).float().round())


def error_bound(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Of scaled sums, [M, N] in float64: their roundings times the magnitudes that are rounded."""
    size = weight.group_size or max(1, weight.k)
    columns = torch.arange(weight.k) // size
    values = unscaled(weight).double().abs()
    if weight.zero is not None:
        values = values + weight.zero.double().abs()[:, columns]
    scales = weight.scales.double().abs()[:, columns]
    values = values * scales
    if weight.minimum is not None:
        values = values + weight.minimum.double().abs()[:, columns] + LEAST[weight.kind] * scales
    roundings = min(size, weight.k) + 3 * groups_of(weight.k, size) + 2
    return 1.01 * roundings * 2.0**-24 * (x.double().abs() @ values.t())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [None, 5, 32])
@pytest.mark.parametrize("bits", [8, 4])
def test_weight_only_products_are_scaled_sums(lib: library.Library, shape: tuple, group: int | None, bits: int) -> None:
    m, n, k = shape
    group_size = group or max(1, k)
    x, weight = torch.randn(m, k), random_int8(n, k) if bits == 8 else int4(n, k)
    groups = groups_of(k, group_size)
    scale, zero, bias = torch.rand(n, groups), torch.randint(-8, 8, (n, groups)).float(), torch.randn(n)
    for z in (None, zero):
        held = packed.pack(lib, weight, f"int{bits}").scaled(scale, z, group_size)
        expected = scaled_sums(lib, x, held)
        assert same(held.dequantize(), dequantize(weight, scale, z, group_size))
        assert ((expected - x.double() @ held.dequantize().double().t()).abs() <= error_bound(x, held)).all()
        assert same(product(lib, x, held, bias=bias), expected + bias)
        assert same(linear.linear(lib, x, held), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [None, 5, 32])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_with_minima_are_scaled_sums(lib: library.Library, shape: tuple, group: int | None, bits: int) -> None:
    m, n, k = shape
    group_size = group or max(1, k)
    x, weight = torch.randn(m, k), random_int8(n, k) if bits == 8 else int4(n, k)
    scale, minimum = torch.randn(n, groups_of(k, group_size)), torch.randn(n, groups_of(k, group_size))
    for low in (minimum, minimum.half()):
        held = packed.pack(lib, weight, f"int{bits}").scaled(scale, None, group_size, low)
        twin = reference.pack(weight, f"int{bits}").scaled(scale, None, group_size, low)
        columns = torch.arange(k) // group_size
        codes = weight.double() + {4: 8, 8: 16}[bits]
        exact = codes * scale.double()[:, columns] - low.double()[:, columns]
        assert same(held.dequantize(), exact.float()) and same(twin.dequantize(), exact.float())
        assert same(linear.linear(lib, x, held), expected := scaled_sums(lib, x, held))
        assert ((expected - x.double() @ exact.t()).abs() <= error_bound(x, held)).all()
        ids = torch.tensor([n - 1, 0, n // 2])
        assert same(linear.embedding(lib, ids, held), exact.float()[ids])
        assert same(reference.embedding(ids, twin), exact.float()[ids])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("m", [0, 1, 37])
def test_columns_in_another_order_multiply_their_own_inputs(lib: library.Library, m: int, bits: int) -> None:
    """Every product, with float and with int8 activations, is the one of permuted inputs; `same` means the bits."""
    n, k, group = 33, 77, 77 if bits == 8 else 16
    x, weight = torch.randn(m, k), random_int8(n, k) if bits == 8 else int4(n, k)
    order, scale = torch.randperm(k), torch.rand(n, groups_of(k, group))
    for activations in ("float", "int8"):
        held = packed.pack(lib, weight, f"int{bits}").scaled(scale, None, group)
        moved = held.scaled(scale, None, group, columns=order.int())
        expected = product(lib, x[:, order].contiguous(), held, activations=activations)
        assert same(product(lib, x, moved, activations=activations), expected)
        assert same(moved.dequantize()[:, order], held.dequantize())
    twin = reference.pack(weight, f"int{bits}").scaled(scale, None, group, columns=order.int())
    assert same(expected, reference.linear(x, dataclasses.replace(twin, activations="int8")))


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_integers_in_groups_by_id(lib: library.Library, bits: int) -> None:
    n, k = 37, 75
    weight = random_int8(n, k) if bits == 8 else int4(n, k)
    ids = torch.tensor([[36, 0], [17, 17]])
    for group in (8, 5, k):
        scale, zero = torch.randn(n, groups_of(k, group)), torch.randint(-8, 8, (n, groups_of(k, group))).float()
        for z in (None, zero):
            held = packed.pack(lib, weight, f"int{bits}").scaled(scale, z, group)
            assert same(linear.embedding(lib, ids, held), dequantize(weight, scale, z, group)[ids])
    with pytest.raises(ValueError, match="needs its scales"):
        linear.embedding(lib, ids, packed.pack(lib, weight, f"int{bits}"))


def values_of(lib: library.Library, n: int, k: int) -> dict[str, packed.PanelWeight]:
    """Every code of weights with scales that bfloat16 holds exactly, without scales."""
    nibbles = packed.pack(lib, int4(n, k), "int4")
    return {
        "int8": packed.pack(lib, random_int8(n, k), "int8"),
        "int4": nibbles,
        "table of wholes": dataclasses.replace(nibbles, table=torch.arange(16.0) ** 2 - 100),
        "table of floats": dataclasses.replace(nibbles, table=torch.randn(16).bfloat16().float()),
        "float8": packed.pack(lib, torch.randn(n, k).to(torch.float8_e4m3fn)),
    }


# Whole steps and not, few rows and many, tiles of 12 and fewer rows, one block of k and more.
@pytest.mark.parametrize(
    "shape", [(0, 3, 5), (1, 17, 5), (1, 70, 96), (5, 33, 520), (12, 17, 136), (13, 40, 64), (40, 33, 1096)]
)
def test_weight_only_products_round_activations_where_the_weight_says_so(lib: library.Library, shape: tuple) -> None:
    m, n, k = shape
    x, bias = torch.randn(m, k), torch.randn(n)
    for name, values in values_of(lib, n, k).items():
        for group in (k, 32, 12):
            scale, zero = torch.rand(n, groups_of(k, group)), torch.randint(-8, 8, (n, groups_of(k, group))).float()
            forms = [values.scaled(scale, None, group)]
            if name in ("int8", "int4"):
                forms += [values.scaled(scale, zero, group), values.scaled(scale, None, group, torch.rand(zero.shape))]
            for held in forms:
                rounded = dataclasses.replace(held, activations="bfloat16")
                expected = scaled_sums(lib, x.bfloat16().float(), held)
                assert same(linear.linear(lib, x, rounded), expected), (name, group)
                assert same(product(lib, x, rounded, bias=bias), expected + bias), (name, group)
                assert not m or not same(linear.linear(lib, x, held), expected)


def test_rounding_follows_rotation_and_the_order_of_columns(lib: library.Library) -> None:
    n, k = 33, 96
    x, q, scale = torch.randn(7, k), int4(n, k), torch.rand(n, 3)
    plain = dataclasses.replace(packed.pack(lib, q, "int4").scaled(scale, None, 32), activations="bfloat16")
    order = torch.randperm(k)
    moved, rotated = plain.scaled(scale, None, 32, columns=order.int()), plain.scaled(scale, None, 32, rotation=32)
    assert same(linear.linear(lib, x, moved), linear.linear(lib, x[:, order].contiguous(), plain))
    assert same(linear.linear(lib, x, rotated), linear.linear(lib, rotate(x, 32), plain))
    twin = dataclasses.replace(reference.pack(q, "int4").scaled(scale, None, 32, rotation=32), activations="bfloat16")
    assert torch.allclose(reference.linear(x, twin), linear.linear(lib, x, rotated), atol=1e-4)
    rounded_before = reference.linear(x.bfloat16().float(), dataclasses.replace(twin, activations="float"))
    assert not torch.allclose(rounded_before, linear.linear(lib, x, rotated), atol=1e-3)


def test_rounding_keeps_a_row_that_is_not_finite_for_itself(lib: library.Library) -> None:
    for name, values in values_of(lib, 20, 72).items():
        held = dataclasses.replace(values.scaled(torch.rand(20, 3), None, 24), activations="bfloat16")
        x = torch.randn(14, 72)
        clean = linear.linear(lib, x, held)
        x[1, 3], x[13, 71] = float("nan"), float("inf")
        y = linear.linear(lib, x, held)
        assert y[1].isnan().all() and not y[13].isfinite().any(), name
        assert same(torch.cat((y[:1], y[2:13])), torch.cat((clean[:1], clean[2:13]))), name


# Few rows and many, one block of k and more, one block of rows and more (the last).
@pytest.mark.parametrize(
    "shape", [(1, 300, 64), (3, 100, 288), (6, 33, 520), (7, 40, 512), (9, 300, 64), (12, 17, 136), (100, 17, 2744)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_weight_only_products_in_many_blocks_are_scaled_sums(lib: library.Library, shape: tuple, bits: int) -> None:
    m, n, k = shape
    x, weight, bias = torch.randn(m, k), random_int8(n, k) if bits == 8 else int4(n, k), torch.randn(n)
    bits_alone = packed.pack(lib, weight, f"int{bits}")
    for group in (k, 32, 8, 4):
        scale = torch.rand(n, -(-k // group)) * torch.logspace(-44, 30, n)[:, None]  # denormal ones too
        sums = group_sums(lib, x, bits_alone.scaled(scale, None, group))
        zero = torch.randint(-128, 128, scale.shape).float()
        for scales in (scale, scale.bfloat16(), torch.rand(scale.shape).half()):
            for zeros in (None, zero, zero.bfloat16(), zero * 0.37):
                held = bits_alone.scaled(scales, zeros, group)
                assert held.scale is not None and held.scale.dtype == scales.dtype  # read as it is
                assert same(product(lib, x, held, bias=bias), add_groups(sums, x, held) + bias)


@pytest.mark.parametrize("k", [1, 15, 16, 17, 100])
def test_quantized_activations_are_the_twins(lib: library.Library, k: int) -> None:
    x = torch.randn(12, k) * torch.logspace(-44, 37, 12)[:, None]
    x[3] = 0
    x[4] = torch.arange(k) + 0.5  # ties
    for row, value in ((5, float("nan")), (6, float("inf")), (7, float("-inf"))):
        x[row, k // 2] = value
    for ours, theirs in zip(linear.quantize_per_token(lib, x), quantize_per_token(x), strict=True):
        assert same(ours, theirs)
    for scale, offset in ((0.1, 0), (1.0, -128), (1e-30, 7)):
        assert same(linear.quantize_static(lib, x, scale, offset), quantize_static(x, scale, offset))


def test_quotients_are_those_of_a_division(lib: library.Library) -> None:
    """Halves of a row's scale and their neighbours, of all magnitudes: where a product with 1 / scale goes wrong."""
    exponents = torch.tensor([-149, -140, -126, -100, -61, -60, -59, -20, 0, 20, 59, 60, 61, 100, 120]).repeat(20)
    most = (1 + torch.rand(len(exponents), 1)) * 2.0 ** exponents.float()[:, None]
    scale = most / 127
    x = (torch.arange(-126, 126) + 0.5) * scale
    nearby = [x, *(torch.nextafter(x, x + sign * most) for sign in (-1, 1))]
    x = torch.cat([most, *nearby], dim=1)
    q, scales = linear.quantize_per_token(lib, x)
    expected, _ = quantize_per_token(x)
    assert same(scales, scale[:, 0]) and same(q, expected)
    assert not same((x * (1 / scale)).round().clamp(-128, 127).nan_to_num().to(torch.int8), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("static", [{}, {"input_scale": 0.05, "input_offset": -3}])
def test_a_row_that_is_not_finite_says_so(lib: library.Library, static: dict[str, Any], value: float) -> None:
    """A few rows, and as many as matrix tiles take."""
    held, twin = pair(lib, random_int8(17, 20), "int8", torch.ones(17, 1), activations="int8", **static)
    for rows in (3, 20):
        x = torch.randn(rows, 20)
        clean = linear.linear(lib, x, held)
        x[1, 4] = value
        y = linear.linear(lib, x, held)
        others = [row for row in range(rows) if row != 1]
        assert y[1].isnan().all() and same(y[others], clean[others])
        assert same(reference.linear(x, twin), y)


def test_rows_of_an_int8_table(lib: library.Library) -> None:
    table, ids = random_int8(53, 19), torch.tensor([0, 52, 16, 15, 7, 7])
    for scale in (torch.rand(53, 1), torch.rand(53, 1).half(), torch.rand(53, 1).bfloat16()):
        ours, theirs = pair(lib, table, "int8", scale)
        assert same(linear.embedding(lib, ids, ours), reference.embedding(ids, theirs))
        assert same(linear.embedding(lib, ids, ours), table[ids].float() * scale[ids].float())
    with pytest.raises(IndexError):
        linear.embedding(lib, torch.tensor([53]), ours)
    with pytest.raises(ValueError, match="a weight of int8 needs its scales"):
        linear.embedding(lib, ids, packed.pack(lib, table, "int8"))


# Invariance: a row's bits are its own


def products(lib: library.Library, n: int, k: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Every product with a weight [n, k], as a function of the rows."""
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    bias = torch.randn(n)

    def add(name: str, weight: packed.PanelWeight, **parts: Any) -> None:
        held = dataclasses.replace(weight, bias=bias, **parts)
        found[name] = lambda x: linear.linear(lib, x, held)

    for dtype in FLOATS:
        add(str(dtype), packed.pack(lib, torch.randn(n, k).to(dtype)))
    add("bfloat16, rounded", packed.pack(lib, torch.randn(n, k).bfloat16()), activations="bfloat16")
    int8, small = packed.pack(lib, random_int8(n, k), "int8"), packed.pack(lib, int4(n, k), "int4")
    float8 = packed.pack(lib, torch.randn(n, k).to(torch.float8_e4m3fn))
    per_row = int8.scaled(torch.rand(n, 1))
    add("w8a8_dynamic", per_row, activations="int8")
    add("w8a8_static", per_row, activations="int8", input_scale=0.03, input_offset=3)
    for group in (32, k):
        scale, zero = torch.rand(n, -(-k // group)), torch.randn(n, -(-k // group))
        add(f"w4a8 {group}", small.scaled(scale, None, group), activations="int8")
        for activations in ("float", "bfloat16"):
            rounding = " rounded" if activations == "bfloat16" else ""
            add(f"w8a16 {group}{rounding}", int8.scaled(scale, zero, group), activations=activations)
            add(f"w4a16 {group}{rounding}", small.scaled(scale, zero, group), activations=activations)
            add(f"float8 {group}{rounding}", float8.scaled(scale, None, group), activations=activations)
        for name, table in (("floats", torch.randn(16)), ("wholes", torch.arange(16.0) ** 2 - 100)):
            add(f"table of {name} {group}", small.scaled(scale, None, group), table=table)
    return found


def variant_rows(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[str]:
    """Where a row of x differs between the whole product and some part of it."""
    whole = product(x)
    rows = x.shape[0]
    parts = [slice(row, row + 1) for row in range(rows)]
    parts += [slice(start, start + count) for count in range(2, 18) for start in (0, 5) if start + count <= rows]
    return [f"rows {part.start} to {part.stop}" for part in parts if not same(product(x[part]), whole[part])]


@pytest.mark.parametrize(("n", "k"), [(64, 96), (901, 131)])
def test_each_row_alone_is_each_row_in_company(lib: library.Library, n: int, k: int) -> None:
    x = torch.randn(61, k)
    for name, product in products(lib, n, k).items():
        assert variant_rows(product, x) == [], name


def test_place_and_memory_do_not_matter(lib: library.Library) -> None:
    x = torch.randn(29, 77)
    order = torch.randperm(29)
    shifted = torch.empty(29 * 77 + 1)[1:].view(29, 77).copy_(x)  # not aligned to a vector
    for name, product in products(lib, 85, 77).items():
        whole = product(x)
        assert same(product(x[order]), whole[order]), name
        assert same(product(shifted), whole), name


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_number_of_threads_does_not_matter(lib: library.Library, rows: int, threads: Callable[[int], None]) -> None:
    x = torch.randn(rows, 130)
    for name, product in products(lib, 333, 130).items():
        threads(1)
        alone = product(x)
        for count in (2, 3, 5):
            threads(count)
            assert same(product(x), alone), (name, count)


def test_all_instruction_sets_give_the_same_bits(lib: library.Library, plain: library.Library) -> None:
    """Matrix tiles have a chain of their own for bfloat16 weights."""
    x = torch.randn(23, 143)
    torch.manual_seed(1)
    ours = products(lib, 77, 143)
    torch.manual_seed(1)
    theirs = products(plain, 77, 143)
    for name in ours:
        equal = same(ours[name](x), theirs[name](x))
        assert equal != (lib.has_tiles and "bfloat16" in name), name


WEIGHTS = ("gemm_float", "gemm_int8", "gemm_int4", "gemm_int4_tiles", "gemm_weight_only", "linear")


def products_alone(target: str, folder: Path, plant: Callable[[str], str], *flags: str) -> library.Library:
    """What products with weights are compiled from; of gemm_float.cpp what `plant` makes of it."""
    needed = {*WEIGHTS, "memory", "replay", "threads"}
    others = [path.name for path in build.sources() if path.stem not in needed]
    sources = Path(shutil.copytree(build.SOURCE_FOLDER, folder / "sources", ignore=shutil.ignore_patterns(*others)))
    path = sources / "gemm_float.cpp"
    path.write_text(plant(path.read_text()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCE_FOLDER", sources)
        build.compile_library(folder / "library.so", target, build.find_compiler(), flags)
        names = ("llm_linear", "llm_pack", "llm_unpack")
        patch.setattr(library, "KERNELS", {name: KERNELS[name] for name in names})
        patch.setattr(library, "mismatches", lambda handle: [])
        return library.Library(target, folder / "library.so")


@pytest.mark.skipif("avx2_vnni" not in build.supported_targets(), reason="the processor lacks AVX-VNNI")
def test_integer_products_with_avx_vnni_are_the_twins(tmp_path: Path) -> None:
    """All that this target compiles in its own way."""
    lib = products_alone("avx2_vnni", tmp_path, lambda text: text)
    for m, n, k in (*SHAPES, (61, 130, 1100)):
        x, bias, weight, small = torch.randn(m, k) * 3, torch.randn(n), random_int8(n, k), int4(n, k)
        for parts in ({}, {"input_scale": 0.05, "input_offset": -3}):
            ours, theirs = pair(lib, weight, "int8", torch.rand(n, 1), bias=bias, activations="int8", **parts)
            assert same(linear.linear(lib, x, ours), reference.linear(x, theirs)), (m, n, k)
        for group in (8, 32, 128, max(1, k)):
            scales = torch.rand(n, groups_of(k, group))
            ours, theirs = pair(lib, small, "int4", scales, group, bias=bias, activations="int8")
            assert same(linear.linear(lib, x, ours), reference.linear(x, theirs)), (m, n, k)


@pytest.fixture(scope="module")
def reordered(tmp_path_factory: pytest.TempPathFactory) -> library.Library:
    """The plain kernels with a planted defect: more than one row is reduced from the last k to the first."""

    def plant(text: str) -> str:
        planted = text.replace("add(s, ORDER", "add(ROWS > 1 ? steps - 1 - s : s, ORDER")
        assert planted != text
        return planted

    return products_alone("plain", tmp_path_factory.mktemp("reordered"), plant, "-O1")


def test_a_planted_reordering_is_seen(reordered: library.Library, plain: library.Library) -> None:
    x, weight = torch.randn(12, 50), torch.randn(32, 50)

    def with_weight(lib: library.Library) -> Callable[[torch.Tensor], torch.Tensor]:
        held = packed.pack(lib, weight)
        return lambda rows: linear.linear(lib, rows, held)

    assert variant_rows(with_weight(plain), x) == []
    assert len(variant_rows(with_weight(reordered), x)) >= 12
    assert not same(with_weight(reordered)(x), chain(x, weight))


@pytest.mark.parametrize(("n", "k", "group_size"), [(70, 96, 32), (33, 256, 64), (20, 100, 0), (48, 64, 8)])
@pytest.mark.parametrize("part", ["zero", "minimum"])
def test_int4_with_zero_points_or_minima_under_int8_activations(
    lib: library.Library, n: int, k: int, group_size: int, part: str
) -> None:
    """The definition's bits for any number of rows, close to the exact product, and NaN stays in its row."""
    size = group_size or k
    q, groups = random_int8(n, k, -8, 7), groups_of(k, size)
    scale = (0.01 * (torch.rand(n, groups) + 0.5)).bfloat16().float()
    shift = random_int8(n, groups, -8, 7).float() * (scale if part == "minimum" else 1.0)
    shift = shift.half().float() if part == "minimum" else shift
    parts = {"zero": None, "minimum": None, part: shift}
    weights = [pack(q, "int4") for pack in (reference.pack, lambda *given: packed.pack(lib, *given))]
    defined, fast = (
        dataclasses.replace(
            weight.scaled(scale, parts["zero"], size, parts["minimum"]),
            activations="int8",
        )
        for weight in weights
    )
    x = torch.randn(40, k)
    expected = reference.linear(x, defined)
    for rows in (1, 2, 5, 13, 40):
        assert same(linear.linear(lib, x[:rows], fast), expected[:rows])
    exact = x.double() @ defined.dequantize().double().t()
    assert float((expected - exact).norm() / exact.norm()) < 0.02
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    y = linear.linear(lib, x, fast)
    assert y[1:3].isnan().all() and y[0].isfinite().all() and y[3:].isfinite().all()
