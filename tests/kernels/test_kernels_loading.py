"""Weights on their way from a file: quantizing them, and packing their rows as they arrive."""

from __future__ import annotations

import pytest
import torch

from llm.kernels.cpu import library
from llm.kernels.cpu.gguf_blocks import decode_blocks
from llm.kernels.cpu.packed import arriving_rows
from llm.kernels.cpu.quantize_weight import quantize_weight, quantize_weight_as
from llm.kernels.reference import gguf_blocks
from llm.kernels.reference import quantize_weight as reference
from llm.quantization.unquantized import fill_rows, new_parameter, widen


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("size", [5, 32, 40, 96, 640])
def test_a_weight_is_quantized_bit_for_bit_as_the_definition_says(lib: library.Library, size: int) -> None:
    weight = weights(9, 2 * size, seed=0)
    weight[0, :size], weight[1, 0], weight[2] = 0, 3.0, weight[2] * 1e-25
    # Quotients that are halves, of divisors whose reciprocals are rounded.
    weight[5:] = (torch.arange(2 * size) % 7 + 0.5) * torch.tensor([3.0, 11.0, 13.0, 23.0])[:, None]
    weight[5:, ::size] = torch.tensor([21.0, 77.0, 91.0, 161.0])[:, None]
    for values, bits, search in ((weight, 8, False), (weight.bfloat16(), 4, True), (weight.half(), 4, False)):
        q, scale, signal, noise = quantize_weight(lib, values, bits, size, search)
        expected = reference.quantize_weight(values, bits, size, search)
        assert torch.equal(q, expected[0]) and torch.equal(scale, expected[1])
        assert (signal, noise) == pytest.approx(expected[2:], rel=1e-4)
    weight[4, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_weight(lib, weight, 8, size, False)


# Small and large values, zeros of both signs, halves of FP4's steps, and rows whose scales are far from 1.
def hard_weights(size: int) -> torch.Tensor:
    weight, generator = weights(13, 2 * size, seed=size), torch.Generator().manual_seed(size)
    weight[0, :size], weight[1, :size], weight[1, size] = 0.0, -0.0, 3.0
    weight[2] = torch.tensor([0.25, -0.75, 2.5, 6.0, -6.0, 5.0, -0.0, 3.5]).repeat(2 * size)[: 2 * size]
    weight[3], weight[4], weight[5] = weight[3] * 1e-25, weight[4] * 1e-36, weight[5] * 1e5
    weight[6, : size // 2] *= 1e-6
    # Halves of a step of Q8_0, and groups of one sign.
    weight[7], weight[8] = (torch.arange(2 * size) % 127 - 63) * 0.5, weight[8].abs() + 0.01
    weight[7, ::size], weight[9] = 127, weight[9].abs() * -1 - 0.01
    # Values beside the borders between the codes of NF4, of a scale whose reciprocal is rounded.
    table = torch.tensor(reference.NF4)
    near = ((table[1:] + table[:-1]) / 2 * 3.7).repeat(2 * size)[: 2 * size]
    weight[10] = torch.nextafter(near, near + torch.tensor([1.0, 0.0, -1.0]).repeat(2 * size)[: 2 * size])
    weight[10, ::size] = 3.7
    for group in weight[11:].view(-1, size):
        # Two powers of two whose errors are equal, but for the order in which they are added.
        few = size // 16
        group.uniform_(0.1, 0.24, generator=generator)[: 9 * few] = torch.tensor([0.5] * 8 + [7.5]).repeat(few)
        group.copy_(group[torch.randperm(size, generator=generator)])
    return weight


@pytest.mark.parametrize(
    ("form", "size"),
    [
        *(("float8", size) for size in (8, 40, 272)),
        *(("mxfp4", size) for size in (8, 32, 80, 640)),
        *(("nf4", size) for size in (5, 16, 64)),
        *((form, 32) for form in ("q8_0", "q4_0")),
        *((form, size) for form in ("asymmetric", "two_levels") for size in (8, 32, 64, 272)),
        ("q4_k", 32),
    ],
)
def test_other_forms_are_those_of_the_definition(lib: library.Library, form: str, size: int) -> None:
    weight = hard_weights(256 if form == "q4_k" else size)
    for values in (weight, weight.bfloat16(), weight.clamp(-6e4, 6e4).half()):
        q, scale, minimum, *energies = quantize_weight_as(lib, values, form, size)
        expected = reference.quantize_weight_as(values, form, size)
        assert same_bits(q, expected[0]) and same_bits(scale, expected[1])
        assert (minimum is None) == (expected[2] is None)
        assert minimum is None or expected[2] is None or same_bits(minimum, expected[2])
        assert energies == pytest.approx(expected[3:], rel=1e-4)
    for value, message in ((torch.nan, "NaN or infinite"), (-torch.inf, "NaN or infinite"), (1e38, "beyond the range")):
        weight[11, 3] = value
        if form.startswith("q") or "NaN" in message:
            with pytest.raises(ValueError, match=message):
                quantize_weight_as(lib, weight, form, size)
            with pytest.raises(ValueError, match=message):
                reference.quantize_weight_as(weight, form, size)


def test_a_form_without_a_kernel_is_computed_by_its_definition(
    lib: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reference._ROUND, "new", reference._ROUND["nf4"])
    weight = weights(4, 64)
    for ours, expected in zip(
        quantize_weight_as(lib, weight, "new", 32), reference.quantize_weight_as(weight, "nf4", 32), strict=True
    ):
        assert ours is expected is None or (torch.equal(ours, expected) if torch.is_tensor(ours) else ours == expected)


def rows_of_blocks(kind: str, rows: int, blocks: int) -> torch.Tensor:
    """Random bytes whose scales are finite, uint8 [rows, bytes of a row]."""
    size = gguf_blocks.BLOCKS[kind].bytes
    raw = torch.randint(0, 256, (2 * rows * blocks, size), dtype=torch.uint8, generator=torch.manual_seed(size))
    found = gguf_blocks.decode(raw, gguf_blocks.BLOCKS[kind])
    groups = found.scale if found.minimum is None else torch.cat((found.scale, found.minimum), dim=1)
    return raw[groups.isfinite().all(dim=1)][: rows * blocks].reshape(rows, -1)


@pytest.mark.parametrize("kind", gguf_blocks.TYPES)
def test_blocks_are_decoded_bit_for_bit_as_the_definition_says(lib: library.Library, kind: str) -> None:
    """In the type's own form and in wider ones, which layers have whose shards are of several types."""
    block, rows = gguf_blocks.BLOCKS[kind], 300
    raw = rows_of_blocks(kind, rows, 3)
    columns = 3 * block.values
    for size, has_minimum, least, looks_up in (
        (block.group, block.has_minimum, 8 if block.kind == "int4" else 16, False),
        (block.group, block.has_minimum, 16, True),
        (16, True, 16, True),
    ):
        found, expected = (
            (
                torch.full((rows, columns), 99, dtype=torch.int8),
                *(torch.full((rows, columns // size), torch.nan) for _ in range(2 if has_minimum else 1)),
                *([] if has_minimum else [None]),
            )
            for _ in range(2)
        )
        decode_blocks(lib, raw, kind, *found, least, looks_up)
        gguf_blocks.decode_blocks(raw, kind, *expected, least, looks_up)
        for mine, other in zip(found, expected, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or other is None or same_bits(mine, other)
    changed = raw.clone()
    changed[-1, -1] ^= 16  # the control: one bit of the last value
    gguf_blocks.decode_blocks(changed, kind, *expected, least, looks_up)
    assert not all(same_bits(mine, other) for mine, other in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="raw is contiguous"):
        decode_blocks(lib, raw[:, :-1], kind, *found, least, looks_up)
    with pytest.raises(ValueError, match="are no form of"):
        decode_blocks(lib, raw, kind, found[0], torch.empty(rows, 1), torch.empty(rows, 1), least, looks_up)
    if kind == "MXFP4":  # a scale is a byte
        return
    for decode in (lambda *args: decode_blocks(lib, *args), gguf_blocks.decode_blocks):
        with pytest.raises(ValueError, match="not finite"):
            decode(torch.full_like(raw, 255), kind, *found, least, looks_up)


def test_a_scale_one_step_away_is_seen() -> None:
    """What the comparisons of bits can tell apart."""
    q, scale, *_ = reference.quantize_weight_as(weights(4, 64), "nf4", 64)
    assert same_bits(scale, scale.clone()) and not same_bits(scale, torch.nextafter(scale, scale + 1))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0])) and q.dtype == torch.int8


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    number = {1: torch.int8, 4: torch.int32}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(number), b.contiguous().view(number))


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
    # Three parts begin or end inside of a panel, one of them with as many rows as a panel.
    for start, end in ((80, 96), (0, 24), (24, 40), (40, 64), (64, 80)):
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
