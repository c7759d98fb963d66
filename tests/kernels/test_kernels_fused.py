"""Norms, activations, rotary embeddings and log-softmax in C++: their definitions, a row's bits the same anywhere.

Every kernel against its PyTorch twin and float64, over odd widths, on every instruction set; the elementary functions
over their whole range, in units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import normal

from llm.kernels.backend import Backend
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference.backend import REFERENCE

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_core")]
BEST = ISAS[-1]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 300, 901)

seeds = st.integers(0, 2**31)


@dataclass(frozen=True)
class Case:
    """How to call one operation on rows x float32 [n, width], and what it must return in float64."""

    name: str
    call: Callable[[Backend, torch.Tensor], Any]
    formula: Callable[[torch.Tensor], Any]
    step: int = 1  # widths must be multiples of it


def parameters(width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(1, width).to(dtype), normal(2, width).to(dtype)


def companion(x: torch.Tensor) -> torch.Tensor:
    """A residual that depends on its row alone."""
    return x.flip(-1) * 0.7


def rms_64(x: torch.Tensor, offset: float = 0.0, size: int | None = None) -> torch.Tensor:
    mean = x[..., :size].square().mean(-1, keepdim=True)
    return x / (mean + 1e-5).sqrt() * (parameters(x.shape[-1])[0].double() + offset)


def layer_64(x: torch.Tensor) -> torch.Tensor:
    weight, bias = parameters(x.shape[-1])
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()


def silu_64(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def gelu_64(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * torch.special.erfc(-x / math.sqrt(2))


def gelu_tanh_64(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = x.chunk(2, dim=-1)
    return first, second


def with_weight(name: str, *rest: Any) -> Callable[[Backend, torch.Tensor], Any]:
    return lambda kernels, x: kernels.op(name)(x, parameters(x.shape[-1])[0], 1e-5, *rest)


def gated(groups: int, *rest: Any) -> Callable[[Backend, torch.Tensor], Any]:
    def call(kernels: Backend, x: torch.Tensor) -> torch.Tensor:
        values, gate = halves(x)
        return kernels.op("gated_rms_norm")(values, gate, parameters(values.shape[-1])[0], 1e-5, groups, *rest)

    return call


def gated_64(x: torch.Tensor, groups: int, gate_first: bool) -> torch.Tensor:
    values, gate = halves(x)
    if gate_first:
        values = values * silu_64(gate)
    runs = [run / (run.square().mean(-1, keepdim=True) + 1e-5).sqrt() for run in values.tensor_split(groups, -1)]
    normed = torch.cat(runs, -1) * parameters(values.shape[-1])[0].double()
    return normed if gate_first else normed / (1 + torch.exp(-gate))


def gate_alone_64(x: torch.Tensor) -> torch.Tensor:
    values, gate = halves(x)
    return values * silu_64(gate)


def of_x(name: str, *rest: Any) -> Callable[[Backend, torch.Tensor], Any]:
    return lambda kernels, x: kernels.op(name)(x, *rest)


def sparse_64(x: torch.Tensor) -> torch.Tensor:
    gate, up = halves(x)
    centred = gate - gate.mean(-1, keepdim=True)
    return gelu_tanh_64((centred - 0.5 * centred.square().mean(-1, keepdim=True).sqrt()).clamp(min=0)) * up


def xielu_64(x: torch.Tensor) -> torch.Tensor:
    positive, negative = torch.nn.functional.softplus(torch.tensor([0.3, -0.4]).double())
    below = (torch.expm1(x.clamp(max=-1e-6)) - x) * (negative + 0.5)
    return torch.where(x > 0, positive * x * x, below) + 0.5 * x


CASES = (
    Case("rms_norm", with_weight("rms_norm"), rms_64),
    Case("gemma_rms_norm", with_weight("rms_norm", None, 1.0), lambda x: rms_64(x, 1.0)),
    Case("rms_norm of the first half", with_weight("rms_norm", 1), lambda x: rms_64(x, size=1)),
    Case(
        "add_rms_norm",
        lambda kernels, x: kernels.op("add_rms_norm")(x, companion(x), parameters(x.shape[-1])[0], 1e-5),
        lambda x: (rms_64(x + companion(x)), x + companion(x)),
    ),
    Case(
        "layer_norm",
        lambda kernels, x: kernels.op("layer_norm")(x, *parameters(x.shape[-1]), 1e-5),
        layer_64,
    ),
    Case(
        "add_layer_norm",
        lambda kernels, x: kernels.op("add_layer_norm")(x, companion(x), *parameters(x.shape[-1]), 1e-5),
        lambda x: (layer_64(x + companion(x)), x + companion(x)),
    ),
    Case("silu_and_mul", of_x("silu_and_mul"), lambda x: silu_64(halves(x)[0]) * halves(x)[1], 2),
    Case("mul_and_silu", of_x("mul_and_silu"), lambda x: halves(x)[0] * silu_64(halves(x)[1]), 2),
    Case("gelu_and_mul", of_x("gelu_and_mul", "none"), lambda x: gelu_64(halves(x)[0]) * halves(x)[1], 2),
    Case("gelu_and_mul tanh", of_x("gelu_and_mul", "tanh"), lambda x: gelu_tanh_64(halves(x)[0]) * halves(x)[1], 2),
    Case("silu", of_x("silu"), silu_64),
    Case("gelu", of_x("gelu", "none"), gelu_64),
    Case("gelu_new", of_x("gelu_new"), gelu_tanh_64),
    Case("quick_gelu", of_x("quick_gelu"), lambda x: x * torch.sigmoid(1.702 * x)),
    Case("relu", of_x("relu"), lambda x: x.clamp(min=0)),
    Case("relu2", of_x("relu2"), lambda x: x.clamp(min=0).square()),
    Case("gelu_and_mul_sparse", of_x("gelu_and_mul_sparse", 0.5, "tanh"), sparse_64, 2),
    Case(
        "xielu",
        lambda kernels, x: kernels.op("xielu")(x, *(torch.tensor([n]) for n in (0.3, -0.4, 0.5)), -1e-6),
        xielu_64,
    ),
    Case("scale", lambda kernels, x: kernels.op("scale")(x.clone(), 0.3), lambda x: x * torch.tensor(0.3).double()),
    Case("soft_cap", lambda kernels, x: kernels.op("soft_cap")(x.clone(), 3.0), lambda x: 3 * torch.tanh(x / 3)),
    Case("gated_rms_norm", gated(1), lambda x: gated_64(x, 1, gate_first=True), 2),
    Case("gated_rms_norm of groups", gated(3, True, "sigmoid"), lambda x: gated_64(x, 3, gate_first=False), 6),
    Case("gate alone", lambda kernels, x: kernels.op("gated_rms_norm")(*halves(x), None, 0.0), gate_alone_64, 2),
    Case("log_softmax", of_x("log_softmax"), lambda x: x.log_softmax(-1)),
)
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def parts(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def same_bits(one: Any, other: Any) -> bool:
    """Equal numbers, NaN for NaN."""
    return all(
        torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30)) for a, b in zip(parts(one), parts(other), strict=True)
    )


def rows_of(seed: int, rows: int, width: int, size: float) -> torch.Tensor:
    return normal(seed, rows, width) * size


@by_name
def test_it_is_its_formula_and_its_twin(case: Case) -> None:
    for width in WIDTHS:
        for rows, size in ((0, 1.0), (1, 1e-3), (3, 1.0), (2, 30.0)):
            x = rows_of(width, rows, width * case.step, size)
            before = x.clone()
            actual, twin, exact = case.call(kernel_set(BEST), x), case.call(REFERENCE, x), case.formula(x.double())
            assert torch.equal(x, before)
            for one, other, expected in zip(parts(actual), parts(twin), parts(exact), strict=True):
                assert one.dtype == torch.float32 and one.shape == expected.shape == other.shape
                if expected.numel():
                    bound = 2e-6 * max(expected.abs().max().item(), 1e-6)
                    if "norm" in case.name and width == 1:
                        bound += 1e-3  # x - mean(x) of one channel is 0: only rounding is left
                    assert (one - expected).abs().max() <= bound
                    assert (one - other).abs().max() <= 2 * bound


@by_name
@settings(max_examples=15)
@given(seed=seeds, rows=st.integers(1, 40), width=st.sampled_from(WIDTHS))
def test_a_row_alone_has_the_same_bits(case: Case, seed: int, rows: int, width: int) -> None:
    """Within any number of rows, at any place, on any instruction set."""
    x = rows_of(seed, rows, width * case.step, 2.0)
    whole = case.call(kernel_set(BEST), x)
    row = seed % rows
    for isa in ISAS:
        alone = case.call(kernel_set(isa), x[row : row + 1].clone())
        assert same_bits(alone, tuple(part[row : row + 1] for part in parts(whole)))


@by_name
def test_threads_change_no_bit(case: Case) -> None:
    x = rows_of(0, 70, 901 * case.step, 2.0)
    alone = case.call(kernel_set(BEST), x)
    try:
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert same_bits(case.call(kernel_set(BEST), x), alone)
    finally:
        torch.set_num_threads(1)


@by_name
def test_the_comparison_of_bits_sees_the_last_one(case: Case) -> None:
    """The negative control: one unit in the last place of one element of the input or of the result."""
    x = rows_of(0, 3, 64 * case.step, 2.0)
    actual = parts(case.call(kernel_set(BEST), x))
    changed = tuple(part.clone() for part in actual)
    flat = changed[0].view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(math.inf))
    assert same_bits(actual, actual) and not same_bits(actual, changed)


@by_name
def test_special_values_are_the_same_on_every_instruction_set(case: Case) -> None:
    """NaN, infinities, denormals and extremes, in vectors and in tails."""
    special = torch.tensor(
        [math.nan, math.inf, -math.inf, 1e-42, -1e-42, 3.4e38, -3.4e38, 0.0, -0.0, 88.9, -88.9, 104.5]
    )
    for value in special:
        x = rows_of(3, 5, 37 * case.step, 1.0)
        x[0, 0] = x[1, 36] = x[2, -1] = x[3, 20] = value
        results = [case.call(kernel_set(isa), x) for isa in ISAS]
        assert all(same_bits(result, results[0]) for result in results)
        untouched = case.call(kernel_set(BEST), x[4:].clone())
        assert same_bits(tuple(part[4:] for part in parts(results[0])), untouched)
        if value.isnan() and case.name != "rms_norm of the first half":
            assert all(part[0].isnan().any() for part in parts(results[0]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_stored_types_of_parameters(name: str, dtype: torch.dtype) -> None:
    x = rows_of(0, 4, 77, 1.0)
    weight, bias = parameters(77, dtype)
    arguments = (weight, bias) if name == "layer_norm" else (weight,)
    narrow = kernel_set(BEST).op(name)(x, *arguments, 1e-6)
    wide = kernel_set(BEST).op(name)(x, *(part.float() for part in arguments), 1e-6)
    assert torch.equal(narrow, wide)
    assert name == "layer_norm" or torch.equal(
        kernel_set(BEST).op(name)(x, None, 1e-6), kernel_set(BEST).op(name)(x, torch.ones(77), 1e-6)
    )


@settings(max_examples=30)
@given(
    seed=seeds,
    tokens=st.integers(0, 40),
    heads=st.integers(1, 4),
    head_size=st.sampled_from([4, 10, 64, 80, 128]),
    share=st.sampled_from([1.0, 0.5]),
    halves_paired=st.booleans(),
)
def test_rotary_is_its_twin_bit_for_bit(
    seed: int, tokens: int, heads: int, head_size: int, share: float, halves_paired: bool
) -> None:
    """Also on views into a fused product, as the model has them."""
    rotated = int(head_size * share) // 2 * 2
    table = normal(seed, 50, rotated)
    positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(seed))
    fused = normal(seed + 1, tokens, (heads + 1) * head_size + 3)
    query, key, _ = fused.split([heads * head_size, head_size, 3], dim=-1)
    arguments = (positions, query, key, table, head_size, halves_paired)
    expected = REFERENCE.op("rotary_embedding")(positions, query.contiguous(), key.contiguous(), *arguments[3:])
    for isa in ISAS:
        assert same_bits(kernel_set(isa).op("rotary_embedding")(*arguments), expected)


def test_rotary_refuses_what_does_not_fit() -> None:
    x = normal(0, 2, 8)
    for positions, key in ((torch.tensor([3]), x), (torch.tensor([3, 4]), x[:1])):
        with pytest.raises(ValueError, match="2 tokens need as many positions and keys"):
            kernel_set(BEST).op("rotary_embedding")(positions, x, key, normal(1, 50, 8), 8)


@pytest.mark.parametrize("position", [-1, 50])
def test_positions_out_of_the_table_are_refused(position: int) -> None:
    x = normal(0, 2, 8)
    with pytest.raises(IndexError, match=rf"positions\[1\] is {position}, the rotary table has 50"):
        kernel_set(BEST).op("rotary_embedding")(torch.tensor([3, position]), x, x, normal(1, 50, 8), 8)


def test_selected_rows_are_their_twin_and_none_is_outside() -> None:
    x, indices = normal(0, 9, 7), torch.tensor([8, 0, 0, 3])
    for isa in ISAS:
        select = kernel_set(isa).op("select_rows")
        assert torch.equal(select(x, indices), REFERENCE.op("select_rows")(x, indices))
        assert select(x, indices[:0]).shape == (0, 7)
        ids = torch.tensor([[5, -1], [1 << 40, 0], [-(1 << 63), 7]])
        assert torch.equal(select(ids, torch.tensor([2, 0, 2, 1])), ids[[2, 0, 2, 1]])
        for outside in (-1, 9):
            with pytest.raises(IndexError, match=rf"\[0, 9\), got .*{outside}"):
                select(x, torch.tensor([4, outside]))


def test_ids_that_a_table_lacks_are_the_first() -> None:
    ids = torch.tensor([8, 0, 9, 3, 10])
    for isa in ISAS:
        found = kernel_set(isa).op("ids_below")(ids, 9)
        assert found.tolist() == REFERENCE.op("ids_below")(ids, 9).tolist() == [8, 0, 0, 3, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda op: op("rms_norm")(torch.zeros(2, 8), torch.zeros(7), 1e-6),
        lambda op: op("rms_norm")(torch.zeros(2, 8), torch.zeros(8), 1e-6, 9),
        lambda op: op("add_rms_norm")(torch.zeros(2, 8), torch.zeros(1, 8), torch.zeros(8), 1e-6),
        lambda op: op("layer_norm")(torch.zeros(2, 8), torch.zeros(8), torch.zeros(7), 1e-6),
        lambda op: op("silu_and_mul")(torch.zeros(2, 7)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError):
        call(kernel_set(BEST).op)


# The elementary functions, error in units in the last place

FUNCTIONS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor], float]] = {
    "exp": (0, torch.exp, 1.0),
    "exp2": (1, torch.exp2, 1.0),
    "tanh": (2, torch.tanh, 2.0),
    "erf": (3, torch.erf, 1.5),
    "softplus": (4, lambda x: torch.nn.functional.softplus(x, threshold=700), 3.0),
}


def evaluate(name: str, x: torch.Tensor, isa: str = BEST) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    library: Any = kernel_set(isa).library
    library.call(KERNELS["llm_probe_math"], FUNCTIONS[name][0], x.data_ptr(), out.data_ptr(), x.numel())
    return out


def domain(name: str) -> torch.Tensor:
    """Both signs (exp2: x <= 0), tiny and large, and past where the function is flat."""
    small = torch.logspace(-37, 0, 200_001)
    even = {"exp": torch.linspace(-87.3, 88.7, 400_001), "exp2": torch.linspace(-126, 0, 400_001)}
    x = torch.cat((-small, even.get(name, torch.linspace(-12, 12, 400_001))))
    return x if name == "exp2" else torch.cat((small, x))


def ulps(actual: torch.Tensor, exact: torch.Tensor) -> float:
    rounded = exact.float().abs()
    unit = (torch.nextafter(rounded, torch.tensor(math.inf)) - rounded).double()
    return ((actual.double() - exact).abs() / unit).max().item()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions(name: str) -> None:
    x = domain(name)
    _, exact, allowed = FUNCTIONS[name]
    actual = evaluate(name, x)
    assert ulps(actual, exact(x.double())) <= allowed
    for isa in ISAS:
        assert torch.equal(evaluate(name, x[::37], isa), actual[::37])
    assert ulps(actual * (1 + 2**-21), exact(x.double())) > allowed  # the control


def test_elementary_functions_at_their_ends() -> None:
    inf, nan = math.inf, math.nan
    ends = {
        "exp": ([inf, -inf, nan, 0, 89, -105, -100], [inf, 0, nan, 1, inf, 0, math.exp(-100)]),
        "exp2": ([-inf, nan, 0, -126, -126.25, -126.51, -3e38], [0, nan, 1, 2.0**-126, 2.0**-126.25, 0, 0]),
        "tanh": ([inf, -inf, nan, 0], [1, -1, nan, 0]),
        "erf": ([inf, -inf, nan, 0], [1, -1, nan, 0]),
        "softplus": ([inf, -inf, nan, 0, 200, -100], [inf, 0, nan, math.log(2), 200, math.exp(-100)]),
    }
    for isa in ISAS:
        for name, (x, expected) in ends.items():
            actual = evaluate(name, torch.tensor(x, dtype=torch.float32), isa)
            torch.testing.assert_close(
                actual, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-45, equal_nan=True
            )


def test_products_are_their_twins_for_rows_of_any_stride() -> None:
    x = normal(0, 5, 60)
    left, right = x[:, :19], x[:, 20:39]
    for isa in ISAS:
        multiply = kernel_set(isa).op("multiply")
        assert torch.equal(multiply(left, right), left * right)
        with pytest.raises(ValueError, match="matrices of one shape"):
            multiply(left, x)


def test_sums_are_their_twins_for_rows_of_any_stride() -> None:
    x = normal(0, 300, 60)
    left, right = x[:, :19], x[:, 20:39]
    for isa in ISAS:
        add = kernel_set(isa).op("add")
        assert torch.equal(add(left, right), left + right) and torch.equal(add(x, x), x + x)
        with pytest.raises(ValueError, match="matrices of one shape"):
            add(left, x)
