"""Every operation in the registry computes its definition: one walk over all of them.

Each op x each dispatch target available here x float32, bfloat16, float16 x 0, 1, odd and many rows, against float64.
The cases are in op_cases/; an operation that is registered without a case fails here.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_cases import CASES, Case
from tiny_models import one_thread
from torch import nn

import llm.layers
from llm.errors import ValidationError
from llm.layers import activation, norm, rotary
from llm.layers.custom_op import CustomOp, op_registry
from llm.layers.rotary import RopeParameters

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 7, 130)
# The suffixes of `forward_*` that this machine can run; an op has those that its class defines.
TARGETS = ("native", "cpu")

for _module in pkgutil.walk_packages(llm.layers.__path__, "llm.layers."):
    importlib.import_module(_module.name)
IN_TREE = {name: op for name, op in op_registry.items() if op.__module__.startswith("llm.")}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def targets(op: type) -> list[str]:
    """The dispatch targets of a class: those it defines itself, beyond the fallbacks of CustomOp."""
    own = []
    for target in TARGETS:
        method = getattr(op, f"forward_{target}", None)
        if method is not None and method is not getattr(CustomOp, f"forward_{target}", None):
            own.append(target)
    return own


WALK = [
    pytest.param(case, target, id=f"{name}-{index}-{target}")
    for name, op in sorted(IN_TREE.items())
    for index, case in enumerate(CASES.get(name, ()))
    for target in targets(op)
]


def without_entry(registry: dict[str, Any], cases: dict[str, list[Case]]) -> set[str]:
    return {name for name in registry if not cases.get(name)}


def built(case: Case, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """The op with its parameters moved off their initial values."""
    op = case.build(dtype)
    for parameter in op.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data.copy_(parameter.data.float().nan_to_num() + noise)
    return op


def widened(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def check(actual: Any, expected: Any, dtype: torch.dtype, tolerance: float) -> None:
    """`actual` is `expected` computed in float32 and rounded once to `dtype`."""
    if isinstance(expected, tuple):
        assert isinstance(actual, tuple) and len(actual) == len(expected)
        for part, part_expected in zip(actual, expected, strict=True):
            check(part, part_expected, dtype, tolerance)
        return
    assert actual.dtype == dtype and actual.shape == expected.shape
    if not expected.numel():
        return
    info = torch.finfo(dtype)
    arithmetic = tolerance * max(1.0, expected.abs().max().item())
    rounding = 0.0 if dtype == torch.float32 else 0.501 * info.eps
    bound = arithmetic + rounding * (expected.abs() + info.smallest_normal)
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"error {error.max():.3g}, {(error / bound).max():.3g} of what is allowed"


def run(case: Case, target: str, dtype: torch.dtype, rows: int) -> tuple[Any, Any]:
    """(what the op returns, what the reference returns); inputs must come out unchanged."""
    seed = zlib.crc32(f"{rows}-{dtype}".encode())
    generator = torch.Generator().manual_seed(seed)
    op = built(case, dtype, generator)
    inputs = case.inputs(rows, dtype, generator)
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    actual = getattr(op, f"forward_{target}")(*inputs)
    for value, copy in zip(inputs, before, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, copy), "an input was written to"
    return actual, case.reference(op, *map(widened, inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "target"), WALK)
def test_op_is_its_definition(case: Case, target: str, dtype: torch.dtype) -> None:
    for rows in ROWS:
        check(*run(case, target, dtype, rows), dtype, case.tolerance)


def test_every_op_has_an_entry() -> None:
    assert without_entry(IN_TREE, CASES) == set()
    assert set(CASES) <= set(IN_TREE), "entries of operations that do not exist"


# Negative controls: the walk turns red.


def test_an_op_without_an_entry_is_caught() -> None:
    assert without_entry({**IN_TREE, "made_up": CustomOp}, CASES) == {"made_up"}
    assert without_entry(IN_TREE, {**CASES, "rms_norm": []}) == {"rms_norm"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "target"), WALK)
def test_a_small_error_is_caught(case: Case, target: str, dtype: torch.dtype) -> None:
    """One element off by a few roundings, where results are largest."""
    actual, expected = run(case, target, dtype, 7)
    first = actual[0] if isinstance(actual, tuple) else actual
    flat = first.view(-1)
    index = int(flat.abs().argmax())
    relative = max(16 * case.tolerance, 2 * torch.finfo(dtype).eps)
    flat[index] += flat[index].abs().clamp(min=1.0) * relative
    with pytest.raises(AssertionError):
        check(actual, expected, dtype, case.tolerance)


@pytest.mark.parametrize("name", ["silu_and_mul", "rms_norm"])
def test_a_planted_defect_is_caught(name: str) -> None:
    """Halves exchanged; a mean over one channel too few."""
    case = CASES[name][0]
    wrong = {
        "silu_and_mul": lambda dtype: activation.MulAndSilu(),
        "rms_norm": lambda dtype: norm.RMSNorm(66, 1e-5, var_hidden_size=65, dtype=dtype),
    }[name]
    reference = case.build(torch.float32)
    planted = replace(case, build=wrong, reference=lambda op, x: case.reference(reference, x))
    with pytest.raises(AssertionError):
        check(*run(planted, "native", torch.float32, 7), torch.float32, case.tolerance)


# What a constructor refuses


@pytest.mark.parametrize(
    ("build", "parameter"),
    [
        (lambda: activation.GeluAndMul("erf"), "approximate"),
        (lambda: activation.GeluAndMulSparse(0.5, "erf"), "approximate"),
        (lambda: activation.GeluAndMulSparse(0.0), "activation_sparsity"),
        (lambda: activation.GeluAndMulSparse(1.0), "activation_sparsity"),
        (lambda: norm.RMSNorm(8, var_hidden_size=9), "var_hidden_size"),
        (lambda: norm.RMSNormGated(8, group_size=3), "group_size"),
        (lambda: norm.RMSNormGated(8, activation="relu"), "activation"),
        (lambda: norm.Mixer2RMSNormGated(8, 3), "full_n_groups"),
        (lambda: rotary.RotaryEmbedding(8, 9, RopeParameters(mrope_section=(1, 1, 1))), "mrope_section"),
        (lambda: rotary.RotaryEmbedding(8, 9, RopeParameters(mrope_section=(2, 2))), "mrope_section"),
        (
            lambda: rotary.RotaryEmbedding(8, 9, RopeParameters(mrope_section=(0, 2, 2), mrope_interleaved=True)),
            "mrope_section",
        ),
        (lambda: rotary.DualChunkRotaryEmbedding(8, 8, 9, 1e4, chunk_size=4, local_size=4), "local_size"),
    ],
)
def test_a_constructor_names_what_is_wrong(build: Any, parameter: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build()
    assert caught.value.parameter == parameter


def test_a_gated_activation_needs_two_halves() -> None:
    for op in (activation.SiluAndMul(), activation.SwigluOAIAndMul()):
        with pytest.raises(ValueError, match="even"):
            op.forward_native(torch.zeros(2, 5))


def test_positions_of_a_grid_need_sections() -> None:
    op = rotary.RotaryEmbedding(8, 9, RopeParameters())
    with pytest.raises(ValueError, match="mrope_section"):
        op.forward_native(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 8), torch.zeros(2, 8))
