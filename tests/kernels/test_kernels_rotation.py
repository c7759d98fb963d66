"""Rotated weights of int8, and of int4 with two levels of scales: kernels give the definition's bits, and outliers cost
next to nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_sets import ISAS, kernel_set, needs_compiler

from llm.base.library_settings import library_defaults
from llm.kernels.reference import experts as reference_experts
from llm.kernels.reference import linear as reference
from llm.kernels.reference import quantize_weight as quantizing
from llm.kernels.reference.rotation import block_for, rotate
from llm.kernels.weight import ExpertWeights, Weight, eight_bits
from llm.quantization.quantizer import guessed_input_squares

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
    expected_q, expected_scale, *_ = quantizing.quantize_weight(weight, 8, columns, False, None, block)
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
        q, scale, *_ = quantizing.quantize_weight(weight, 8, 576, False, None, rotation)
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


# (output channels, columns, group size, rotation): tails of panels, groups of one, two and odd numbers of steps.
LEVELS = [
    *((70, 576, 32, 64), (33, 1536, 64, 256), (16, 96, 96, 32), (5, 48, 8, 16), (40, 384, 24, 128), (31, 64, 32, 0)),
    (33, 576, 16, 64),
]


def on_levels(pack: Any, parts: quantizing.Parts, group_size: int, rotation: int) -> Weight:
    q, scale, levels = parts
    packed: Weight = pack(q, "int4").scaled(scale, group_size=group_size, rotation=rotation, levels=levels)
    return replace(packed, activations="int8", bias=normal(len(q), seed=3))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "columns", "size", "block"), LEVELS)
def test_two_levels_of_scales_have_the_bits_of_the_definition(
    isa: str, rows: int, columns: int, size: int, block: int
) -> None:
    kernels = kernel_set(isa)
    weight = normal(rows, columns) * normal(rows, 1, seed=4)
    weight[0], weight[1, :size], weight[2] = 0, 0, 1
    *found, signal, noise = kernels.op("quantize_weight_as")(weight, "two_levels", size, None, block)
    *parts, defined_signal, defined_noise = quantizing.quantize_weight_as(weight, "two_levels", size, None, block)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, parts, strict=True))
    assert (signal, noise) == pytest.approx((defined_signal, defined_noise), rel=1e-5)
    packed, defined = (on_levels(pack, tuple(parts), size, block) for pack in (kernels.op("pack"), reference.pack))
    assert torch.equal(packed.integers(0, rows), defined.integers(0, rows))
    assert torch.equal(packed.dequantize(), defined.dequantize())
    x = with_outliers(60, columns)
    expected = reference.linear(x, defined)
    for count in (60, 29, 13, 12, 7, 5, 4, 3, 2, 1):  # alone, in a batch and in parts of it
        assert torch.equal(kernels.op("linear")(x[-count:], packed), expected[-count:]), count


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("rows", "columns", "size", "block"), [case for case in LEVELS if case[3] and case[3] % case[2] == 0]
)
def test_errors_that_are_compensated_have_the_bits_of_the_definition(
    isa: str, rows: int, columns: int, size: int, block: int
) -> None:
    """A row's bits do not depend on the rows beside it, nor on threads."""
    weight = normal(rows, columns) * normal(rows, 1, seed=4) / (1 + 30 * (torch.arange(columns) % 19 == 3))
    weight[0], weight[1, :size], weight[2] = 0, 0, 0.01
    squares = guessed_input_squares(quantizing.column_squares(weight))
    quantized = kernel_set(isa).op("quantize_weight_as")
    *found, signal, noise = quantized(weight, "two_levels", size, None, block, squares)
    *parts, defined_signal, defined_noise = quantizing.quantize_weight_as(
        weight, "two_levels", size, None, block, squares
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, parts, strict=True))
    assert (signal, noise) == pytest.approx((defined_signal, defined_noise), rel=1e-5)
    alone = quantized(weight[4:5], "two_levels", size, None, block, squares)[:3]
    assert all(torch.equal(one, every[4:5]) for one, every in zip(alone, found, strict=True))
    with library_defaults(num_threads=1):
        by_one = quantized(weight, "two_levels", size, None, block, squares)[:3]
    assert all(torch.equal(one, every) for one, every in zip(by_one, found, strict=True))
    # Without the compensation other codes are found.
    assert not torch.equal(found[0], quantized(weight, "two_levels", size, None, block)[0])
    with pytest.raises(ValueError, match="input_squares are float32"):
        quantized(weight, "two_levels", size, None, block, squares[:-1])
    with pytest.raises(ValueError, match="cannot be quantized"):
        quantized(weight.where(weight != weight[3, 3], math.nan), "two_levels", size, None, block, squares)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_of_columns_have_the_bits_of_the_definition(isa: str, dtype: torch.dtype) -> None:
    squares = kernel_set(isa).op("column_squares")
    for rows, columns in ((1, 5), (300, 96), (128, 17), (0, 8)):
        weight = (normal(rows, columns) * normal(rows, 1, seed=4).exp()).to(dtype)
        weight[rows // 2 : rows // 2 + 1] = 0
        assert torch.equal(squares(weight), quantizing.column_squares(weight))
    assert torch.equal(squares(weight.new_ones(900, 32)), torch.full((32,), 900 * 2047**2))
    with pytest.raises(ValueError, match="cannot be quantized"):
        squares(weight.new_full((200, 4), math.inf))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("columns", [576, 96])
def test_rotated_integers_with_zero_points_have_the_bits_of_the_definition(isa: str, columns: int) -> None:
    """Of w4a16. Its product is that of the rotated inputs, alone and in a batch."""
    kernels, block = kernel_set(isa), block_for(columns)
    weight = normal(600, columns) * normal(600, 1, seed=4)  # more than are rotated at once
    *found, signal, noise = kernels.op("quantize_weight_as")(weight, "asymmetric", 32, None, block)
    *parts, defined_signal, defined_noise = quantizing.quantize_weight_as(weight, "asymmetric", 32, None, block)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, parts, strict=True))
    assert (signal, noise) == pytest.approx((defined_signal, defined_noise), rel=1e-5)
    q, scale, zero = found
    bare = kernels.op("pack")(q, "int4")
    rotated, plain = (bare.scaled(scale, zero, 32, rotation=turned) for turned in (block, 0))
    x = with_outliers(29, columns)
    for count in (29, 13, 4, 1):
        product = kernels.op("linear")(x[-count:], rotated)
        assert torch.equal(product, kernels.op("linear")(rotate(x[-count:], block), plain)), count
        assert torch.equal(product, kernels.op("linear")(x, rotated)[-count:]), count
    torch.testing.assert_close(kernels.op("linear")(x, rotated), x @ rotated.dequantize().t(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("isa", ISAS)
def test_experts_on_two_levels_are_those_of_the_definition(isa: str) -> None:
    kernels = kernel_set(isa)
    stacks = []
    for pack in (kernels.op("pack"), reference.pack):
        matrices = []
        for expert in range(3):
            for rows, columns in ((80, 64), (64, 40)):
                weight, size = normal(rows, columns, seed=expert), 32 if columns == 64 else 8
                parts = quantizing.quantize_weight_as(weight, "two_levels", size, None, 64 if size == 32 else 0)[:3]
                matrices.append(replace(on_levels(pack, parts, size, 64 if size == 32 else 0), bias=None))
        stacks.append(ExpertWeights(tuple(matrices[::2]), tuple(matrices[1::2])))
    x, ids, factors = normal(19, 64), torch.arange(38).view(19, 2) * 7 % 3, normal(19, 2, seed=5).abs()
    ours = kernels.op("experts")(x, ids, factors, stacks[0])
    torch.testing.assert_close(ours, reference_experts.experts(x, ids, factors, stacks[1]), rtol=1e-4, atol=1e-4)
    alone = torch.cat(
        [kernels.op("experts")(x[i : i + 1], ids[i : i + 1], factors[i : i + 1], stacks[0]) for i in range(19)]
    )
    assert torch.equal(ours, alone)


def test_two_levels_lose_less_than_one_with_whole_zero_points() -> None:
    """In fewer bits (4.25 in place of 5 a weight). With the levels of the next group they lose all: the control."""
    weight = normal(64, 512)
    q, scale, levels, signal, noise = quantizing.quantize_weight_as(weight, "two_levels", 32)
    *_, one = quantizing.quantize_weight_as(weight, "asymmetric", 32)
    assert noise < 0.95 * one and noise < 0.006 * signal
    values = reference.pack(q, "int4").scaled(scale, group_size=32, levels=levels).dequantize()
    assert float((values - weight).square().sum()) == pytest.approx(noise, rel=1e-4)
    turned = reference.pack(q, "int4").scaled(scale, group_size=32, levels=levels.roll(1, dims=1)).dequantize()
    assert float((turned - weight).square().sum()) > 5 * noise


def test_every_level_is_what_the_definition_says() -> None:
    levels = torch.tensor([[step + 16 * place for place in range(16)] for step in range(1, 16)], dtype=torch.uint8)
    codes = torch.zeros(15, 16 * 8, dtype=torch.int8)  # 8 of 0 to 15
    shifts = (torch.arange(1, 16)[:, None] * (torch.arange(16) + 16) * 5).div(16, rounding_mode="floor")
    expected = 8 * torch.arange(1, 16)[:, None] - shifts
    assert torch.equal(eight_bits(codes, levels, 8).view(15, 16, 8)[..., 0].long(), expected)


def test_levels_that_do_not_fit_are_refused() -> None:
    packed = reference.pack(torch.zeros(4, 48, dtype=torch.int8), "int4")
    levels = torch.ones(4, 6, dtype=torch.uint8)
    with pytest.raises(ValueError, match="levels are uint8 and of an int4 weight, got"):
        packed.scaled(torch.ones(4, 1), group_size=8, levels=levels.int())
    with pytest.raises(ValueError, match="scale has shape"):
        packed.scaled(torch.ones(4, 6), group_size=8, levels=levels)
    with pytest.raises(ValueError, match="levels have shape"):
        packed.scaled(torch.ones(4, 1), group_size=8, levels=levels[:2])
    with pytest.raises(ValueError, match="a multiple of 8 columns that divides their number, 48; got 12"):
        packed.scaled(torch.ones(4, 1), group_size=12, levels=levels)
