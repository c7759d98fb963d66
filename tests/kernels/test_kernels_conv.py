"""Causal convolution: the definition and the kernels against a float64 loop; a row's bits in any chunks and batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import normal

from llm.forward import RecurrentMetadata
from llm.kernels.reference.recurrent import causal_conv1d

pytestmark = pytest.mark.usefixtures("one_core")

BACKENDS = ["reference", *(pytest.param(isa, marks=needs_compiler) for isa in ISAS)]


def operation(name: str) -> Any:
    return causal_conv1d if name == "reference" else kernel_set(name).op("causal_conv1d")


def same(backend: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits; for PyTorch's silu, whose bits depend on the tensor's size, the same numbers."""
    return torch.allclose(one, other, rtol=1e-6) if backend == "reference" else torch.equal(one, other)


def convolved_64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """A whole row from position 0, in float64, token by token."""
    channels, taps = weight.shape
    inputs = torch.cat([torch.zeros(taps - 1, channels, dtype=torch.float64), x.double()])
    lines = [(inputs[t : t + taps] * weight.double().t()).sum(0) for t in range(len(x))]
    y = torch.stack(lines) + (0.0 if bias is None else bias.double())
    return y * y.sigmoid() if silu else y


def in_steps(
    convolve: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int], silu: bool
) -> torch.Tensor:
    """The row in slot 1, whose state an earlier request left, in chunks of `sizes`."""
    channels, taps = weight.shape
    state = torch.full((3, channels, taps - 1), torch.nan)
    parts, done = [], 0
    for size in sizes:
        step = RecurrentMetadata.of_rows((1, done, size))
        parts.append(convolve(x[done : done + size], weight, bias, state, step, "silu" if silu else None))
        done += size
    assert state[[0, 2]].isnan().all()
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("channels", "taps", "silu", "dtype"),
    [(5, 4, True, torch.float32), (300, 3, False, torch.bfloat16), (272, 4, True, torch.float16), (16, 1, False, None)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_a_convolution_in_any_chunks(
    backend: str, channels: int, taps: int, silu: bool, dtype: torch.dtype | None
) -> None:
    x, weight = normal(1, 11, channels), normal(2, channels, taps).to(dtype or torch.float32)
    bias = None if dtype is None else normal(3, channels).to(dtype)
    whole = in_steps(operation(backend), x, weight, bias, [11], silu)
    assert torch.allclose(whole.double(), convolved_64(x, weight, bias, silu), rtol=1e-5, atol=2e-6)
    for sizes in ([1] * 11, [2, 1, 5, 3], [10, 1]):
        assert same(backend, in_steps(operation(backend), x, weight, bias, sizes, silu), whole)
    columns = weight.t().contiguous().t()
    assert same(backend, in_steps(operation(backend), x, columns, bias, [4, 7], silu), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_batch_are_those_alone(backend: str) -> None:
    """In slots of any order, in a state whose channels are side by side, with rows of a wider matrix as inputs."""
    convolve, weight, bias = operation(backend), normal(2, 37, 4), normal(3, 37)
    x = normal(1, 9, 60)[:, :37]
    state = normal(4, 5, 3, 37)
    expected = state.clone().transpose(1, 2)
    of = [(3, 7, 2), (0, 0, 4), (4, 1, 1), (1, 0, 2)]
    alone, first = [], 0
    for row in of:
        alone.append(
            convolve(x[first : first + row[2]], weight, bias, expected, RecurrentMetadata.of_rows(row), "silu")
        )
        first += row[2]
    view = state.transpose(1, 2)
    assert same(backend, convolve(x, weight, bias, view, RecurrentMetadata.of_rows(*of), "silu"), torch.cat(alone))
    assert torch.equal(view, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused(backend: str) -> None:
    convolve, x, state = operation(backend), torch.zeros(2, 3), torch.zeros(2, 3, 3)
    with pytest.raises(ValueError, match="'tanh'"):
        convolve(x, torch.zeros(3, 4), None, state, RecurrentMetadata.of_rows((0, 0, 2)), "tanh")
    with pytest.raises(ValueError, match="3 channels"):
        convolve(x, torch.zeros(4, 4), None, state, RecurrentMetadata.of_rows((0, 0, 2)))
    with pytest.raises(ValueError, match="the state is float32"):
        convolve(x, torch.zeros(3, 3), None, state, RecurrentMetadata.of_rows((0, 0, 2)))
    for slot in (-1, 2):
        with pytest.raises(IndexError, match=f"slot {slot} "):
            convolve(x, torch.zeros(3, 4), None, state, RecurrentMetadata.of_rows((slot, 0, 2)))
