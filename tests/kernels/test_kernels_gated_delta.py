"""The gated delta rule: definition and kernels against float64; a row's bits in any chunks, batch and slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import normal

from llm.forward import RecurrentMetadata
from llm.kernels.reference.recurrent import gated_delta_rule

pytestmark = pytest.mark.usefixtures("one_core")

BACKENDS = ["reference", *(pytest.param(isa, marks=needs_compiler) for isa in ISAS)]


def operation(name: str) -> Any:
    return gated_delta_rule if name == "reference" else kernel_set(name).op("gated_delta_rule")


@dataclass
class Inputs:
    """One row's tokens; `size` are key heads, heads, key channels and value channels."""

    size: tuple[int, int, int, int]
    tokens: int = 9
    per_channel: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        key_heads, heads, keys, values = self.size
        decays = (heads, keys) if self.per_channel else (heads,)
        mixed = normal(self.seed, self.tokens, (2 * key_heads) * keys + heads * values)
        query, key, value = mixed.split([key_heads * keys, key_heads * keys, heads * values], dim=-1)
        self.of_tokens = (
            query.unflatten(1, (key_heads, keys)),
            key.unflatten(1, (key_heads, keys)),
            value.unflatten(1, (heads, values)) * 3,
            normal(self.seed + 1, self.tokens, *decays) * 2 - 1,
            normal(self.seed + 2, self.tokens, heads),
        )
        self.of_heads = -normal(self.seed + 3, heads).exp(), normal(self.seed + 4, *decays)

    def state(self, slots: int) -> torch.Tensor:
        return torch.full((slots, self.size[1], *self.size[2:]), torch.nan)

    def expected(self, scale: float) -> torch.Tensor:
        """Head by head, in float64."""
        query, key, value, decay, beta = (item.double() for item in self.of_tokens)
        a, dt_bias = (item.double() for item in self.of_heads)
        key_heads, heads, keys, values = self.size
        out = torch.zeros(self.tokens, heads, values, dtype=torch.float64)
        for head in range(heads):
            state, of = torch.zeros(keys, values, dtype=torch.float64), head * key_heads // heads
            for t in range(self.tokens):
                kept = (a[head] * (1 + (decay[t, head] + dt_bias[head]).exp()).log()).exp()
                k, q = (x[t, of] / (x[t, of].square().sum() + 1e-6).sqrt() for x in (key, query))
                state = state * kept.reshape(-1, 1)
                state = state + torch.outer(k, (value[t, head] - k @ state) * scale / (1 + (-beta[t, head]).exp()))
                out[t, head] = q @ state / keys**0.5
        return out


def same(backend: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits; PyTorch's sums depend on a tensor's size."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6) if backend == "reference" else torch.equal(one, other)


@pytest.mark.parametrize(
    ("size", "per_channel", "scale"),
    [((1, 1, 3, 5), False, 1.0), ((2, 4, 16, 40), False, 2.0), ((3, 3, 20, 33), True, 1.0), ((1, 2, 1, 1), True, 1.0)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_recurrence_in_any_chunks(
    backend: str, size: tuple[int, int, int, int], per_channel: bool, scale: float
) -> None:
    inputs, rule = Inputs(size, per_channel=per_channel), operation(backend)

    def run(*chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
        state, parts, done = inputs.state(3), [], 0
        for count in chunks:
            part = [item[done : done + count] for item in inputs.of_tokens]
            parts.append(
                rule(*part, *inputs.of_heads, state, RecurrentMetadata.of_rows((1, done, count)), beta_scale=scale)
            )
            done += count
        assert state[[0, 2]].isnan().all()
        return torch.cat(parts), state[1]

    whole, state = run(9)
    assert torch.allclose(whole.double(), inputs.expected(scale), rtol=2e-5, atol=2e-5)
    for chunks in ((1,) * 9, (2, 1, 6)):
        cut, its_state = run(*chunks)
        assert same(backend, cut, whole) and same(backend, its_state, state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_batch_are_those_alone(backend: str) -> None:
    inputs, rule = Inputs((2, 4, 16, 40)), operation(backend)
    of = [(3, 7, 2), (0, 0, 4), (4, 1, 1), (1, 0, 2)]
    state = normal(9, 5, 4, 16, 40)
    expected, alone, first = state.clone(), [], 0
    for row in of:
        part = [item[first : first + row[2]] for item in inputs.of_tokens]
        alone.append(rule(*part, *inputs.of_heads, expected, RecurrentMetadata.of_rows(row)))
        first += row[2]
    assert same(
        backend, rule(*inputs.of_tokens, *inputs.of_heads, state, RecurrentMetadata.of_rows(*of)), torch.cat(alone)
    )
    assert same(backend, state, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused(backend: str) -> None:
    inputs, rule = Inputs((2, 4, 16, 40)), operation(backend)
    with pytest.raises(ValueError, match="the state"):
        rule(*inputs.of_tokens, *inputs.of_heads, torch.zeros(2, 4, 40, 16), RecurrentMetadata.of_rows((0, 0, 9)))
    with pytest.raises(ValueError, match="takes float32"):
        rule(*inputs.of_tokens, *inputs.of_heads, inputs.state(2).double(), RecurrentMetadata.of_rows((0, 0, 9)))
    with pytest.raises(IndexError, match="slot 2 "):
        rule(*inputs.of_tokens, *inputs.of_heads, inputs.state(2), RecurrentMetadata.of_rows((2, 0, 9)))
