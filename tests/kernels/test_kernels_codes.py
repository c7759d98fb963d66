"""Weights of 8-bit floats and of codes that select one of 16 values: exact against PyTorch's own conversion, and GEMMs
bit for bit the scaled sums of their definition.

Every test runs on each instruction set of kernel_sets.TARGETS. That a row's bits are its own is test_kernels_cpu.py's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from definitions import scaled_sums
from kernel_sets import has_kernels

from llm.kernels.cpu import library, linear, packed
from llm.kernels.reference import linear as reference
from llm.kernels.weight import Weight

pytestmark = [pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none"), pytest.mark.usefixtures("seeded")]

FLOAT8 = torch.float8_e4m3fn
# The two values of NaN, 0x7f and 0xff, are left out.
EVERY_FLOAT8 = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8).view(FLOAT8)
# AVX2 looks whole numbers up in one byte, and other values in four.
TABLES = {
    "wholes": torch.tensor([-128.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127]),
    "fp4": torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12.0]),
    "floats": torch.linspace(-1, 1, 16).sinh(),
    "nearly whole": torch.arange(16.0) + 0.5,
    "too large": torch.arange(16.0) * 10,
}
# m, n, k, group size: few rows and many, whole steps and parts of one, groups that end within a step.
SHAPES = [
    (1, 300, 64, 32),
    (3, 37, 75, 5),
    (6, 33, 520, 128),
    (11, 33, 520, 128),
    (12, 37, 64, 32),
    (13, 17, 40, 40),
    (40, 20, 264, 8),
    (2, 16, 3, 2),
]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def spread(values: torch.Tensor, size: int) -> torch.Tensor:
    """[N, G] -> a column for each k of [N, G * size]."""
    return values.float().repeat_interleave(size, dim=1)


def floats_of(n: int, k: int) -> torch.Tensor:
    return EVERY_FLOAT8[torch.randint(len(EVERY_FLOAT8), (n, k))]


def random_scale(n: int, k: int, size: int) -> torch.Tensor:
    """Of all magnitudes, denormal ones too."""
    return torch.rand(n, -(-k // size)) * torch.logspace(-44, 30, n)[:, None]


def check(lib: library.Library, ours: packed.PanelWeight, twin: Weight, exact: torch.Tensor, m: int) -> None:
    """`exact` [N, K] is what the weight stands for."""
    n, k = exact.shape
    ids = torch.tensor([n - 1, 0, n // 2])
    for size in (1.0, 2.0**-140, 2.0**60):
        x, bias = size * torch.randn(m, k), size * torch.randn(n)
        expected = scaled_sums(lib, x, ours) + bias
        assert torch.equal(bits(linear.linear(lib, x, replace(ours, bias=bias))), bits(expected))
    assert torch.equal(ours.dequantize(), exact) and torch.equal(twin.dequantize(), exact)
    assert torch.equal(linear.embedding(lib, ids, ours), exact[ids])
    assert torch.equal(reference.embedding(ids, twin), exact[ids])


def test_every_value_of_an_8_bit_float(lib: library.Library) -> None:
    """A product with the unit matrix; each code is met at every place of a step."""
    weight = torch.stack([EVERY_FLOAT8.view(torch.uint8).roll(shift).view(FLOAT8) for shift in range(5)]).t()
    ours = packed.pack(lib, weight.contiguous())
    for scale in (torch.ones(len(weight), 1), torch.full((len(weight), 1), 0.3)):
        expected = weight.float() * scale
        found = linear.linear(lib, torch.eye(5), ours.scaled(scale)).t()
        assert torch.equal(found, expected)
    assert torch.equal(ours.unpack().view(torch.uint8), weight.view(torch.uint8))
    wrong = (weight.float() - weight.float().sign() * 2**-9) * 0.3
    assert not torch.equal(found, wrong)  # a difference of the least denormal number is seen


@pytest.mark.parametrize(("m", "n", "k", "size"), SHAPES)
def test_products_with_8_bit_floats(lib: library.Library, m: int, n: int, k: int, size: int) -> None:
    weight = floats_of(n, k)
    for scale in (random_scale(n, k, size), torch.rand(n, -(-k // size)).bfloat16()):
        ours, twin = (pack.scaled(scale, None, size) for pack in (packed.pack(lib, weight), reference.pack(weight)))
        check(lib, ours, twin, weight.float() * spread(scale, size)[:, :k], m)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("m", "n", "k", "size"), SHAPES)
def test_products_with_a_table(lib: library.Library, name: str, m: int, n: int, k: int, size: int) -> None:
    codes, table = torch.randint(-8, 8, (n, k), dtype=torch.int8), TABLES[name]
    scale = random_scale(n, k, size)
    ours, twin = (
        replace(pack.scaled(scale, None, size), table=table)
        for pack in (packed.pack(lib, codes, "int4"), reference.pack(codes, "int4"))
    )
    check(lib, ours, twin, table[codes.long() + 8] * spread(scale, size)[:, :k], m)
    other = replace(ours, table=table.flip(0))
    assert not torch.equal(other.dequantize(), ours.dequantize())


def test_what_is_no_8_bit_weight_is_refused(lib: library.Library) -> None:
    weight = floats_of(17, 8)
    ours, scale = packed.pack(lib, weight), torch.ones(17, 1)
    with pytest.raises(ValueError, match="a weight of float8 needs its scales"):
        linear.linear(lib, torch.ones(1, 8), ours)
    with pytest.raises(
        ValueError, match="of 8-bit floats has neither zero points, minima, a table and levels, got zero"
    ):
        ours.scaled(scale, scale)
    with pytest.raises(ValueError, match="int8 activations with 8-bit floats"):
        replace(ours.scaled(scale), activations="int8")
    for pack in (reference.pack, lambda values: packed.pack(lib, values)):
        for code in (0x7F, 0xFF):
            broken = weight.view(torch.uint8).clone()
            broken[3, 5] = code
            with pytest.raises(ValueError, match="values that are NaN"):
                pack(broken.view(FLOAT8))
        with pytest.raises(ValueError, match="float8_e5m2"):
            pack(weight.to(torch.float8_e5m2))
