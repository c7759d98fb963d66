"""The recurrences of Mamba and Mamba 2: definition and kernels against a float64 loop; the same bits in any chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import normal

from llm.forward import RecurrentMetadata
from llm.kernels.reference import recurrent

pytestmark = pytest.mark.usefixtures("one_core")

BACKENDS = ["reference", *(pytest.param(isa, marks=needs_compiler) for isa in ISAS)]
TOKENS = 23


@dataclass(frozen=True)
class Inputs:
    """One recurrence: its operation, what it gets of each token, the rest of its arguments, the shape of its state."""

    operation: str
    tokens: dict[str, torch.Tensor]
    constants: dict[str, Any]
    state: tuple[int, ...]

    def run(self, backend: str, tokens: slice, state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
        own = recurrent if backend == "reference" else kernel_set(backend).ops
        parts = {name: tensor[tokens] for name, tensor in self.tokens.items()}
        return getattr(own, self.operation)(**parts, **self.constants, state=state, metadata=metadata)


def mamba(channels: int, states: int, bias: bool = True, gate: bool = True) -> Inputs:
    """B and C are columns of a wider matrix, as the projection leaves them."""
    wide = normal(1, TOKENS, 2 * states + 3)
    tokens = {
        **{"x": normal(2, TOKENS, channels), "dt": normal(3, TOKENS, channels)},
        **{"b": wide[:, 3 : 3 + states], "c": wide[:, 3 + states :]},
        "gate": normal(4, TOKENS, 2 * channels)[:, channels:] if gate else None,
    }
    constants = {
        **{"a": -normal(5, states, channels).exp(), "d": normal(6, channels)},
        "dt_bias": normal(7, channels) if bias else None,
    }
    if not gate:
        constants["gate"] = tokens.pop("gate")
    return Inputs("selective_scan", tokens, constants, (states, channels))


def mamba2(heads: int, size: int, states: int, groups: int = 1, limit: Any = None, by_channel: bool = False) -> Inputs:
    tokens = {
        **{"x": normal(1, TOKENS, heads * size + 5)[:, 5:], "dt": normal(2, TOKENS, heads)},
        **{"b": normal(3, TOKENS, groups * states), "c": normal(4, TOKENS, groups * states)},
    }
    constants = {
        **{"a": -normal(5, heads).exp(), "d": normal(6, heads * size if by_channel else heads)},
        **{"dt_bias": normal(7, heads), "dt_limit": limit or recurrent.NO_LIMIT},
    }
    return Inputs("mamba2_scan", tokens, constants, (heads, states, size))


CASES = {
    "mamba": mamba(130, 16),
    "mamba, odd": mamba(37, 5, bias=False, gate=False),
    "mamba2": mamba2(2, 64, 32),
    "mamba2, odd": mamba2(6, 21, 7, groups=3, limit=(0.3, 1.1), by_channel=True),
    "mamba2, wide": mamba2(1, 99, 9, limit=(0.0, 0.9)),
}


def exact(case: Inputs) -> torch.Tensor:
    """A whole row from position 0, in float64, one channel's states at a time, token by token."""
    given = {**case.tokens, **case.constants}
    wide = {name: value.double() for name, value in given.items() if isinstance(value, torch.Tensor)}
    step = torch.log1p(torch.exp(wide["dt"] + wide.get("dt_bias", 0.0)))
    x, d, rate, b, c = wide["x"], wide["d"], wide["a"], wide["b"], wide["c"]
    if case.operation == "mamba2_scan":
        heads, states, size = case.state
        step = step.clamp(*given["dt_limit"]).repeat_interleave(size, 1)
        rate = rate.repeat_interleave(size).unsqueeze(1).expand(-1, states)
        d = d if len(d) == heads * size else d.repeat_interleave(size)
        shared = heads // (b.shape[1] // states)
        b, c = (part.view(TOKENS, -1, states).repeat_interleave(shared * size, 1) for part in (b, c))
    else:
        rate, b, c = rate.t(), b.unsqueeze(1), c.unsqueeze(1)
    state, lines = torch.zeros(rate.shape, dtype=torch.float64), []
    for token in range(TOKENS):
        moved = step[token].unsqueeze(1)
        state = (moved * rate).exp() * state + moved * b[token] * x[token].unsqueeze(1)
        lines.append((state * c[token]).sum(1) + d * x[token])
    y = torch.stack(lines)
    return y if "gate" not in wide else y * wide["gate"] / (1 + (-wide["gate"]).exp())


def in_steps(case: Inputs, backend: str, sizes: Sequence[int]) -> torch.Tensor:
    """The row in slot 1, whose state an earlier request left, in chunks of `sizes`."""
    state = torch.full((3, *case.state), math.nan)
    parts, done = [], 0
    for size in sizes:
        parts.append(case.run(backend, slice(done, done + size), state, RecurrentMetadata.of_rows((1, done, size))))
        done += size
    assert state[[0, 2]].isnan().all() and state[1].isfinite().all()
    return torch.cat(parts)


def same(backend: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits; for PyTorch, whose rounding depends on the tensor's size, the same numbers."""
    close = torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    return close if backend == "reference" else torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_its_formula_in_any_chunks(backend: str, name: str) -> None:
    case = CASES[name]
    whole, expected = in_steps(case, backend, [TOKENS]), exact(case)
    bound = 2e-6 * expected.abs().max()
    assert (whole.double() - expected).abs().max() < bound
    for sizes in ([1] * TOKENS, [17, 1, 5]):
        assert same(backend, in_steps(case, backend, sizes), whole)
    # The control: a state that is taken one token late.
    late = in_steps(case, backend, [TOKENS - 1])
    assert (late[1:].double() - expected[: TOKENS - 2]).abs().max() > 100 * bound


@pytest.mark.parametrize("name", ["mamba", "mamba2, odd"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_batch_are_those_alone(backend: str, name: str) -> None:
    """In slots of any order, on any number of threads."""
    case, of = CASES[name], [(3, 7, 2), (0, 0, 4), (4, 1, 0), (1, 0, 9)]
    start = normal(9, 5, *case.state)
    expected, alone, first = start.clone(), [], 0
    for row in of:
        alone.append(case.run(backend, slice(first, first + row[2]), expected, RecurrentMetadata.of_rows(row)))
        first += row[2]
    for threads in (1, 5):
        torch.set_num_threads(threads)
        state = start.clone()
        together = case.run(backend, slice(0, first), state, RecurrentMetadata.of_rows(*of))
        torch.set_num_threads(1)
        assert same(backend, together, torch.cat(alone)) and same(backend, state, expected)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_every_instruction_set_gives_the_same_bits(name: str) -> None:
    results = [in_steps(CASES[name], isa, [9, 14]) for isa in ISAS]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused(backend: str) -> None:
    for case in (CASES["mamba"], CASES["mamba2"]):
        state = torch.zeros(2, *case.state)
        for slot in (-1, 2):
            with pytest.raises(IndexError, match=f"slot {slot} "):
                case.run(backend, slice(0, 3), state, RecurrentMetadata.of_rows((slot, 0, 3)))
        with pytest.raises(ValueError, match="state is float32"):
            case.run(backend, slice(0, 3), state.double(), RecurrentMetadata.of_rows((0, 0, 3)))
        for name, value in case.constants.items():
            if isinstance(value, torch.Tensor):
                wrong = Inputs(case.operation, case.tokens, {**case.constants, name: value[:-1]}, case.state)
                with pytest.raises(ValueError, match=f"{name} is float32"):
                    wrong.run(backend, slice(0, 3), state, RecurrentMetadata.of_rows((0, 0, 3)))
    with pytest.raises(ValueError, match="6 heads cannot share 4 groups"):
        mamba2(6, 3, 5, groups=4).run(
            backend, slice(0, 3), torch.zeros(1, 6, 5, 3), RecurrentMetadata.of_rows((0, 0, 3))
        )
