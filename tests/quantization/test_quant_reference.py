"""The reference of the quantized operations: packing bit by bit, integers exactly, floats against float64.

Kernels of other folders are held against these in `test_kernels_*`.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.kernels.reference import linear as ref
from llm.kernels.reference.linear import embedding, linear, pack
from llm.kernels.weight import Weight, dequantize, fused_multiply_add

pytestmark = pytest.mark.usefixtures("one_core")

seeds = st.integers(0, 2**31)
quick = settings(max_examples=25)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


def integers(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=generator(seed), dtype=torch.int8)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def int8_product(w: torch.Tensor, scale: torch.Tensor, **parts: Any) -> Weight:
    """A weight [N, K] with scales [N] whose products quantize their activations."""
    return replace(pack(w, "int8").scaled(scale[:, None]), activations="int8", **parts)


# Packing


def test_int4_bytes_by_hand() -> None:
    packed = pack(torch.tensor([[-8, 7, -1, 0, 3]], dtype=torch.int8), "int4")
    assert packed.data.view(torch.uint8).tolist() == [[0x78, 0x0F, 0x03]]
    assert packed.unpack().tolist() == [[-8, 7, -1, 0, 3]]


@quick
@given(seeds, st.integers(1, 9), st.integers(1, 37))
def test_packing_is_exact(seed: int, n: int, k: int) -> None:
    small, large, real = integers(seed, -8, 7, n, k), integers(seed, -128, 127, n, k), normal(seed, n, k)
    assert torch.equal(pack(small, "int4").unpack(), small)
    assert pack(small, "int4").nbytes == n * ((k + 1) // 2)
    assert torch.equal(pack(large, "int8").unpack(), large)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(pack(real.to(dtype)).unpack(), real.to(dtype))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("int4", torch.tensor([[8]], dtype=torch.int8)),
        ("int4", torch.tensor([[-9]], dtype=torch.int8)),
        ("int8", torch.ones(2, 2)),
        (None, torch.ones(2, 2, dtype=torch.int8)),
        ("int8", torch.ones(2, dtype=torch.int8)),
        (None, torch.ones(2, 2, dtype=torch.float64)),
    ],
)
def test_what_cannot_be_packed_is_refused(kind: str | None, values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"int4 values|a weight is"):
        pack(values, kind)


# Activations


def test_per_token_by_hand() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [-254.0, 1.0, 3.0, 5.0]])
    q, scale = ref.quantize_per_token(x)
    assert scale.tolist() == [1.0, 0.0, 2.0]
    assert q.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [-127, 0, 2, 2]]


def test_static_by_hand() -> None:
    q = ref.quantize_static(torch.tensor([0.5, 1.5, -1.25, 1e9, -1e9, 0.0]), 0.5, -3)
    assert q.tolist() == [-2, 0, -5, 127, -128, -3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_poisoned_row_stays_poisoned_and_alone(bad: float) -> None:
    x = normal(0, 3, 8)
    weight = int8_product(integers(1, -9, 9, 4, 8), torch.ones(4))
    clean = linear(x, weight)
    x[1, 2] = bad
    out = linear(x, weight)
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


# Products


@quick
@given(seeds, st.integers(0, 5), st.integers(1, 40), st.integers(1, 2100))
def test_integer_products_are_exact(seed: int, m: int, n: int, k: int) -> None:
    q, w = integers(seed, -128, 127, m, k), integers(seed + 1, -128, 127, n, k)
    assert torch.equal(ref.int_matmul(q, pack(w, "int8")).long(), q.long() @ w.long().t())
    small = w.clamp(-8, 7)
    assert torch.equal(ref.int_matmul(q, pack(small, "int4")).long(), q.long() @ small.long().t())


def test_the_largest_sums_are_exact() -> None:
    q, w = torch.full((1, 4096), -128, dtype=torch.int8), torch.full((1, 4096), -128, dtype=torch.int8)
    w[0, 0] = -127
    assert ref.int_matmul(q, pack(w, "int8")).item() == 128 * 128 * 4096 - 128


@quick
@given(seeds, st.integers(1, 4), st.integers(1, 20), st.integers(1, 70), st.booleans())
def test_w8a8_against_float64(seed: int, m: int, n: int, k: int, with_bias: bool) -> None:
    x, w, scale = normal(seed, m, k), integers(seed, -128, 127, n, k), normal(seed + 1, n).abs() + 0.1
    bias = normal(seed + 2, n) if with_bias else None
    extra = 0 if bias is None else bias.double()
    q, xs = ref.quantize_per_token(x)
    expected = (q.double() @ w.double().t()) * xs.double()[:, None] * scale.double() + extra
    assert relative_error(linear(x, int8_product(w, scale, bias=bias)), expected) < 1e-5
    static = ref.quantize_static(x, 0.02, 7)
    expected = ((static.double() - 7) @ w.double().t()) * torch.tensor(0.02).double() * scale.double() + extra
    weight = int8_product(w, scale, bias=bias, input_scale=0.02, input_offset=7)
    assert relative_error(linear(x, weight), expected) < 1e-5


@quick
@given(seeds, st.integers(1, 4), st.integers(1, 20), st.integers(1, 4), st.sampled_from([2, 5, 32]), st.booleans())
def test_grouped_against_float64(seed: int, m: int, n: int, groups: int, size: int, ragged: bool) -> None:
    k = groups * size - (size // 2 if ragged else 0)
    x, w = normal(seed, m, k), integers(seed, -8, 7, n, k)
    scale, zero = normal(seed + 1, n, groups).abs() + 0.1, integers(seed + 2, -8, 7, n, groups)
    column = torch.arange(k) // size
    parts = [ref.quantize_per_token(part) for part in x.split(size, dim=1)]  # each group has a scale of its own
    rounded = torch.cat([q.double() * xs.double()[:, None] for q, xs in parts], dim=1)
    for shift in (None, zero):
        packed = pack(w, "int4").scaled(scale, shift, size)
        values = (w.double() - (0 if shift is None else shift.double()[:, column])) * scale.double()[:, column]
        assert relative_error(linear(x, replace(packed, activations="int8")), rounded @ values.t()) < 1e-5
    expected = x.double() @ ((w.double() - zero.double()[:, column]) * scale.double()[:, column]).t()
    for kind in ("int8", "int4"):
        assert relative_error(linear(x, pack(w, kind).scaled(scale, zero, size)), expected) < 1e-5


floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**40), max_value=2.0**40)


@quick
@given(floats, floats, floats)
def test_fused_multiply_add_rounds_once(x: float, y: float, z: float) -> None:
    a, b, c = (torch.tensor([value], dtype=torch.float32) for value in (x, y, z))
    exact = Fraction(a.item()) * Fraction(b.item()) + Fraction(c.item())
    got = fused_multiply_add(a, b, c)
    error = abs(Fraction(got.item()) - exact)
    for neighbour in (torch.nextafter(got, torch.tensor(torch.inf)), torch.nextafter(got, torch.tensor(-torch.inf))):
        assert error <= abs(Fraction(neighbour.item()) - exact)


def test_fused_multiply_add_where_two_roundings_differ() -> None:
    # The sum lies 2**-70 below a tie of float32; float64 rounds it onto the tie.
    a, b, c = (torch.tensor([value]) for value in (1 + 2.0**-23, 2.0**-24 * (1 - 2.0**-23), 1 + 2.0**-23))
    assert fused_multiply_add(a, b, c).item() == 1 + 2.0**-23
    assert (a.double() * b.double() + c.double()).float().item() == 1 + 2.0**-22


def test_embedding_reads_rows() -> None:
    w, scale, ids = integers(0, -128, 127, 9, 5), normal(1, 9).abs(), torch.tensor([8, 0, 8])
    table = pack(w, "int8").scaled(scale[:, None])
    assert torch.equal(embedding(ids, table), w[ids].float() * scale[ids][:, None])
    small = pack(w.clamp(-8, 7), "int4").scaled(normal(2, 9, 3).abs(), integers(3, -8, 7, 9, 3), 2)
    assert torch.equal(embedding(ids, small), small.dequantize()[ids])
    assert torch.equal(embedding(ids, pack(normal(4, 9, 5).bfloat16())), normal(4, 9, 5).bfloat16()[ids].float())
    for bad in (9, -1):
        with pytest.raises(IndexError):
            embedding(torch.tensor([bad]), table)


def test_dequantize_spells_the_formula() -> None:
    w = torch.tensor([[1, 2, 3, 4]], dtype=torch.int8)
    scale, zero = torch.tensor([[2.0, 10.0]]), torch.tensor([[1, 3]])
    assert dequantize(w, scale, zero, 2).tolist() == [[0.0, 2.0, 0.0, 10.0]]
    assert dequantize(w, torch.tensor([0.5])).tolist() == [[0.5, 1.0, 1.5, 2.0]]
