"""`Weight`: an immutable value whose parts fit each other, exact both ways, and true to its tensors' memory."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm
from kernel_sets import ISAS, has_kernels, kernel_set, needs_compiler
from pages import normal

from llm.kernels.cpu.packed import PanelWeight
from llm.kernels.reference.linear import embedding, linear, pack
from llm.kernels.weight import Weight, has_nan_codes

N, K = 19, 24
INTEGERS = torch.randint(-8, 8, (N, K), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
SCALE, ZERO = normal(1, N, 3).abs() + 0.1, normal(2, N, 3).mul(4).round()
PER_ROW = SCALE[:, :1]
X = normal(3, 5, K)

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")


def in_panels() -> Any:
    """The operations on weights in panels."""
    return kernel_set(ISAS[-1]).ops


def test_it_is_immutable() -> None:
    weight = pack(INTEGERS, "int8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        weight.scale = PER_ROW  # type: ignore[misc]
    scaled = weight.scaled(PER_ROW)
    assert weight.scale is None and scaled.scale is PER_ROW and scaled.data is weight.data


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"kind": "int3"}, "no weight is 'int3'"),
        ({"activations": "int4"}, "with 'int4' activations"),
        ({"scale": SCALE, "group_size": 7}, r"scale has shape \[19, 3\], groups of 7 need \[19, 4\]"),
        (
            {"scale": SCALE, "zero": ZERO[:, :2], "group_size": 8},
            r"zero has shape \[19, 2\], groups of 8 need \[19, 3\]",
        ),
        ({"bias": torch.ones(K)}, r"\[19\], got \[24\]"),
        (
            {"kind": "int4", "activations": "bfloat16", "table": torch.full((16,), 1 / 3)},
            "multiplied by values of bfloat16, the weight has a table of other values",
        ),
        (
            {
                **{"kind": "int4", "activations": "bfloat16", "scale": PER_ROW, "group_size": 8},
                "levels": torch.zeros(N, 3, dtype=torch.uint8),
            },
            "multiplied by values of bfloat16, the weight has levels",
        ),
        ({"input_scale": 0.5}, "only int8 activations"),
        ({"activations": "int8", "scale": SCALE, "group_size": 8}, "one scale per row, got groups of 8"),
        ({"activations": "int8", "scale": PER_ROW, "zero": PER_ROW}, "without zero points"),
        ({"activations": "int8", "scale": PER_ROW, "minimum": PER_ROW}, "without zero points and minima"),
        (
            {"scale": PER_ROW, "zero": PER_ROW, "minimum": PER_ROW},
            "one of zero points, minima, a table and levels, got zero",
        ),
        ({"scale": PER_ROW, "table": torch.ones(16)}, "a table is of 16 values and of an int4 weight, got int8"),
        ({"kind": "int4", "table": torch.ones(15)}, "a table is of 16 values"),
        (
            {"scale": SCALE, "minimum": ZERO[:, :2], "group_size": 8},
            r"minimum has shape \[19, 2\], groups of 8 need \[19, 3\]",
        ),
        ({"activations": "int8", "input_scale": -1.0}, "input_scale must be positive, got -1"),
        ({"activations": "int8", "input_scale": float("nan")}, "input_scale must be positive, got nan"),
        ({"activations": "int8", "input_scale": 1.0, "input_offset": 128}, r"\[-128, 127\] .*got 128"),
        ({"activations": "int8", "input_offset": 3}, "have a scale, got 3"),
        ({"kind": "int4", "activations": "int8", "input_scale": 1.0}, "a product with int4"),
        ({"columns": torch.arange(K)}, "columns are the numbers from 0 to 23 in some order"),
        ({"columns": torch.arange(K + 1, dtype=torch.int32)}, "columns are the numbers"),
        ({"columns": torch.arange(K, dtype=torch.int32) // 2}, "columns are the numbers"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(pack(INTEGERS, "int8"), **parts)


@pytest.mark.parametrize(
    "parts", [{"scale": PER_ROW}, {"activations": "int8"}, {"activations": "bfloat16"}, {"table": torch.ones(16)}]
)
def test_parts_of_integers_are_refused_with_floats(parts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a float32 weight"):
        dataclasses.replace(pack(normal(0, N, K)), **parts)


def test_each_code_that_is_no_number_is_found_wherever_it_is() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert [has_nan_codes(code) for code in codes.split(1)] == codes.float().isnan().tolist()
    many = torch.zeros(3, 100_000).to(torch.float8_e4m3fn)
    assert not has_nan_codes(many) and not has_nan_codes(many[:0])
    many[2, -1] = float("nan")
    assert has_nan_codes(many)


def test_a_table_of_values_stands_for_the_integers() -> None:
    table = normal(4, 16)
    weight = dataclasses.replace(pack(INTEGERS, "int4").scaled(SCALE, None, 8), table=table)
    values = table[INTEGERS.long() + 8] * SCALE.repeat_interleave(8, dim=1)
    assert torch.equal(weight.dequantize(), values)
    assert torch.equal(embedding(torch.tensor([3, 0]), weight), values[[3, 0]])
    torch.testing.assert_close(linear(X, weight), X @ values.t())


def test_columns_in_another_order_multiply_their_own_inputs() -> None:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    plain = pack(INTEGERS, "int8").scaled(SCALE, ZERO, 8)
    moved = pack(INTEGERS, "int8").scaled(SCALE, ZERO, 8, columns=order.int())
    assert torch.equal(moved.dequantize()[:, order], plain.dequantize())
    assert torch.equal(moved.dequantize(2, 5), moved.dequantize()[2:5])
    torch.testing.assert_close(linear(X, moved), linear(X[:, order], plain))
    assert not torch.allclose(linear(X, moved), linear(X, plain))


@needs_compiler
@needs_kernels
def test_the_kernels_refuse_what_they_have_no_form_for() -> None:
    packed = in_panels().pack(INTEGERS, "int4").scaled(SCALE, None, 8)
    with pytest.raises(ValueError, match=r"the table must be 16 .*float32"):
        in_panels().linear(X, dataclasses.replace(packed, table=torch.ones(16).double()))
    with pytest.raises(ValueError, match="an embedding table has its columns in order"):
        in_panels().embedding(
            torch.tensor([0]), dataclasses.replace(packed, columns=torch.arange(K, dtype=torch.int32))
        )
    with pytest.raises(ValueError, match="a multiple of 8 columns, got 12"):
        dataclasses.replace(packed.scaled(SCALE[:, :2], None, 12), activations="int8")
    in_wrong_order = dataclasses.replace(packed, scale=SCALE)
    with pytest.raises(ValueError, match=r"scale must be \[19, 3\], group by group in memory"):
        in_panels().linear(X, in_wrong_order)


@needs_compiler
@needs_kernels
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("zero", [None, ZERO])
def test_both_give_the_same_weight_back(kind: str, zero: torch.Tensor | None) -> None:
    ours = in_panels().pack(INTEGERS, kind).scaled(SCALE, zero, 8)
    theirs = pack(INTEGERS, kind).scaled(SCALE, zero, 8)
    assert torch.equal(ours.unpack(), INTEGERS) and torch.equal(theirs.unpack(), INTEGERS)
    assert torch.equal(ours.dequantize(), theirs.dequantize())
    assert torch.equal(ours.dequantize(2, 17), theirs.dequantize(2, 17))


def weights() -> dict[str, Callable[[], PanelWeight]]:
    pack = in_panels().pack
    replace = dataclasses.replace
    return {
        "float": lambda: replace(pack(normal(0, N, K)), bias=normal(5, N)),
        "int8": lambda: replace(pack(INTEGERS, "int8").scaled(PER_ROW), activations="int8", bias=normal(5, N)),
        "int4": lambda: replace(pack(INTEGERS, "int4").scaled(SCALE, ZERO, 8), bias=normal(5, N)),
        "minima": lambda: pack(INTEGERS, "int4").scaled(SCALE, None, 8, ZERO),
        "table": lambda: replace(pack(INTEGERS, "int4").scaled(SCALE, None, 8), table=normal(6, 16)),
        "float8": lambda: pack(normal(0, N, K).to(torch.float8_e4m3fn)).scaled(SCALE, None, 8),
    }


def tensors_of(weight: PanelWeight) -> dict[str, torch.Tensor]:
    found = {"bias": weight.bias, **weight.memory()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@needs_compiler
@needs_kernels
@pytest.mark.parametrize("name", ["float", "int8", "int4"])
def test_it_keeps_its_tensors_alive(name: str) -> None:
    weight = weights()[name]()
    expected = in_panels().linear(X, weight)
    gc.collect()
    noise = [torch.full((N * K,), 7.0) for _ in range(50)]  # takes the memory of whatever was freed
    assert torch.equal(in_panels().linear(X, weight), expected) and noise
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None


@needs_compiler
@needs_kernels
@pytest.mark.parametrize("name", ["float", "int8", "int4"])
def test_it_follows_the_memory_of_its_tensors(name: str) -> None:
    """As when a parameter is moved: `param.data = ...` leaves the parameter and takes its memory."""
    weight = weights()[name]()
    expected, address = in_panels().linear(X, weight), weight.address
    for tensor in tensors_of(weight).values():
        other = tensor.t().clone().t() if tensor.dim() == 2 else tensor.clone()
        old = tensor.data_ptr()
        tensor.data = other
        assert tensor.data_ptr() != old
        assert torch.equal(in_panels().linear(X, weight), expected)
    assert weight.address == address  # what was recorded finds it
    assert weight.bias is not None
    weight.bias.data = weight.bias + 1
    assert torch.allclose(in_panels().linear(X, weight), expected + 1)


@needs_compiler
@needs_kernels
@pytest.mark.parametrize("name", ["float", "int8", "int4"])
def test_memory_that_was_freed_is_not_read(name: str) -> None:
    for part in tensors_of(weights()[name]()):
        weight = weights()[name]()
        in_panels().linear(X, weight)
        tensors_of(weight)[part].data = torch.empty(0)
        with pytest.raises(ValueError, match="must be"):
            in_panels().linear(X, weight)


@needs_compiler
@needs_kernels
def test_a_recorded_product_keeps_its_weight() -> None:
    backend = kernel_set(ISAS[-1])
    x, held = X.clone(), [weights()["int8"]()]
    with torch.inference_mode():
        recording = backend.record(lambda tokens: [backend.op("linear")(x, held[0])])
        (out,) = recording.results
        gone, expected = weakref.ref(held[0]), out.clone()
        held.clear()
        gc.collect()
        assert gone() is not None
        out.zero_()
        assert recording.run() and torch.equal(out, expected)


@pytest.mark.parametrize("quantization", [None, "w8a8", "w4a16"])
def test_whoever_counts_or_frees_a_layers_memory_sees_the_weight(quantization: str | None) -> None:
    with open_llm(quantization=quantization) as llm:
        for name, layer in engine_of(llm).runner.model.named_modules():
            weight: Weight | None = getattr(layer, "packed_weight", None)
            if weight is None:
                continue
            seen = {id(tensor) for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))}
            held = [tensor for tensor in weight.memory().values() if tensor is not None]
            assert held and all(id(tensor) in seen for tensor in held), name
