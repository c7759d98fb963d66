"""Norms and activations computed by the product that reads their rows: the bits of the two, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import normal
from tiny_models import one_thread

from llm.kernels.cpu.linear import fuses_float
from llm.kernels.reference.rows import RowOperation, Rows
from llm.kernels.select import REFERENCE, KernelSet

pytestmark = needs_compiler
BEST = ISAS[-1]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


# Products: (kernels, x or Rows, n, k) -> y


@lru_cache
def packed(isa: str, pack: str, n: int, k: int) -> Any:
    if pack == "pack_float":
        return kernel_set(isa).op(pack)(normal(3, n, k).bfloat16())
    limit = 8 if pack == "pack_int4" else 128
    values = torch.randint(-limit, limit, (n, k), generator=torch.Generator().manual_seed(4), dtype=torch.int8)
    return kernel_set(isa).op(pack)(values)


def scales(n: int, groups: int = 1) -> torch.Tensor:
    return normal(5, n, groups).abs() / 50


def dynamic(isa: str, x: Any, n: int, k: int) -> torch.Tensor:
    product = kernel_set(isa).op("linear_w8a8_dynamic")
    return product(x, packed(isa, "pack_int8", n, k), scales(n)[:, 0], normal(6, n))


def static(isa: str, x: Any, n: int, k: int) -> torch.Tensor:
    product = kernel_set(isa).op("linear_w8a8_static")
    return product(x, packed(isa, "pack_int8", n, k), scales(n)[:, 0], 0.031, -3)


def int4(isa: str, x: Any, n: int, k: int, size: int = 0) -> torch.Tensor:
    size = size or k
    groups = -(-k // size)
    return kernel_set(isa).op("linear_w4a8")(x, packed(isa, "pack_int4", n, k), scales(n, groups), size)


def bfloat16(isa: str, x: Any, n: int, k: int) -> torch.Tensor:
    return kernel_set(isa).op("linear_float")(x, packed(isa, "pack_float", n, k), normal(6, n))


def rounded(isa: str, x: Any, n: int, k: int) -> torch.Tensor:
    return kernel_set(isa).op("linear_float")(x, replace(packed(isa, "pack_float", n, k), rounds_input=True))


PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "w8a8": dynamic,
    "w8a8 static": static,
    "w4a8": int4,
    "w4a8 g=8": lambda *given: int4(*given, size=8),
    "w4a8 g=64": lambda *given: int4(*given, size=64),
    "bfloat16": bfloat16,
    "bfloat16, rounded": rounded,
}


# What computes the rows


@dataclass(frozen=True)
class Operation:
    """`make(kernels, K)`; `adds`: it takes a residual too."""

    name: str
    make: Callable[[KernelSet, int], RowOperation]
    adds: bool = False


def norm_of(*rest: Any, dtype: torch.dtype = torch.bfloat16) -> Callable[[KernelSet, int], RowOperation]:
    return lambda kernels, k: kernels.op("rms_norm_rows")(normal(1, k).to(dtype), 1e-5, *rest)


def activation_of(*name: str) -> Callable[[KernelSet, int], RowOperation]:
    return lambda kernels, k: kernels.op("activation_rows")(*name)


OPERATIONS = (
    Operation("rms_norm", norm_of(dtype=torch.float32)),
    Operation("add_rms_norm", norm_of(), adds=True),
    Operation("gemma, of one channel", norm_of(1, 1.0, dtype=torch.float16), adds=True),
    Operation("no weight", lambda kernels, k: kernels.op("rms_norm_rows")(None, 1e-5)),
    Operation(
        "add_layer_norm",
        lambda kernels, k: kernels.op("layer_norm_rows")(normal(1, k), normal(2, k), 1e-5),
        adds=True,
    ),
    Operation("silu_and_mul", activation_of("silu_and_mul")),
    Operation("mul_and_silu", activation_of("mul_and_silu")),
    Operation("gelu_and_mul", activation_of("gelu_and_mul", "none")),
    Operation("gelu_and_mul tanh", activation_of("gelu_and_mul", "tanh")),
    Operation("relu", activation_of("relu")),
    Operation("gelu_new", activation_of("gelu_new")),
)
by_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
by_product = pytest.mark.parametrize("product", PRODUCTS)


def rows_of(operation: Operation, kernels: KernelSet, m: int, k: int, special: bool = False) -> Rows:
    made = operation.make(kernels, k)
    x = normal(m + k, m, k * made.width) * 2
    if special and m:
        for place, value in enumerate((math.nan, math.inf, -math.inf, 1e-42, 3.4e38)):
            x[place % m, place * 5 % x.shape[1]] = value
    residual = x.flip(-1) * 0.7 if operation.adds else None
    return Rows(made, x, residual)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal numbers, NaN for NaN."""
    return torch.equal(one.nan_to_num(1e30), other.nan_to_num(1e30))


def is_fused_as_alone(operation: Operation, product: str, isa: str, m: int, n: int, k: int, special: bool) -> bool:
    multiply = PRODUCTS[product]
    apart, fused = (rows_of(operation, kernel_set(isa), m, k, special) for _ in range(2))
    expected, actual = multiply(isa, apart.compute(), n, k), multiply(isa, fused, n, k)
    if apart.total is not None and fused.total is not None and not same_bits(apart.total, fused.total):
        return False
    return actual.shape == (m, n) and same_bits(actual, expected)


@by_product
@by_operation
def test_fused_has_the_bits_of_one_after_the_other(operation: Operation, product: str) -> None:
    """Rows below and above a tile and a block of them; K and N that are multiples of nothing; what is not finite."""
    for isa in ISAS:
        for m, n, k, special in ((0, 5, 8, False), (1, 17, 67, False), (3, 33, 120, True), (17, 5, 200, True)):
            assert is_fused_as_alone(operation, product, isa, m, n, k, special), (isa, m, n, k)


@by_product
def test_many_rows_and_threads(product: str) -> None:
    """Several blocks of row tiles, and of steps of k where there are matrix tiles."""
    operation = OPERATIONS[1]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            assert is_fused_as_alone(operation, product, BEST, 33, 20, 2100, False)
            assert is_fused_as_alone(operation, product, BEST, 150, 20, 130, False)
        finally:
            torch.set_num_threads(1)


def test_a_difference_in_the_last_place_is_seen() -> None:
    """The control of the tests above."""
    apart, fused = (rows_of(OPERATIONS[1], kernel_set(BEST), 3, 200) for _ in range(2))
    assert same_bits(dynamic(BEST, fused, 5, 200), dynamic(BEST, apart.compute(), 5, 200))
    operation: Any = fused.operation
    operation._fields.norm.eps = 2e-5
    assert not same_bits(dynamic(BEST, fused, 5, 200), dynamic(BEST, apart.compute(), 5, 200))


@by_operation
def test_the_twins_agree(operation: Operation) -> None:
    """The definition in PyTorch computes the rows first; its norms and activations round differently."""
    twin = rows_of(operation, REFERENCE, 3, 64)
    weight = torch.randint(-128, 128, (5, 64), dtype=torch.int8)
    expected = REFERENCE.op("linear_w8a8_dynamic")(twin, REFERENCE.op("pack_int8")(weight), scales(5)[:, 0])
    ours = rows_of(operation, kernel_set(BEST), 3, 64)
    kernels = kernel_set(BEST)
    actual = kernels.op("linear_w8a8_dynamic")(ours, kernels.op("pack_int8")(weight), scales(5)[:, 0])
    assert (actual - expected).abs().max() <= 0.02 * expected.abs().max()
    if ours.total is not None and twin.total is not None:
        assert torch.equal(ours.total, twin.total)


def test_only_matrix_tiles_compute_rows_of_float_products() -> None:
    for isa in ISAS:
        library: Any = kernel_set(isa).library
        assert fuses_float(library, packed(isa, "pack_float", 5, 8)) == (isa == "amx")


def of_zeros(make: Callable[[Any], RowOperation], x: torch.Tensor, residual: torch.Tensor | None = None) -> Rows:
    return Rows(make(kernel_set(BEST).op), x, residual)


def relu(op: Any) -> RowOperation:
    return op("activation_rows")("relu")


def plain_norm(op: Any) -> RowOperation:
    return op("rms_norm_rows")(torch.ones(16), 1e-5)


ZEROS, ONES = torch.zeros(3, 16), torch.ones(16)
WRONG: dict[str, Callable[[], Rows]] = {
    "type": lambda: of_zeros(relu, ZEROS.bfloat16()),
    "dimensions": lambda: of_zeros(relu, ZEROS[None]),
    "width": lambda: of_zeros(relu, torch.zeros(3, 17)),
    "odd width": lambda: of_zeros(lambda op: op("activation_rows")("silu_and_mul"), torch.zeros(3, 33)),
    "a view": lambda: of_zeros(relu, torch.zeros(3, 32)[:, ::2]),
    "residual": lambda: of_zeros(plain_norm, ZEROS, ZEROS[:2]),
    "type of the residual": lambda: of_zeros(plain_norm, ZEROS, ZEROS.half()),
    "no norm": lambda: of_zeros(relu, ZEROS, ZEROS),
    "PyTorch's": lambda: Rows(relu(REFERENCE.op), ZEROS),
    "weight": lambda: of_zeros(lambda op: op("rms_norm_rows")(torch.ones(15), 1e-5), ZEROS),
    "bias": lambda: of_zeros(lambda op: op("layer_norm_rows")(ONES, ONES.half(), 1e-5), ZEROS),
    "variance": lambda: of_zeros(lambda op: op("rms_norm_rows")(None, 1e-5, 17), ZEROS),
}


@pytest.mark.parametrize("product", ["w8a8", "w4a8", "bfloat16"])
@pytest.mark.parametrize("name", WRONG)
def test_rows_that_do_not_fit_are_refused(name: str, product: str) -> None:
    if product == "bfloat16" and BEST != "amx":
        pytest.skip("float products compute no rows here")
    with pytest.raises(ValueError):
        PRODUCTS[product](BEST, WRONG[name](), 5, 16)
