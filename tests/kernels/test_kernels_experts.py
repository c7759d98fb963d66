"""The experts in C++: bit for bit the loop over `linear`, the activation and the sum; and a row's bits against its
company, its place, the number of threads and what is computed beside it.

Every test of bits runs on each instruction set of kernel_sets.TARGETS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from kernel_sets import TARGETS, needs_compiler

from llm.kernels.cpu import activation, library, linear, packed
from llm.kernels.cpu.backend import CpuBackend
from llm.kernels.cpu.experts import experts
from llm.kernels.cpu.program import record
from llm.kernels.reference.experts import experts as definition
from llm.kernels.weight import ExpertWeights, Weight

pytestmark = [needs_compiler, pytest.mark.usefixtures("seeded")]
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")
UNGATED = "relu2_no_mul"
LIMIT = 7.0


@pytest.fixture(scope="module")
def best() -> library.Library:
    return library.load_library(TARGETS[-1])


Make = Callable[[library.Library, int, int], packed.PanelWeight]


def floats(dtype: torch.dtype, activations: str = "float") -> Make:
    def make(lib: library.Library, n: int, k: int) -> packed.PanelWeight:
        weight = packed.pack(lib, (torch.randn(n, k) / k**0.5).to(dtype))
        return dataclasses.replace(weight, bias=torch.randn(n), activations=activations)

    return make


def integers(kind: str, activations: str, group: int = 0, zeros: bool = False) -> Make:
    def make(lib: library.Library, n: int, k: int) -> packed.PanelWeight:
        high = 127 if kind == "int8" else 7
        values = torch.randint(-high - 1, high + 1, (n, k), dtype=torch.int8)
        groups = -(-k // group) if group else 1
        zero = torch.randint(-high, high, (n, groups)).float() if zeros else None
        weight = packed.pack(lib, values, kind).scaled((torch.rand(n, groups) + 0.1) / high / k**0.5, zero, group)
        return dataclasses.replace(weight, bias=torch.randn(n) if group else None, activations=activations)

    return make


def static(lib: library.Library, n: int, k: int) -> packed.PanelWeight:
    values = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    weight = packed.pack(lib, values, "int8").scaled(torch.rand(n, 1) / 127 / k**0.5)
    return dataclasses.replace(weight, activations="int8", input_scale=0.03, input_offset=5, bias=torch.randn(n))


def minima(kind: str) -> Make:
    def make(lib: library.Library, n: int, k: int) -> packed.PanelWeight:
        weight = integers(kind, "float", 8)(lib, n, k)
        return weight.scaled(weight.scales, group_size=8, minimum=torch.rand(n, weight.groups) * 8 * weight.scales)

    return make


def float8(lib: library.Library, n: int, k: int) -> packed.PanelWeight:
    weight = packed.pack(lib, torch.randn(n, k).to(torch.float8_e4m3fn))
    return weight.scaled((torch.rand(n, -(-k // 32)) + 0.1) / k**0.5, group_size=32)


def table(lib: library.Library, n: int, k: int) -> packed.PanelWeight:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 6
    return dataclasses.replace(integers("int4", "float", 32)(lib, n, k), table=torch.cat((values, -values)))


KINDS: dict[str, Make] = {
    "float32": floats(torch.float32),
    "bfloat16": floats(torch.bfloat16),
    "bfloat16, rounded": floats(torch.bfloat16, "bfloat16"),
    "float16": floats(torch.float16),
    "w8a8": integers("int8", "int8"),
    "w8a8 static": static,
    "w4a8": integers("int4", "int8"),
    "w4a8 g=8": integers("int4", "int8", 8),
    "w8a16": integers("int8", "float", 32, zeros=True),
    "w4a16": integers("int4", "float", 32, zeros=True),
    "w4a16 g=8": integers("int4", "float", 8),
    "w4a16, rounded": integers("int4", "bfloat16", 32, zeros=True),
    "w4a16, minima": minima("int4"),
    "w8a16, minima": minima("int8"),
    "float8": float8,
    "table": table,
}


# Of one layer, expert by expert: patterns may quantize some in another way than others.
SEVERAL = ("w4a8", "bfloat16", "w8a8 static", "w4a16 g=8", "float32")


def mixture(lib: library.Library, kind: str, count: int, hidden: int, inner: int) -> ExpertWeights:
    makes = [KINDS[SEVERAL[index % len(SEVERAL)] if kind == "several" else kind] for index in range(count)]
    gate_up = tuple(make(lib, 2 * inner, hidden) for make in makes)
    return ExpertWeights(gate_up, tuple(make(lib, hidden, inner) for make in makes))


def routing(tokens: int, slots: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each token, and weights of any size and sign."""
    ids = (
        torch.stack([torch.randperm(count)[:slots] for _ in range(tokens)]) if tokens else torch.zeros(0, slots).long()
    )
    return ids, torch.randn(tokens, slots)


def without_gates(lib: library.Library, kind: str, count: int, hidden: int, inner: int) -> ExpertWeights:
    whole = mixture(lib, kind, count, hidden, inner)
    return ExpertWeights(tuple(KINDS[kind](lib, inner, hidden) for _ in range(count)), whole.down)


def gated(lib: library.Library, both: torch.Tensor, function: str) -> torch.Tensor:
    if function == UNGATED:
        return activation.relu2(lib, both)
    if function == "silu":
        return activation.silu_and_mul(lib, both)
    if function != "swigluoai":
        return activation.gelu_and_mul(lib, both, "none" if function == "gelu" else "tanh")
    gate, up = both.chunk(2, dim=-1)
    return activation.quick_gelu(lib, gate.clamp(max=LIMIT)) * (up.clamp(-LIMIT, LIMIT) + 1)


def twin(
    lib: library.Library,
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    weights: ExpertWeights,
    function: str = "silu",
) -> torch.Tensor:
    """The loop over the experts, in Python, over the GEMM and the activations of the same library."""
    products = torch.zeros(*ids.shape, weights.hidden_size)
    for index, (gate_up, down) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
        tokens, slots = (ids == index).nonzero(as_tuple=True)
        products[tokens, slots] = linear.linear(lib, gated(lib, linear.linear(lib, x[tokens], gate_up), function), down)
    total = torch.zeros(len(x), weights.hidden_size)
    for slot in range(ids.shape[1]):
        term = factors[:, slot, None] * products[:, slot]
        total = total + term if slot else term
    return total


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, except that any NaN equals any other."""
    return a.shape == b.shape and bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


# tokens, slots, experts, hidden, inner: one token, one of each, the 16 lanes missed, several slices that begin within
# a panel, every expert chosen, and no token.
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 2, 4, 40, 24),
    (3, 2, 5, 17, 9),
    (7, 4, 4, 72, 40),
    (23, 3, 6, 136, 72),
    (2, 2, 3, 33, 200),
    (0, 2, 3, 16, 16),
]


@pytest.mark.parametrize("kind", [*KINDS, "several"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_the_twin(lib: library.Library, shape: tuple[int, ...], kind: str) -> None:
    tokens, slots, count, hidden, inner = shape
    weights = mixture(lib, kind, count, hidden, inner)
    x, (ids, factors) = torch.randn(tokens, hidden), routing(tokens, slots, count)
    for function in ACTIVATIONS if kind == "float32" else ("silu",):
        result = experts(lib, x, ids, factors, weights, function)
        assert same(result, twin(lib, x, ids, factors, weights, function))


@pytest.mark.parametrize("kind", ["float32", "w4a8"])
def test_experts_without_a_gate(lib: library.Library, kind: str) -> None:
    for tokens, slots, count, hidden, inner in SHAPES[1:6]:
        weights = without_gates(lib, kind, count, hidden, inner)
        x, (ids, factors) = torch.randn(tokens, hidden), routing(tokens, slots, count)
        result = experts(lib, x, ids, factors, weights, UNGATED)
        assert same(result, twin(lib, x, ids, factors, weights, UNGATED))
    if kind == "float32":
        plain = ExpertWeights(*(tuple(map(unpacked, side)) for side in (weights.gate_up, weights.down)))
        assert torch.allclose(result, definition(x, ids, factors, plain, UNGATED), rtol=1e-4, atol=1e-3)
    for compute, one in ((experts, (lib,)), (definition, ())):
        with pytest.raises(ValueError, match="are of experts without a gate"):
            compute(*one, x, ids, factors, weights, "silu")
        with pytest.raises(ValueError, match="are of experts with a gate"):
            compute(*one, x, ids, factors, mixture(lib, kind, count, hidden, inner), UNGATED)


def exact(x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """In float64, of what the weights stand for."""
    total = torch.zeros(len(x), weights.hidden_size, dtype=torch.float64)
    for index, (gate_up, down) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
        factor = torch.where(ids == index, factors, 0.0).sum(1, keepdim=True).double()
        gate, up = affine_64(x.double(), gate_up).chunk(2, dim=-1)
        total += factor * affine_64(gate * torch.sigmoid(gate) * up, down)
    return total


def affine_64(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    product = x @ weight.dequantize().double().t()
    return product if weight.bias is None else product + weight.bias


# Of a result whose values are of the order of 1: the rounding of float32, of bfloat16 and of int8 activations.
BOUNDS = {"float": 1e-5, "bfloat16": 0.1, "int8": 0.3}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "static" not in kind])
def test_the_result_is_close_to_float64(lib: library.Library, kind: str) -> None:
    weights = mixture(lib, kind, 5, 64, 48)
    x, (ids, factors) = torch.randn(9, 64), routing(9, 3, 5)
    expected = exact(x, ids, factors, weights)
    error = (experts(lib, x, ids, factors, weights) - expected).abs().max()
    assert error <= BOUNDS[weights.down[0].activations] * expected.abs().max()
    other = exact(x, ids.roll(1, 0), factors, weights)  # other experts are another result
    assert (other - expected).abs().max() > 0.5 * expected.abs().max()


def test_every_activation_is_its_definition(best: library.Library) -> None:
    weights = mixture(best, "float32", 4, 32, 20)
    x, (ids, factors) = torch.randn(6, 32) * 9, routing(6, 2, 4)  # gates and ups beyond the limit, too
    plain = ExpertWeights(*(tuple(map(unpacked, side)) for side in (weights.gate_up, weights.down)))
    for function, limit in [*((name, 0.0) for name in ACTIVATIONS), ("swigluoai", 0.5)]:
        result = experts(best, x, ids, factors, weights, function, limit)
        assert torch.allclose(result, definition(x, ids, factors, plain, function, limit), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(result, experts(best, x, ids, factors, weights, "swigluoai"), rtol=1e-4, atol=1e-3)


def unpacked(weight: Weight) -> Weight:
    return Weight(weight.unpack(), weight.kind, weight.n, weight.k, bias=weight.bias)


# A row and its company.


@pytest.mark.parametrize("kind", [*KINDS, "several"])
def test_a_row_has_the_same_bits_alone(lib: library.Library, kind: str) -> None:
    weights = mixture(lib, kind, 5, 40, 24)
    x, (ids, factors) = torch.randn(40, 40), routing(40, 3, 5)
    together = experts(lib, x, ids, factors, weights)
    for row in (0, 17, 39):
        assert same(experts(lib, x[row, None], ids[row, None], factors[row, None], weights), together[row, None])
    order = torch.randperm(40)
    assert same(experts(lib, x[order], ids[order], factors[order], weights), together[order])


@pytest.mark.parametrize("kind", ["float32", "w4a8 g=8"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_threads_change_no_bit(lib: library.Library, kind: str, tokens: int, threads: Callable[[int], None]) -> None:
    weights = mixture(lib, kind, 6, 136, 200)
    x, (ids, factors) = torch.randn(tokens, 136), routing(tokens, 4, 6)
    expected = twin(lib, x, ids, factors, weights)
    for number in (1, 2, 3, 16):
        threads(number)
        assert same(experts(lib, x, ids, factors, weights), expected)


def test_the_slots_are_added_in_their_order(best: library.Library) -> None:
    """With weights that lose bits in one order and not in the other; not in the order of the experts."""
    weights = mixture(best, "float32", 3, 16, 16)
    x, ids = torch.randn(1, 16), torch.tensor([[2, 0, 1]])
    factors = torch.tensor([[1e8, -1e8, 1.0]])
    result = experts(best, x, ids, factors, weights)
    assert same(result, twin(best, x, ids, factors, weights))
    order = torch.tensor([1, 2, 0])
    assert not same(result, experts(best, x, ids[:, order], factors[:, order], weights))


def test_placement_changes_no_bit(best: library.Library) -> None:
    """Where an expert is among the others: what a balancer permutes."""
    weights = mixture(best, "bfloat16", 6, 48, 32)
    x, (ids, factors) = torch.randn(11, 48), routing(11, 3, 6)
    order = torch.randperm(6)
    moved = ExpertWeights(*(tuple(side[i] for i in order) for side in (weights.gate_up, weights.down)))
    expected = experts(best, x, ids, factors, weights)
    assert same(experts(best, x, order.argsort()[ids], factors, moved), expected)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "w8a8", "w4a8", "w4a16"])
def test_a_row_that_is_not_a_number_touches_no_other(lib: library.Library, kind: str) -> None:
    weights = mixture(lib, kind, 4, 32, 24)
    x, (ids, factors) = torch.randn(8, 32), routing(8, 2, 4)
    clean = experts(lib, x, ids, factors, weights)
    x[3, 5], factors[6, 1] = float("nan"), float("nan")
    result = experts(lib, x, ids, factors, weights)
    assert result[[3, 6]].isnan().all()
    rest = torch.tensor([0, 1, 2, 4, 5, 7])
    assert same(result[rest], clean[rest])


# Many tokens for few experts, and the blocks of a large step.


def test_all_tokens_of_one_expert_are_several_blocks_of_rows(best: library.Library) -> None:
    weights = mixture(best, "float32", 3, 8, 16)
    x, ids, factors = torch.randn(1100, 8), torch.ones(1100, 1).long(), torch.randn(1100, 1)
    assert same(experts(best, x, ids, factors, weights), twin(best, x, ids, factors, weights))
    ids[::3] = 2  # rows that are not side by side
    assert same(experts(best, x, ids, factors, weights), twin(best, x, ids, factors, weights))


def test_products_that_wait_for_their_sum_are_bounded(best: library.Library) -> None:
    """More than 32 MiB of them: the output channels are computed in several turns."""
    weights = mixture(best, "float32", 2, 136, 2)
    x, ids = torch.randn(33_000, 136), torch.tensor([[1, 0]]).repeat(33_000, 1)
    factors = torch.randn(33_000, 2)
    assert same(experts(best, x, ids, factors, weights), twin(best, x, ids, factors, weights))


def test_no_slot_is_no_expert(best: library.Library) -> None:
    weights = mixture(best, "float32", 2, 16, 16)
    result = experts(best, torch.randn(3, 16), torch.zeros(3, 0).long(), torch.zeros(3, 0), weights)
    assert same(result, torch.zeros(3, 16))


# What is refused.


def test_what_does_not_fit_is_refused(best: library.Library) -> None:
    weights = mixture(best, "float32", 3, 16, 8)
    x, ids, factors = torch.randn(2, 16), torch.tensor([[0, 2], [1, 0]]), torch.ones(2, 2)
    for bad in (3, -1):
        with pytest.raises(IndexError, match=rf"expert ids must be in \[0, 3\), got .*{bad}"):
            experts(best, x, torch.tensor([[0, 1], [bad, 2]]), factors, weights)
    with pytest.raises(ValueError, match=r"float32 \[N, 16\], got torch\.float32 \[2, 15\]"):
        experts(best, x[:, 1:], ids, factors, weights)
    with pytest.raises(ValueError, match=r"int64 \[2, K\], got torch\.int32"):
        experts(best, x, ids.int(), factors, weights)
    with pytest.raises(ValueError, match=r"float32 \[2, 2\], got torch\.float32 \[2, 1\]"):
        experts(best, x, ids, factors[:, :1], weights)
    with pytest.raises(ValueError, match="silu, gelu, gelu_tanh, swigluoai, relu2_no_mul, got 'relu'"):
        experts(best, x, ids, factors, weights, "relu")
    plain = ExpertWeights(*(tuple(map(unpacked, side)) for side in (weights.gate_up, weights.down)))
    with pytest.raises(TypeError, match="pack them"):
        experts(best, x, ids, factors, plain)
    bits = packed.pack(best, torch.zeros(16, 16, dtype=torch.int8), "int8")
    down = packed.pack(best, torch.zeros(16, 8, dtype=torch.int8), "int8")
    for side in (bits, bits.scaled(torch.ones(16, 1))):
        with pytest.raises(ValueError, match="a weight of int8 needs its scales"):
            experts(best, x, ids, factors, ExpertWeights((side,) * 3, (down,) * 3))


# Recorded steps, and memory that moves.


def test_a_recorded_step_follows_its_router(best: library.Library) -> None:
    """Other experts, other weights and another input than those it was recorded with."""
    backend = CpuBackend(best, "a test asked for it")
    weights = mixture(best, "w8a8", 6, 40, 24)
    x, (ids, factors) = torch.randn(2, 40), routing(2, 3, 6)
    with record(best) as program:
        out = backend.op("experts")(x, ids, factors, weights)
    assert len(program) == 1
    for _ in range(3):
        x.copy_(torch.randn(2, 40))
        for held, fresh in zip((ids, factors), routing(2, 3, 6), strict=True):
            held.copy_(fresh)
        expected = twin(best, x, ids, factors, weights)
        assert program.run() and same(out, expected)
    ids[1, 2] = 6
    assert not program.run()


def test_the_struct_follows_a_weight_whose_memory_is_replaced(best: library.Library) -> None:
    weights = mixture(best, "float32", 3, 16, 16)
    x, (ids, factors) = torch.randn(4, 16), routing(4, 2, 3)
    expected = experts(best, x, ids, factors, weights)
    held = weights.down[1].data
    held.data = held.clone()
    assert same(experts(best, x, ids, factors, weights), expected)
    held.data = torch.empty(0)
    with pytest.raises(ValueError, match="was its memory freed"):
        experts(best, x, ids, factors, weights)
