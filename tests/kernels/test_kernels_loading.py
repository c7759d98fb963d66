"""Weights on their way from a file: quantizing them, and packing their rows as they arrive."""

from __future__ import annotations

import pytest
import torch
from kernel_sets import TARGETS

from llm.kernels.cpu import library
from llm.kernels.cpu.arriving import arriving_rows
from llm.kernels.cpu.quantize_weight import quantize_weight
from llm.kernels.reference import quantize_weight as reference
from llm.quantization.unquantized import fill_rows, new_parameter, widen


@pytest.fixture(scope="module", params=TARGETS)
def lib(request: pytest.FixtureRequest) -> library.Library:
    return library.load_library(request.param)


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("size", [5, 32, 40, 96, 640])
def test_a_weight_is_quantized_bit_for_bit_as_the_definition_says(lib: library.Library, size: int) -> None:
    weight = weights(5, 2 * size)
    weight[0, :size], weight[1, 0], weight[2] = 0, 3.0, weight[2] * 1e-25
    for values, bits, search in ((weight, 8, False), (weight.bfloat16(), 4, True), (weight.half(), 4, False)):
        q, scale, signal, noise = quantize_weight(lib, values, bits, size, search)
        expected = reference.quantize_weight(values, bits, size, search)
        assert torch.equal(q, expected[0]) and torch.equal(scale, expected[1])
        assert (signal, noise) == pytest.approx(expected[2:], rel=1e-4)
    weight[4, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_weight(lib, weight, 8, size, False)


def test_another_order_of_sums_gives_other_scales() -> None:
    """What the definition's order is for; and a sum that runs backwards is seen by the test above."""
    x = weights(200, 640)
    assert not torch.equal(reference.ordered_sum(x), reference.ordered_sum(x.flip(-1)))
    torch.testing.assert_close(reference.ordered_sum(x), x.sum(-1, keepdim=True), rtol=0, atol=1e-5)


def test_rows_are_packed_in_whatever_parts_they_arrive(lib: library.Library) -> None:
    values = weights(96, 10).bfloat16()
    arriving = arriving_rows(lib, 96, 10, torch.bfloat16)
    assert arriving is not None
    weight = new_parameter(arriving.data, lambda *_: 0, arriving=arriving)
    for start, end in ((80, 96), (0, 40), (40, 64), (64, 80)):  # two parts begin or end inside of a panel
        fill_rows(weight, 0, start, values[start:end])
    assert not torch.equal(weight.data, values)  # some are packed already
    assert torch.equal(arriving.finish().unpack(), values)


def test_a_weight_that_is_packed_in_part_can_be_converted(lib: library.Library) -> None:
    """Shards of a fused layer may be stored in different types."""
    values = weights(48, 6)
    arriving = arriving_rows(lib, 48, 6, torch.bfloat16)
    assert arriving is not None
    weight = new_parameter(arriving.data, lambda *_: 0, arriving=arriving)
    fill_rows(weight, 0, 0, values[:32].bfloat16())
    widen(weight, torch.float32)
    fill_rows(weight, 0, 32, values[32:])
    assert torch.equal(weight.data, torch.cat([values[:32].bfloat16().float(), values[32:]]))


def test_what_needs_padding_waits_for_all_its_rows(lib: library.Library) -> None:
    assert arriving_rows(lib, 40, 8, torch.float32) is None
    assert arriving_rows(lib, 32, 7, torch.bfloat16) is None
    assert arriving_rows(lib, 32, 7, torch.float16) is not None
