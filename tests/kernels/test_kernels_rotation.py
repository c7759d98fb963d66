"""Rotated int8 weights: kernels give the definition's bits, and outliers cost next to nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_sets import ISAS, kernel_set, needs_compiler

from llm.kernels.reference import linear as reference
from llm.kernels.reference import quantize_weight as reference_quantize
from llm.kernels.reference.rotation import block_for, rotate
from llm.kernels.weight import Weight

pytestmark = needs_compiler
SIZES = [(576, 64), (1536, 256), (48, 16), (384, 128), (96, 32)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(rows: int, columns: int) -> torch.Tensor:
    """One channel in 37 is 50 times as large, as in real models."""
    return normal(rows, columns, seed=1) * torch.where(torch.arange(columns) % 37 == 3, 50.0, 1.0)


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_the_definition_is_sylvesters_matrix(block: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = normal(3, 2 * block)
    expected = (x.double().view(3, 2, block) @ matrix / block**0.5).view(3, -1)
    torch.testing.assert_close(rotate(x, block), expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rotate(rotate(x, block), block), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("columns", "block"), SIZES)
def test_kernels_give_the_bits_of_the_definition(isa: str, columns: int, block: int) -> None:
    kernels = kernel_set(isa)
    weight = normal(70, columns)
    q, scale, *_ = kernels.op("quantize_weight")(weight, 8, columns, False, None, block)
    expected_q, expected_scale, *_ = reference_quantize.quantize_weight(weight, 8, columns, False, None, block)
    assert torch.equal(q, expected_q) and torch.equal(scale, expected_scale)
    parts: dict[str, Any] = {"activations": "int8"}
    packed = replace(kernels.op("pack")(q, "int8").scaled(scale, rotation=block), **parts)
    defined: Weight = replace(reference.pack(q, "int8").scaled(scale, rotation=block), **parts)
    x = with_outliers(40, columns)
    together = kernels.op("linear")(x, packed)
    assert torch.equal(together, reference.linear(x, defined))
    for rows in (1, 3, 13):
        assert torch.equal(kernels.op("linear")(x[:rows], packed), together[:rows])
    ids = torch.tensor([0, 5, 69])
    assert torch.equal(kernels.op("embedding")(ids, packed), reference.embedding(ids, defined))
    weight_only = replace(packed, activations="float")
    exact = x.double() @ weight_only.dequantize().double().t()
    torch.testing.assert_close(kernels.op("linear")(x, weight_only).double(), exact, rtol=1e-4, atol=2e-3)


def test_outliers_cost_little_where_rows_are_rotated() -> None:
    """Without the rotation the same rows lose several times as much: the negative control."""
    x, weight = with_outliers(32, 576), normal(64, 576)
    errors = []
    for rotation in (block_for(576), 0):
        q, scale, *_ = reference_quantize.quantize_weight(weight, 8, 576, False, None, rotation)
        packed = replace(reference.pack(q, "int8").scaled(scale, rotation=rotation), activations="int8")
        small = torch.arange(576) % 37 != 3  # what the outliers crowd out
        exact = x @ weight.t()
        errors.append(float((reference.linear(x, packed) - exact).norm() / (x[:, small] @ weight[:, small].t()).norm()))
    assert errors[0] < 0.1 and errors[1] > 2.5 * errors[0], errors


def test_what_cannot_be_rotated_is_refused() -> None:
    packed = reference.pack(torch.zeros(4, 48, dtype=torch.int8), "int8")
    for block in (8, 24, 32, 512):
        with pytest.raises(ValueError, match="a power of two from 16 to 256 that divides their number, 48"):
            packed.scaled(torch.ones(4, 1), rotation=block)
    rotated = replace(packed.scaled(torch.ones(4, 1), rotation=16), activations="int8")
    with pytest.raises(ValueError, match="a scale for each row"):
        replace(rotated, input_scale=1.0)
    assert (block_for(100), block_for(896), block_for(4864)) == (0, 128, 256)
